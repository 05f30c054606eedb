"""Partition a sequence of costs into consecutive parts whose most expensive part costs as little as possible."""

from collections.abc import Sequence
from itertools import accumulate


def partition_layers(costs: Sequence[float], stages: int, last: float = 0.0) -> list[slice]:
    """Partition layers into stages so that the most expensive stage costs as little as possible.

    Args:
        costs: The cost of each layer.
        stages: Number of stages, at most that of layers.
        last: A cost that is added to the last stage, such as that of the head.

    Returns:
        The layers of each stage, at least one. Among the best partitions, the one whose earlier stages are largest.
    """
    sums = [0.0, *accumulate(costs)]
    # The least cost is the sum of some layers in a row, with the head or without it.
    candidates = {end - start for i, start in enumerate(sums) for end in sums[i + 1 :]}
    candidates = sorted(candidates | {sums[-1] - start + last for start in sums[:-1]})
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        if _fill(sums, stages, last, candidates[middle]):
            high = middle
        else:
            low = middle + 1
    return _fill(sums, stages, last, candidates[low])


def _fill(sums: Sequence[float], stages: int, last: float, limit: float) -> list[slice]:
    """Give each stage as many layers as the limit allows. Return an empty list if the last stage exceeds it."""
    layers, start, filled = len(sums) - 1, 0, []
    for following in range(stages - 1, 0, -1):
        most = layers - following  # the following stages need a layer each
        end = max((j for j in range(start + 1, most + 1) if sums[j] - sums[start] <= limit), default=None)
        if end is None:
            return []
        filled.append(slice(start, end))
        start = end
    return [*filled, slice(start, layers)] if sums[layers] - sums[start] + last <= limit else []


__all__ = ["partition_layers"]
