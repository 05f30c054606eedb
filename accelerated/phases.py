"""Two-phase inference: pseudo-queries do not depend on the tokens, so one pass over a source serves many sublayers.

    phase 1    all queries of a group of sublayers against the sources that exist when the group begins
    phase 2    each sublayer: the newer sources, merged with its part of phase 1 by online softmax

The result is exact (AttnRes, section 4.2). Phase 1 writes a sum for each query, and phase 2 reads it back. Two phases
pay if this costs less than the readings of sources that they save.
"""

# Cost of a sum, written and read back, in readings of a source; measured by `python -m benchmarks`, part "phases".
_COST_OF_SUM = 1.9
# Up to this many bytes, all sources stay in the caches, and reading them costs next to nothing.
_CACHED = 4 << 20


def two_phases_pay(sources: int, numbers: int) -> bool:
    """Return whether the sources are too large for the caches, so that each reading comes from memory.

    Args:
        sources: number of sources.
        numbers: number of numbers in each, which count as float32.
    """
    return sources * numbers * 4 > _CACHED


def group_size(block_size: int, sources: int, reads: int) -> int:
    """Return how many sublayers one phase 1 serves; 1 if two phases do not pay.

    A group of `k` blocks reads the n sources once instead of `k S` times. But each of its sublayers reads the newer
    blocks of the group, up to `k - 1`. On average a sublayer takes `n / (k S) + (k - 1) / 2` readings, and fewest for
    `k = sqrt(2 n / S)`.

    Args:
        block_size: S, in sublayers.
        sources: number n of sources when the group begins.
        reads: number of reads that remain in the pass, an upper bound.
    """
    blocks = max(1, round((2 * sources / block_size) ** 0.5))
    size = min(blocks * block_size, reads)
    return size if saves_readings(sources, size) else 1


def saves_readings(sources: int, queries: int) -> bool:
    """Return whether one pass over the sources and a sum for each query cost less than a pass for each query.

    Args:
        sources: number of sources.
        queries: number of queries that share the pass.
    """
    return sources * (queries - 1) > _COST_OF_SUM * queries


__all__ = ["group_size", "saves_readings", "two_phases_pay"]
