"""The inference plan on a GPU, which reads by the Triton kernels of this folder."""

from torch import Tensor

from ..inference_plan import InferencePlan, Norm, Phase, Sources
from . import launch


class GpuPlan(InferencePlan):
    """A plan that reads by the Triton kernels."""

    def _prepare(self, sources: Sources) -> Sources | None:
        dtype, device, shape = sources[0].dtype, self._queries.device, sources[0].shape
        are_served = dtype in launch.DTYPES and all(
            type(source) is Tensor and source.dtype is dtype and source.device == device and source.shape == shape
            for source in sources
        )
        return sources if are_served else None

    def _takes_norm(self, weight: Tensor, sources: Sources) -> bool:
        fits = weight.dtype is sources[0].dtype and weight.shape == sources[0].shape[-1:]
        return fits and weight.device == self._queries.device

    def _phase_one(self, queries: Tensor, eps: float, prepared: Sources) -> Phase:
        return launch.phase_one(queries, eps, *prepared)

    def _read(self, position: int, multiplier: int, eps: float, prepared: Sources, phase: Phase, norm: Norm) -> Tensor:
        newer = prepared[len(self._phase_sources) :]
        norm_weight, norm_eps = norm or (None, 0.0)
        query, dtype = self._queries[position], prepared[0].dtype
        return launch.read_fused(query, eps, multiplier, newer, phase, dtype, norm_weight, norm_eps)


__all__ = ["GpuPlan"]
