"""Simulate pipeline schedules, and count the bytes that ranks send and keep (AttnRes, section 4.1).

With P ranks, V stages on each and C = P V stages in all, stage s lies on rank s mod P. A naive pipeline sends the whole
depth state at each of the C - 1 transitions. With cross-stage caching a rank keeps the blocks that it has received or
made, and a transition carries only the tensors that the receiver lacks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B")


class Action(NamedTuple):
    """One computation of a rank: a pass of a stage over a micro-batch."""

    stage: int
    is_forward: bool
    microbatch: int


def rank_actions(schedule: str, rank: int, ranks: int, microbatches: int, virtual: int = 1) -> list[Action]:
    """Return the computations of a rank in their order, as the schedules of `torch.distributed.pipelining` have it.

    Args:
        schedule: One of [`SCHEDULES`].
        rank: Number of the rank, from 0.
        ranks: Number P of ranks.
        microbatches: Number of micro-batches of a step.
        virtual: Number V of stages on each rank; 1 except for `Interleaved1F1B`.

    Raises:
        ValueError: The schedule does not exist, or cannot run with these numbers.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"There is no schedule {schedule!r}: use one of {', '.join(SCHEDULES)}.")
    if schedule != "Interleaved1F1B" and virtual != 1:
        raise ValueError(f"{schedule} runs one stage on each rank, not {virtual}: use Interleaved1F1B.")
    if schedule == "1F1B" and microbatches < ranks:
        raise ValueError(f"1F1B needs at least as many micro-batches as ranks ({ranks}), not {microbatches}.")
    rounds = max(1, microbatches // ranks)
    if schedule == "Interleaved1F1B" and microbatches % rounds:
        raise ValueError(f"Interleaved1F1B needs a multiple of {rounds} micro-batches, not {microbatches}.")
    # Each rank takes `together` micro-batches through one of its stages before it goes on to the next stage.
    together, total = (microbatches // rounds, microbatches * virtual) if virtual > 1 else (microbatches, microbatches)
    forward = [
        Action(i // together % virtual * ranks + rank, True, _microbatch(i, together, virtual)) for i in range(total)
    ]
    backward = [
        Action((virtual - 1 - i // together % virtual) * ranks + rank, False, _microbatch(i, together, virtual))
        for i in range(total)
    ]
    if schedule == "GPipe":
        return forward + backward
    ahead = ranks - 1 - rank
    warmup = min(total, (virtual - 1) * together + 2 * ahead) if schedule == "Interleaved1F1B" else ahead
    pairs = [action for pair in zip(forward[warmup:], backward) for action in pair]
    return [*forward[:warmup], *pairs, *backward[total - warmup :]]


def _microbatch(index: int, together: int, virtual: int) -> int:
    """Return the micro-batch of a rank's i-th pass: `together` for each stage, round by round."""
    return index // (together * virtual) * together + index % together


@dataclass(frozen=True)
class Simulation:
    """The times of a simulated step, in the unit of the stage times.

    Attributes:
        total: Time from the first computation to the end of the last.
        busy: Computing time of each rank.
    """

    total: float
    busy: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Share of all ranks' time in which they wait."""
        return 1 - sum(self.busy) / (len(self.busy) * self.total)


def simulate(
    actions: Sequence[Sequence[Action]],
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: Sequence[float] | None = None,
) -> Simulation:
    """Simulate a step: each rank runs its actions in order, and waits until each action has its inputs.

    A transfer takes time between the ends of two computations, and keeps neither rank from computing.

    Args:
        actions: The actions of each rank, of [`rank_actions`].
        forward: Time of the forward pass of each stage.
        backward: Time of the backward pass of each stage.
        transfer: Time of the transfer between each stage and the next, in either direction; zero by default.

    Raises:
        ValueError: The actions wait for each other, or not every stage has its times.
    """
    stages = 1 + max(action.stage for of_rank in actions for action in of_rank)
    transfer = [0.0] * (stages - 1) if transfer is None else transfer
    if not len(forward) == len(backward) == len(transfer) + 1 == stages:
        raise ValueError(
            f"{stages} stages need {stages} times of each pass and {stages - 1} of transfers, "
            f"not {len(forward)}, {len(backward)} and {len(transfer)}."
        )
    ends: dict[Action, float] = {}
    clocks, places = [0.0] * len(actions), [0] * len(actions)
    while any(place < len(of_rank) for place, of_rank in zip(places, actions)):
        progress = False
        for rank, of_rank in enumerate(actions):
            while places[rank] < len(of_rank):
                action = of_rank[places[rank]]
                needed = _needed(action, stages, transfer)
                if any(other not in ends for other in needed):
                    break
                start = max([clocks[rank], *(ends[other] + time for other, time in needed.items())])
                clocks[rank] = ends[action] = start + (forward if action.is_forward else backward)[action.stage]
                places[rank] += 1
                progress = True
        if not progress:
            raise ValueError("The actions of the ranks wait for each other: a schedule must not.")
    busy = (sum((forward if a.is_forward else backward)[a.stage] for a in of_rank) for of_rank in actions)
    return Simulation(max(clocks), tuple(busy))


def _needed(action: Action, stages: int, transfer: Sequence[float]) -> dict[Action, float]:
    """Return the actions that must have ended, each with the time that its result takes to arrive."""
    stage, is_forward, microbatch = action
    if is_forward:
        return {} if stage == 0 else {Action(stage - 1, True, microbatch): transfer[stage - 1]}
    if stage == stages - 1:
        return {Action(stage, True, microbatch): 0.0}
    return {Action(stage + 1, False, microbatch): transfer[stage]}


def sent_bytes(states: Sequence[Mapping[int, int]], ranks: int, cached: bool) -> list[int]:
    """Return the bytes that each transition of one micro-batch's forward pass sends. Its gradients are as many.

    Args:
        states: For each transition the state that crosses it: identities of its tensors and their bytes.
        ranks: Number P of ranks.
        cached: Whether ranks keep the tensors that they receive or make.
    """
    known: list[set[int]] = [set() for _ in range(ranks)]
    sent = []
    for stage, state in enumerate(states):
        # The sender has made all of the state that it has not received.
        known[stage % ranks] |= state.keys()
        receiver = known[(stage + 1) % ranks]
        missing = state.keys() - receiver if cached else state.keys()
        # Between two stages of one rank nothing is sent.
        sent.append(sum(state[name] for name in missing) if ranks > 1 else 0)
        receiver |= state.keys()
    return sent


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


__all__ = [
    "SCHEDULES",
    "Action",
    "Simulation",
    "fullest_moment",
    "rank_actions",
    "sent_bytes",
    "simulate",
]
