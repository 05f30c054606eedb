"""Find the moment at which a rank of a pipeline keeps most for backward passes."""

from collections.abc import Sequence

from .schedules import Action


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


__all__ = ["fullest_moment"]
