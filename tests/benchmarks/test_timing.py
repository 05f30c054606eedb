"""Tests that ways take turns and that ratios come from times taken together."""

import gc
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import timing
from benchmarks.timing import Ratio, Setting, compare, interleave

SECONDS = st.floats(1e-6, 1e3)


@given(
    ours=SECONDS,
    theirs=SECONDS,
    disturbances=st.lists(st.floats(0.1, 100), min_size=1, max_size=9),
)
def test_a_disturbance_of_all_ways_of_a_turn_does_not_change_the_ratio(ours, theirs, disturbances):
    ratio = Ratio.of([ours * factor for factor in disturbances], [theirs * factor for factor in disturbances])
    assert [ratio.low, ratio.median, ratio.high] == pytest.approx([ours / theirs] * 3)


def test_a_ratio_is_the_median_of_the_pairs_and_not_the_ratio_of_the_medians():
    ratio = Ratio.of([1.0, 4.0, 9.0], [1.0, 2.0, 1.0])
    assert (ratio.low, ratio.median, ratio.high) == (1.5, 2.0, 5.5)


def test_values_without_a_partner_are_refused():
    with pytest.raises(ValueError, match="shorter"):
        Ratio.of([1.0, 2.0], [1.0])


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=9))
def test_the_median_lies_between_the_quartiles_and_they_among_the_ratios(pairs):
    ratio, ratios = Ratio.of(*zip(*pairs)), [a / b for a, b in pairs]
    slack = 1e-12 * max(ratios)
    assert min(ratios) - slack <= ratio.low <= ratio.median + slack
    assert ratio.median - slack <= ratio.high <= max(ratios) + slack


@pytest.mark.slow
def test_no_repeat_begins_after_the_time_is_over_but_the_first_three():
    slow = {"a": lambda: time.sleep(0.01), "b": lambda: time.sleep(0.01)}
    assert len(interleave(slow, Setting(repeats=50), calls=1, most_seconds=0)["a"].wall) == 3
    assert len(interleave(slow, Setting(repeats=4), calls=1, most_seconds=60)["b"].wall) == 4


def test_ways_take_turns_after_a_warm_up():
    seen = []
    ways = {name: (lambda name=name: seen.append(name)) for name in "ABC"}
    interleave(ways, Setting(repeats=3), calls=1)
    warm_up, turns = "".join(seen[:-9]), "".join(seen[-9:])
    assert turns == "ABCBCACAB"  # each is once the first
    assert set(warm_up) == set("ABC")


@pytest.fixture
def sleep(monkeypatch):
    """Return `sleep(seconds)`, which moves the clock but not the processor's time."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timing.time, "process_time", lambda: 0.0)

    def sleep(seconds: float) -> None:
        now[0] += seconds

    return sleep


def test_a_time_is_that_of_one_call(sleep):
    times = interleave({"sleep": lambda: sleep(0.01)}, Setting(repeats=3), calls=4)["sleep"]
    assert times.calls == 4
    assert times.wall == [pytest.approx(0.01)] * 3
    assert times.cpu == [0.0] * 3


def test_short_ways_are_called_until_they_can_be_timed(sleep):
    times = interleave({"sleep": lambda: sleep(0.001)}, Setting(repeats=1), least_seconds=0.0195)["sleep"]
    assert times.calls == 20


def test_garbage_is_collected_between_turns_only():
    seen = []
    interleave({"A": lambda: seen.append(gc.isenabled())}, Setting(repeats=2), calls=1)
    assert seen[-2:] == [False, False]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_the_collector_is_back_after_a_failure():
    warm_up = [None]
    with pytest.raises(IndexError):
        interleave({"A": warm_up.pop}, Setting(repeats=1), calls=1)
    assert gc.isenabled()


def test_a_stored_row_has_every_time_and_the_ratios_of_the_ways_that_ran():
    times = interleave({"ours": lambda: None, "theirs": lambda: None}, Setting(repeats=4))
    row = compare(times, {"theirs / ours": ("theirs", "ours"), "others / ours": ("others", "ours")})
    assert row["ratios"].keys() == row["processor_ratios"].keys() == {"theirs / ours"}
    assert row["ratios"]["theirs / ours"].keys() == {"median", "low", "high"}
    assert {name: len(value["wall"]) for name, value in row["seconds"].items()} == {"ours": 4, "theirs": 4}
