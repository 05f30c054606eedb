"""Two-phase inference: pseudo-queries do not depend on the tokens, so one pass over a source serves many sublayers.

    phase 1    all queries of a group of sublayers against the sources that exist when the group begins
    phase 2    each sublayer: the newer sources, merged with its part of phase 1 by online softmax

Exact (AttnRes, section 4.2). Phase 1 writes a sum for each query, which phase 2 reads back: it pays where that is less
than the readings of sources that it saves.
"""

# Measured by `python -m benchmarks`, part "phases": what a sum costs, written and read back, in readings of a source.
_COST_OF_SUM = 1.9
_CACHED = 4 << 20  # bytes of all sources up to which they stay in the caches, and reading them costs next to nothing


def two_phases_pay(sources: int, numbers: int) -> bool:
    """Whether sources of so many numbers each, in float32, have to come from memory each time."""
    return sources * numbers * 4 > _CACHED


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


__all__ = ["group_size", "saves_readings", "two_phases_pay"]
