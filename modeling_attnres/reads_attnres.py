"""The reads of a forward pass without gradients: what holds for all of them is found out once, before the first.

A connection that is called by itself asks each time whether it and the norm after it do only what their classes do,
which kernels serve, and where its vectors lie. In decoding, where the weights of a sublayer push all else out of the
processor's caches, the answers would take longer than the attention over the depth.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .cpu_kernels_attnres import (
    has_numba,
    is_computed_now,
    kernels_take,
    loops,
    norm_served,
    phase_one_on_cpu,
    run_forward,
)
from .kernels_attnres import kernels_available, phase_one, read_fused
from .plain_attnres import has_hooks_on_all_modules, is_plain_rms_norm, is_untouched
from .residual_attnres import AttnRes, DepthState, ResidualNorm
from .two_phase_attnres import group_size, two_phases_pay

# A connection, its key norm, and the module that runs next, if one does.
Read = tuple[nn.Module, nn.Module, nn.Module | None]
Sources = tuple[Tensor, ...]
Phase = tuple[Tensor, ...] | None  # what phase 1 left for one read, or for all of a group
Norm = tuple[Tensor, float] | None  # weight and epsilon
_FEW_TOKENS = 16  # the inputs of so many, for all sublayers, are allocated at once
_ON_GPU = (torch.float32, torch.bfloat16, torch.float16)


class Reads:
    """The reads of one pass: of each sublayer in turn, and of the output. Those of a device are made by `of`.

    Args:
        reads: of all of them, in order.
        queries: `w * g` of each, `[reads, D]` in float32.
    """

    def __init__(self, reads: Sequence[Read], queries: Tensor):
        self._queries = queries
        self._places = {connection.sublayer: place for place, (connection, _, _) in enumerate(reads)}
        self._key_norms = [key_norm for _, key_norm, _ in reads]
        # Of the norms that the kernels can compute, if they are of the sources' dtype.
        self._norms: list[Norm] = [
            (norm.weight, norm.variance_epsilon) if norm is not None and is_plain_rms_norm(norm) else None
            for _, _, norm in reads
        ]
        # The sublayers that phase 1 served, the sources that it read, and what it returned.
        self._group: range = range(0)
        self._in_phase: Sources = ()
        self._phase: Phase = None

    @staticmethod
    def of(reads: Sequence[Read]) -> "Reads | None":
        """`None` where no kernels run, or a connection is of another kind or does more when it is called."""
        if type(reads[0][0]) is not AttnRes or not is_computed_now() or has_hooks_on_all_modules():
            return None
        first = reads[0][0].weight
        of_device = _CpuReads if first.is_cpu else _GpuReads
        if not (has_numba() if first.is_cpu else kernels_available(first.device, first.shape[-1])):
            return None
        weights, key_norm_weights = [], []
        for connection, key_norm, _ in reads:
            if type(connection) is not AttnRes or type(key_norm) is not ResidualNorm:
                return None
            if not (is_untouched(connection) and is_untouched(key_norm)):
                return None
            weights.append(connection.weight)
            key_norm_weights.append(key_norm.weight)
        if any(
            type(weight) is not nn.Parameter or weight.device != first.device for weight in weights + key_norm_weights
        ):
            return None
        return of_device(reads, torch.cat(weights).float() * torch.stack(key_norm_weights).float())

    def read(self, connection: AttnRes, state: DepthState) -> tuple[Tensor, bool]:
        """The input of a sublayer `[batch, seq, hidden]`; or, and then `True`, what the norm after it makes of that."""
        sources = state if isinstance(state, tuple) else (state,)
        place = self._places[connection.sublayer]
        if not self._take(sources):
            return connection(state, self._key_norms[place]())[0], False
        # What phase 1 read may be no more.
        if place not in self._group or any(a is not b for a, b in zip(self._in_phase, sources)):
            self._begin_group(place, connection, sources)
        norm = self._norms[place]
        if norm is not None and not self._takes_norm(norm[0], sources):
            norm = None
        phase = None if self._phase is None else tuple(part[place - self._group.start] for part in self._phase)
        multiplier = len(sources) if connection.scale == "sum" else 1
        return self._read(place, multiplier, connection.eps, sources, phase, norm), norm is not None

    def _begin_group(self, start: int, connection: AttnRes, sources: Sources) -> None:
        # Within a block the last source is a sum that still grows.
        is_boundary = connection.sublayer % connection.block_size == 0
        count, to_come = len(sources), len(self._norms) - start
        pays = is_boundary and two_phases_pay(count, sources[0].numel())
        size = group_size(connection.block_size, count, to_come) if pays else 1
        self._group, self._in_phase = range(start, start + size), ()
        self._phase = None  # its memory, before that of the next
        if size > 1:
            self._phase = self._phase_one(self._queries[start : start + size], connection.eps, sources)
            self._in_phase = sources

    # What a device has of its own: whether its kernels take these sources, and this norm after them; the phases.
    def _take(self, sources: Sources) -> bool:
        raise NotImplementedError

    def _takes_norm(self, weight: Tensor, sources: Sources) -> bool:
        raise NotImplementedError

    def _phase_one(self, queries: Tensor, eps: float, sources: Sources) -> Phase:
        raise NotImplementedError

    def _read(self, place: int, multiplier: int, eps: float, sources: Sources, phase: Phase, norm: Norm) -> Tensor:
        raise NotImplementedError


class _CpuReads(Reads):
    """By the kernels of `cpu_kernels_attnres`, which take addresses: those of sources seen before are known."""

    def __init__(self, reads: Sequence[Read], queries: Tensor):
        super().__init__(reads, queries)
        self._start = queries.data_ptr()
        # The sources that were read last, where their numbers lie, and copies of those that are not contiguous.
        self._sources: list[Tensor] = []
        self._addresses: list[int] = []
        self._copies: dict[int, Tensor] = {}
        self._results: list[Tensor] = []  # for the reads to come

    def _take(self, sources: Sources) -> bool:
        known, addresses = self._sources, self._addresses
        for i, source in enumerate(sources):
            if i < len(known) and source is known[i]:
                continue
            del known[i:], addresses[i:]
            # In this order: to load the loops takes seconds, which what is small is not worth.
            if not kernels_take(source, sources) or loops() is None:
                return False
            if not source.is_contiguous():
                source = self._copies[i] = source.contiguous()
            known.append(sources[i])
            addresses.append(source.data_ptr())
        return True

    def _takes_norm(self, weight: Tensor, sources: Sources) -> bool:
        return norm_served(weight, sources)

    def _phase_one(self, queries: Tensor, eps: float, sources: Sources) -> Phase:
        return phase_one_on_cpu(queries, eps, sources)

    def _read(self, place: int, multiplier: int, eps: float, sources: Sources, phase: Phase, norm: Norm) -> Tensor:
        result = self._result(sources[0])
        query = self._start + 4 * place * result.shape[-1]
        begun = (0, 0) if phase is None else (phase[0].data_ptr(), phase[1].data_ptr())
        norm_weight, norm_eps = (0, 0.0) if norm is None else (norm[0].data_ptr(), norm[1])
        run_forward(
            result, multiplier, query, begun, self._addresses[len(self._in_phase) :], eps, norm_weight, norm_eps
        )
        return result

    def _result(self, like: Tensor) -> Tensor:
        if like.numel() > _FEW_TOKENS * like.shape[-1]:
            return torch.empty_like(like, memory_format=torch.contiguous_format)
        if not self._results or self._results[-1].shape != like.shape or self._results[-1].dtype is not like.dtype:
            self._results = list(torch.empty(len(self._norms), *like.shape, dtype=like.dtype).unbind())
        return self._results.pop()


class _GpuReads(Reads):
    """By the Triton kernels of `kernels_attnres`."""

    def _take(self, sources: Sources) -> bool:
        dtype, device = sources[0].dtype, self._queries.device
        return dtype in _ON_GPU and all(
            type(source) is Tensor and source.dtype is dtype and source.device == device for source in sources
        )

    def _takes_norm(self, weight: Tensor, sources: Sources) -> bool:
        is_plain = type(weight) is nn.Parameter and weight.device == self._queries.device
        return is_plain and weight.dtype is sources[0].dtype

    def _phase_one(self, queries: Tensor, eps: float, sources: Sources) -> Phase:
        return phase_one(queries, eps, *sources)

    def _read(self, place: int, multiplier: int, eps: float, sources: Sources, phase: Phase, norm: Norm) -> Tensor:
        query, fresh = self._queries[place], sources[len(self._in_phase) :]
        return read_fused(query, eps, multiplier, fresh, phase, sources[0].dtype, *(norm or (None, 0.0)))


__all__ = ["Reads"]
