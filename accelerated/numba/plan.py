"""The inference plan on a CPU, which reads by the compiled loops of this folder."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..inference_plan import InferencePlan, Norm, Phase, Read, Sources, make_plan
from . import call, kernels

_FEW_TOKENS = 16  # up to this many tokens, the inputs of all sublayers are allocated at once


class CpuPlan(InferencePlan):
    """A plan that reads by the compiled loops. `make_cpu_plan` sets `supports` and `pays`; see `Implementation`."""

    supports: Callable[[Tensor, Sequence[Tensor]], str | None]
    pays: Callable[[Tensor, Sequence[Tensor]], bool]

    def __init__(self, reads: Sequence[Read], queries: Tensor):
        super().__init__(reads, queries)
        self._supported: torch.dtype | None = None  # the last dtype of sources that `supports` has accepted
        self._each_query = queries.unbind()
        self._results: list[Tensor] = []  # memory for the results of coming reads

    def _prepare(self, sources: Sources) -> call.CheckedSources | None:
        # `pays` comes first, because `supports` loads the loops, in half a second, or in many on a new machine. That is
        # too long for a small model. A token of any size is taken, because in generation more tokens follow.
        is_token = sources[0].shape[-2:-1] == (1,)
        if not (is_token or self.pays(self._each_query[0], sources)):
            return None
        dtype = sources[0].dtype
        if dtype is not self._supported:
            if self.supports(self._each_query[0], sources) is not None:
                return None
            self._supported = dtype
        try:
            return call.checked(sources)
        except call.Unfit:
            return None

    def _takes_norm(self, weight: Tensor, sources: Sources) -> bool:
        fits = weight.dtype is sources[0].dtype and weight.shape == sources[0].shape[-1:]
        return fits and weight.is_cpu and weight.is_contiguous()

    def _phase_one(self, queries: Tensor, eps: float, prepared: call.CheckedSources) -> Phase:
        return kernels.phase_one(queries, eps, prepared)

    def _read(
        self, position: int, multiplier: int, eps: float, prepared: call.CheckedSources, phase: Phase, norm: Norm
    ) -> Tensor:
        result = self._result(prepared.shape, prepared.dtype)
        newer = prepared if phase is None else prepared.after(len(self._phase_sources))
        norm_weight, norm_eps = norm or (None, 0.0)
        query = self._each_query[position]
        call.forward(query, newer, result, None, multiplier, eps, norm_weight, norm_eps, phase)
        return result

    def _result(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return memory for a result. For few tokens, the memory of all reads is allocated at once, which is faster."""
        if shape.numel() > _FEW_TOKENS * shape[-1]:
            return torch.empty(shape, dtype=dtype, device="cpu")
        if not self._results or self._results[-1].shape != shape or self._results[-1].dtype is not dtype:
            self._results = list(torch.empty((len(self._norms), *shape), dtype=dtype, device="cpu").unbind())
        return self._results.pop()


def make_cpu_plan(
    reads: Sequence[Read],
    supports: Callable[[Tensor, Sequence[Tensor]], str | None],
    pays: Callable[[Tensor, Sequence[Tensor]], bool],
) -> InferencePlan | None:
    """Make a plan that reads by the loops, or return `None`; see [`make_plan`].

    Args:
        reads: all reads of the pass, in order.
        supports: as in [`Implementation`].
        pays: as in [`Implementation`].
    """
    plan = make_plan(CpuPlan, "cpu", reads)
    if plan is not None:
        plan.supports, plan.pays = supports, pays
    return plan


__all__ = ["CpuPlan", "make_cpu_plan"]
