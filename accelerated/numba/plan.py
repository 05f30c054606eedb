"""The inference plan on a CPU, which reads by the compiled loops of this folder."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..inference_plan import InferencePlan, Phase, Read, Sources, make_plan
from . import call, kernels

_FEW_TOKENS = 16  # up to this many tokens, the inputs of all sublayers are allocated at once


class CpuPlan(InferencePlan):
    """A plan that reads by the compiled loops. `make_cpu_plan` sets `supports` and `pays`; see `Implementation`."""

    supports: Callable[[Tensor, Sequence[Tensor]], str | None]
    pays: Callable[[Tensor, Sequence[Tensor]], bool]

    def __init__(self, reads: Sequence[Read], queries: Tensor):
        super().__init__(reads, queries)
        self._supported: torch.dtype | None = None  # the last dtype of sources that `supports` has accepted
        self._query_addresses = call.row_addresses(queries, torch.float32)
        self._sources: call.CheckedSources | None = None  # of the last read
        self._results: list[tuple[Tensor, int]] = []  # memory for the results of coming reads, with its addresses

    def _prepare(self, sources: Sources) -> call.CheckedSources | None:
        # `pays` comes first, because `supports` loads the loops, in half a second, or in many on a new machine. That is
        # too long for a small model. A token of any size is taken, because in generation more tokens follow.
        is_token = sources[0].shape[-2:-1] == (1,)
        if not (is_token or self.pays(self._queries[0], sources)):
            return None
        dtype = sources[0].dtype
        if dtype is not self._supported:
            if self.supports(self._queries[0], sources) is not None:
                return None
            self._supported = dtype
        try:
            self._sources = call.checked(sources, self._sources)
        except call.Unfit:
            return None
        return self._sources

    def _prepare_norm(self, weight: Tensor, prepared: call.CheckedSources) -> int | None:
        return call.address(weight, prepared.shape[-1:], prepared.dtype)

    def _phase_one(self, queries: Tensor, eps: float, prepared: call.CheckedSources) -> Phase:
        return kernels.phase_one(queries, eps, prepared)

    def _read(
        self,
        position: int,
        multiplier: int,
        eps: float,
        prepared: call.CheckedSources,
        phase: Phase,
        norm_weight: int | None,
        norm_eps: float,
    ) -> Tensor:
        result, address = self._result(prepared.shape, prepared.dtype)
        newer = prepared if phase is None else prepared.after(len(self._phase_sources))
        call.read(self._query_addresses[position], newer, address, multiplier, eps, norm_weight or 0, norm_eps, phase)
        return result

    def _result(self, shape: torch.Size, dtype: torch.dtype) -> tuple[Tensor, int]:
        """Return memory for a result, and its address. For few tokens, that of all reads is allocated at once."""
        if self._results and self._results[-1][0].shape == shape and self._results[-1][0].dtype is dtype:
            return self._results.pop()
        number = len(self._norms) if shape.numel() <= _FEW_TOKENS * shape[-1] else 1
        memory = torch.empty((number, *shape), dtype=dtype, device="cpu")
        self._results = list(zip(memory.unbind(), call.row_addresses(memory, dtype)))
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
