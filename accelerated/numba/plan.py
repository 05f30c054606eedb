"""The inference plan on a CPU, which reads by the compiled loops of this folder."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..inference_plan import InferencePlan, Norm, Phase, Sources
from ..phases import two_phases_pay
from ..plain import Read
from . import call, kernels
from .support import pays, supports

if TYPE_CHECKING:
    from ..interface import Connection

_FEW_TOKENS = 16  # up to this many, the results of all reads are allocated at once


class CpuPlan(InferencePlan):
    """A plan that reads by the compiled loops."""

    def __init__(self, reads: Sequence[Read], queries: Tensor):
        super().__init__(reads, queries)
        self._supported: torch.dtype | None = None  # the last dtype of sources that `supports` has accepted
        # The kind of sources that `read` takes in one step, and memory for the results of coming reads.
        self._few: call.FewTokens | None = None
        self._results: list[Tensor] = []

    def read(self, connection: "Connection", state: Tensor | Sources) -> tuple[Tensor, bool, Tensor | Sources]:
        """Compute a read; see the base class. Few tokens, as in decoding, are read in one step."""
        sources = state if isinstance(state, tuple) else (state,)
        if torch.is_grad_enabled() or not (self._results or self._begin_few(sources)) or self._few is None:
            return super().read(connection, state)
        position = self._positions[id(connection)]
        norm_weight, norm_eps = self._norms[position] or (None, 0.0)
        is_sum, result = connection.scale == "sum", self._results[-1]
        is_normed = call.read_few(self._few, position, sources, result, is_sum, connection.eps, norm_weight, norm_eps)
        if is_normed is None:  # the sources are of another kind
            self._results = []
            return super().read(connection, state)
        self._results.pop()  # each result has memory of its own
        return result, is_normed, state

    def _begin_few(self, sources: Sources) -> bool:
        """Prepare for reads of few tokens in one step. Return `False` if sources like these are not read so."""
        shape, dtype, number = sources[0].shape, sources[0].dtype, len(self._norms)
        if shape[-1:] != self._queries.shape[1:] or shape.numel() > _FEW_TOKENS * shape[-1]:
            return False
        # No read of the pass has more sources than there are reads.
        if two_phases_pay(number, shape.numel()) or not self._are_served(sources):
            return False
        self._few = call.FewTokens(self._queries, shape, dtype)
        self._results = list(torch.empty((number, *shape), dtype=dtype, device="cpu").unbind())
        return True

    def _are_served(self, sources: Sources) -> bool:
        """Return whether the loops run on sources of this shape and dtype."""
        # `pays` comes first, because `supports` loads the loops, which takes half a second, or many seconds where they
        # must be compiled first. That is too long for a small model. A token of any size is taken, because in
        # generation more tokens follow.
        is_token = sources[0].shape[-2:-1] == (1,)
        if not (is_token or pays(self._queries[0], sources)):
            return False
        dtype = sources[0].dtype
        if dtype is not self._supported:
            if supports(self._queries[0], sources) is not None:
                return False
            self._supported = dtype
        return True

    def _prepare(self, sources: Sources) -> call.CheckedSources | None:
        try:
            return call.checked(sources) if self._are_served(sources) else None
        except call.Unfit:
            return None

    def _takes_norm(self, weight: Tensor, sources: Sources) -> bool:
        fits = weight.dtype is sources[0].dtype and weight.shape == sources[0].shape[-1:]
        return fits and weight.is_cpu and weight.is_contiguous() and not weight.is_neg()

    def _phase_one(self, queries: Tensor, eps: float, prepared: call.CheckedSources) -> Phase:
        return kernels.phase_one(queries, eps, prepared)

    def _read(
        self, position: int, multiplier: int, eps: float, prepared: call.CheckedSources, phase: Phase, norm: Norm
    ) -> Tensor:
        result = torch.empty(prepared.shape, dtype=prepared.dtype, device="cpu")
        newer = prepared if phase is None else prepared.after(len(self._phase_sources))
        norm_weight, norm_eps = norm or (None, 0.0)
        query = self._queries[position]
        call.forward(query, newer, result, None, multiplier, eps, norm_weight, norm_eps, phase)
        return result


__all__ = ["CpuPlan"]
