"""Two-phase inference: pseudo-queries do not depend on the tokens, so one pass over a source serves many sublayers.

    phase 1    all queries of a group of sublayers against the sources that exist when the group begins
    phase 2    each sublayer: the newer sources, merged with its part of phase 1 by online softmax

Exact (AttnRes, section 4.2). Phase 1 writes a sum for each query, which phase 2 reads back: it pays where that is less
than the readings of sources that it saves.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .cpu_kernels_attnres import Phase, cpu_kernels_serve, norm_served, phase_one_on_cpu, phase_two_on_cpu
from .residual_attnres import AttnRes, DepthState, ResidualNorm

# Measured by `python -m benchmarks`, part "phases": what a sum costs, written and read back, in readings of a source;
# and the bytes of a source up to which it stays in the cache, so that reading it costs next to nothing.
_COST_OF_SUM = 1.9
_CACHED = 1 << 20


def two_phases_pay(tokens: int, width: int) -> bool:
    """Whether sources of so many float32 have to come from memory each time."""
    return tokens * width * 4 > _CACHED


def group_size(block_size: int, sources: int, reads: int) -> int:
    """How many sublayers one phase 1 serves, of the `reads` to come; one where two phases do not pay.

    A group of `k` blocks reads the sources once instead of `k S` times, but its newer blocks, up to `k - 1`, for each
    sublayer: `n / (k S) + (k - 1) / 2` is least at `k = sqrt(2 n / S)`.
    """
    blocks = max(1, round((2 * sources / block_size) ** 0.5))
    size = min(blocks * block_size, reads)
    return size if saves_readings(sources, size) else 1


def saves_readings(sources: int, queries: int) -> bool:
    """Whether one pass over the sources and a sum for each query cost less than a pass for each query."""
    return sources * (queries - 1) > _COST_OF_SUM * queries


class TwoPhases:
    """The reads of one forward pass without gradients, in the order of the sublayers.

    Args:
        reads: the connections with their key norms, of all sublayers and of the output.
    """

    def __init__(self, reads: Sequence[tuple[AttnRes, ResidualNorm]]):
        self._reads = {connection.sublayer: (connection, norm) for connection, norm in reads}
        self._group = range(0)  # the sublayers that phase 1 served, and what it read and returned
        self._sources = 0
        self._queries: Tensor | None = None
        self._phase: Phase | None = None

    @classmethod
    def of(cls, reads: Sequence[tuple[nn.Module, nn.Module]]) -> "TwoPhases | None":
        """`None` where a module is of another kind, or does more when it is called: then each has to be called."""
        for modules in reads:
            for module, own_class in zip(modules, (AttnRes, ResidualNorm)):
                if type(module) is not own_class or "forward" in vars(module) or module._forward_pre_hooks:
                    return None
        return cls(reads)

    def read(self, connection: AttnRes, norm_weight: Tensor, state: DepthState, norm: nn.Module | None) -> Tensor:
        """What `connection(state, norm_weight, norm)` returns first."""
        sources = state if isinstance(state, tuple) else (state,)
        if connection.sublayer not in self._group:
            self._begin_group(connection, sources)
        if len(self._group) < 2 or not cpu_kernels_serve(connection.weight, sources):
            return connection(state, norm_weight, norm)[0]
        place = connection.sublayer - self._group.start
        phase = self._phase[0][place], self._phase[1][place]
        fused = norm if norm is not None and norm_served(norm, sources) else None
        result = phase_two_on_cpu(
            self._queries[place],
            connection.eps,
            len(sources) if connection.scale == "sum" else 1,
            phase,
            sources[0].dtype,
            sources[self._sources :],
            fused,
        )
        return result if norm is fused else norm(result)

    def _begin_group(self, connection: AttnRes, sources: tuple[Tensor, ...]) -> None:
        start = connection.sublayer
        size = 1
        # Within a block the last source is a sum that still grows.
        if start % connection.block_size == 0 and cpu_kernels_serve(connection.weight, sources):
            size = group_size(connection.block_size, len(sources), len(self._reads) - start)
        self._group = range(start, start + size)
        self._phase = None  # its memory, before that of the next
        if size > 1:
            group = [self._reads[number] for number in self._group]
            self._queries = torch.stack([query.weight[0].float() * norm.weight.float() for query, norm in group])
            self._phase = phase_one_on_cpu(self._queries, connection.eps, sources)
            self._sources = len(sources)


__all__ = ["TwoPhases", "group_size", "saves_readings", "two_phases_pay"]
