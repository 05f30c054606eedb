"""Simulated pipelines run the schedules of PyTorch, wait as long as a clock says, and send the bytes of the paper."""

from itertools import combinations, pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from attnres.planning.schedules import (
    Action,
    fullest_moment,
    rank_actions,
    sent_bytes,
    simulate,
)
from attnres.utils.partition import partition_layers

numbers = st.integers(1, 6)


def actions_of(schedule: str, ranks: int, microbatches: int, virtual: int = 1) -> list[list[Action]]:
    return [rank_actions(schedule, rank, ranks, microbatches, virtual) for rank in range(ranks)]


class StandIn(SimpleNamespace):
    """An object with these fields. Its other methods, whose names depend on the release of PyTorch, do nothing."""

    def __getattr__(self, name: str):
        return lambda *arguments, **options: []


def torch_actions(schedule: str, rank: int, ranks: int, microbatches: int, virtual: int) -> list[Action]:
    """Return the computations of a rank under a schedule of PyTorch, without the processes that would run them."""
    if schedule == "Interleaved1F1B":
        rounds = max(1, microbatches // ranks)
        engine = SimpleNamespace(
            _n_microbatches=microbatches, pp_group_size=ranks, n_local_stages=virtual,
            number_of_rounds=rounds, microbatches_per_round=microbatches // rounds,
        )  # fmt: skip
        order = torch_schedules.ScheduleInterleaved1F1B._calculate_single_rank_operations(engine, rank)
        kinds = {"F": True, "B": False}
        compute = [action for action in order if action is not None and action.computation_type.value in kinds]
        return [Action(a.stage_index, kinds[a.computation_type.value], a.microbatch_index) for a in compute]
    # The other schedules are loops that call a stage, so this stage records the calls.
    actions: list[Action] = []

    def record(is_forward: bool):
        return lambda microbatch, *arguments, **options: actions.append(Action(rank, is_forward, microbatch))

    stage = StandIn(stage_index=rank, forward_one_chunk=record(True), backward_one_chunk=record(False))
    engine = StandIn(
        _stage=stage, _n_microbatches=microbatches, _num_stages=ranks,
        _check_inputs=lambda *arguments: ([()] * microbatches, [{}] * microbatches),
    )  # fmt: skip
    getattr(torch_schedules, f"Schedule{schedule}")._step_microbatches(engine)
    return actions


@pytest.mark.parametrize(
    ("schedule", "ranks", "microbatches", "virtual"),
    [
        *(("GPipe", ranks, count, 1) for ranks in (1, 2, 4) for count in (1, 3, 8)),
        *(("1F1B", ranks, count, 1) for ranks in (1, 2, 4, 5) for count in (5, 8)),
        *(("Interleaved1F1B", ranks, count, v) for ranks in (2, 4) for count in (2, 4, 8, 10) for v in (1, 2, 3)),
    ],
)
def test_each_rank_computes_in_the_order_of_pytorchs_schedule(schedule, ranks, microbatches, virtual):
    for rank in range(ranks):
        ours = rank_actions(schedule, rank, ranks, microbatches, virtual)
        assert ours == torch_actions(schedule, rank, ranks, microbatches, virtual)


def ticks(actions: list[list[Action]], forward: list[int], backward: list[int], transfer: list[int]) -> int:
    """Run a schedule tick by tick, and return the number of ticks: a second way to compute a step's time."""
    waiting, running, arrives, now, stages = [[*a] for a in actions], {}, {}, 0, len(forward)
    while any(waiting) or running:
        for rank, (action, end) in [*running.items()]:
            if end == now:
                del running[rank]
                arrives[action] = now
        for rank, queue in enumerate(waiting):
            if rank in running or not queue:
                continue
            stage, is_forward, microbatch = queue[0]
            if is_forward:
                before, time = Action(stage - 1, True, microbatch), transfer[stage - 1] if stage else 0
                is_ready = stage == 0 or (before in arrives and arrives[before] + time <= now)
            elif stage == stages - 1:
                is_ready = Action(stage, True, microbatch) in arrives
            else:
                before = Action(stage + 1, False, microbatch)
                is_ready = before in arrives and arrives[before] + transfer[stage] <= now
            if is_ready:
                running[rank] = queue.pop(0), now + (forward if is_forward else backward)[stage]
        now += 1
    return now - 1


@given(data=st.data(), ranks=st.integers(1, 4), virtual=st.integers(1, 3))
def test_a_step_takes_as_long_as_tick_by_tick(data, ranks, virtual):
    schedule = data.draw(st.sampled_from(["GPipe", "1F1B"] if virtual == 1 else ["Interleaved1F1B"]))
    microbatches = ranks * data.draw(st.integers(1, 3))
    stages = ranks * virtual
    times = [data.draw(st.lists(numbers, min_size=n, max_size=n)) for n in (stages, stages, stages - 1)]
    actions = actions_of(schedule, ranks, microbatches, virtual)
    assert simulate(actions, *times).total == ticks(actions, *times)


@given(ranks=st.integers(1, 8), rounds=st.integers(1, 4), virtual=st.integers(1, 3), forward=numbers, backward=numbers)
def test_equal_stages_wait_as_the_closed_forms_say(ranks, rounds, virtual, forward, backward):
    microbatches = ranks * rounds
    schedules = ["GPipe", "1F1B", "Interleaved1F1B"] if virtual == 1 else ["Interleaved1F1B"]
    for schedule in schedules:
        stages = ranks * virtual
        step = simulate(actions_of(schedule, ranks, microbatches, virtual), [forward] * stages, [backward] * stages)
        assert step.total == (microbatches * virtual + ranks - 1) * (forward + backward)
        assert step.bubble == pytest.approx((ranks - 1) / (microbatches * virtual + ranks - 1))


@given(ranks=st.integers(1, 6), rounds=st.integers(1, 4))
def test_fewer_micro_batches_wait_at_later_ranks(ranks, rounds):
    microbatches = ranks * rounds
    moments = [fullest_moment(actions, [0, 1]) for actions in actions_of("1F1B", ranks, microbatches)]
    assert moments == [[1] * min(microbatches, ranks - rank) for rank in range(ranks)]
    assert len(fullest_moment(rank_actions("GPipe", 0, ranks, microbatches), [0, 1])) == microbatches


@given(ranks=st.integers(2, 6), rounds=st.integers(2, 5), virtual=st.integers(2, 3))
def test_interleaved_stages_keep_the_same_from_twice_as_many_micro_batches_as_ranks_on(ranks, rounds, virtual):
    for rank in range(ranks):
        moments = [
            fullest_moment(rank_actions("Interleaved1F1B", rank, ranks, number, virtual), range(virtual + 1))
            for number in (2 * ranks, rounds * ranks)
        ]
        ahead = (virtual - 1) * ranks + 2 * (ranks - 1 - rank) + 1
        assert [sum(moment) for moment in moments] == [ahead, ahead]


@given(costs=st.lists(st.integers(1, 9), min_size=1, max_size=7), data=st.data(), last=st.integers(0, 9))
def test_no_other_partition_of_layers_has_a_cheaper_dearest_stage(costs, data, last):
    stages = data.draw(st.integers(1, len(costs)))

    def dearest(bounds) -> int:
        sums = [sum(costs[start:end]) for start, end in pairwise([0, *bounds, len(costs)])]
        return max([*sums[:-1], sums[-1] + last])

    parts = partition_layers(costs, stages, last)
    ends = [stage.stop for stage in parts]
    assert len(parts) == stages and ends[-1] == len(costs) and all(stage.start < stage.stop for stage in parts)
    assert [stage.start for stage in parts] == [0, *ends[:-1]]
    best = min(dearest(bounds) for bounds in combinations(range(1, len(costs)), stages - 1))
    assert dearest(ends[:-1]) == best


@given(ranks=st.integers(2, 6), virtual=st.integers(1, 4), blocks=st.integers(1, 3), size=st.integers(1, 100))
def test_transitions_send_the_blocks_of_the_papers_formulas_and_the_embedding(ranks, virtual, blocks, size):
    stages = ranks * virtual
    # Tensor 0 is the embedding; each stage ends its blocks, so that no partial sum crosses.
    states = [{name: size for name in range(1 + blocks * stage)} for stage in range(1, stages)]
    naive, cached = (sent_bytes(states, ranks, is_cached) for is_cached in (False, True))
    # The paper: C (C - 1) / 2 N_p blocks without caching, and (P (P - 1) / 2 + (V - 1) P^2) N_p with it.
    of_paper = stages * (stages - 1) // 2 * blocks, (ranks * (ranks - 1) // 2 + (virtual - 1) * ranks**2) * blocks
    assert sum(naive) == size * (of_paper[0] + stages - 1)
    # The formula sends a rank also the blocks that it made in its previous stage.
    made = (virtual - 1) * ranks * blocks
    assert sum(cached) == size * (of_paper[1] + ranks - 1 - made)
    # The peak falls from O(C) to O(P).
    assert max(naive) == size * (1 + blocks * (stages - 1))
    assert max(cached) <= size * (1 + blocks * ranks)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2F2B", 0, 2, 4), "There is no schedule '2F2B': use one of GPipe, 1F1B, Interleaved1F1B."),
        (("GPipe", 0, 2, 4, 2), "GPipe runs one stage on each rank, not 2: use Interleaved1F1B."),
        (("1F1B", 0, 4, 3), "1F1B needs at least as many micro-batches as ranks \\(4\\), not 3."),
        (("Interleaved1F1B", 0, 4, 9, 2), "Interleaved1F1B needs a multiple of 2 micro-batches, not 9."),
    ],
)
def test_a_schedule_that_cannot_run_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        rank_actions(*arguments)


def test_times_of_another_number_of_stages_are_refused():
    with pytest.raises(ValueError, match="2 stages need 2 times of each pass and 1 of transfers, not 3, 2 and 1"):
        simulate(actions_of("GPipe", 2, 2), [1, 1, 1], [1, 1], [0])
