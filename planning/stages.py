"""Divide the layers of a model into stages, and find the moment at which a rank keeps most for backward passes."""

from collections.abc import Sequence
from itertools import accumulate

from .schedules import Action


def divide_layers(costs: Sequence[float], stages: int, last: float = 0.0) -> list[slice]:
    """Divide layers so that the most expensive stage costs as little as possible.

    Args:
        costs: The cost of each layer.
        stages: Number of stages, at most that of layers.
        last: A cost that is added to the last stage, such as that of the head.

    Returns:
        The layers of each stage, at least one. Among the best divisions, the one whose earlier stages are largest.
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
    layers, start, divided = len(sums) - 1, 0, []
    for following in range(stages - 1, 0, -1):
        most = layers - following  # the following stages need a layer each
        end = max((j for j in range(start + 1, most + 1) if sums[j] - sums[start] <= limit), default=None)
        if end is None:
            return []
        divided.append(slice(start, end))
        start = end
    return [*divided, slice(start, layers)] if sums[layers] - sums[start] + last <= limit else []


def fullest_moment(actions: Sequence[Action], kept: Sequence[float]) -> list[int]:
    """Find the moment at which a rank keeps most for backward passes.

    A micro-batch passes a rank's stages in their order, and in the backward pass in the opposite order.

    Args:
        actions: The actions of the rank, of `schedules.rank_actions`.
        kept: `kept[n]` is the number of bytes that a micro-batch holds after n of the rank's stages.

    Returns:
        For each micro-batch that waits for a backward pass at that moment, the number of stages that it has passed.
    """
    passed: dict[int, int] = {}
    now, largest, moment = 0.0, -1.0, []
    for action in actions:
        before = passed.get(action.microbatch, 0)
        passed[action.microbatch] = after = before + (1 if action.is_forward else -1)
        now += kept[after] - kept[before]
        if now > largest:
            largest, moment = now, [number for number in passed.values() if number]
    return moment


__all__ = ["divide_layers", "fullest_moment"]
