"""Tests that parts and rows share the budget of time, and that its end interrupts the code that runs."""

import contextlib
import time

import pytest

from benchmarks.clock import Clock, OutOfTime


class Hands:
    """A clock that the test moves."""

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_part_takes_its_share_of_the_time_left_and_its_rows_share_the_part():
    hands = Hands()
    clock = Clock(100, hands)
    clock.begin_part(0.5)
    assert clock.row(5) == 10
    hands.now += 40
    assert clock.row(4) == 2.5
    hands.now += 11
    assert clock.row(1) is None
    clock.begin_part(1.0)
    assert clock.row(1) == clock.left() == 49
    hands.now += 60
    assert clock.left() == 0 and clock.row(1) is None


def test_the_end_interrupts_code_that_suppresses_every_exception():
    begin, is_done = time.monotonic(), False
    with pytest.raises(OutOfTime), Clock(0.2).stops():
        while time.monotonic() < begin + 30:
            with contextlib.suppress(Exception):
                time.sleep(0.01)
        is_done = True
    assert not is_done


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_stop_that_python_drops_while_deleting_an_object_is_repeated():
    class Deleted:
        def __del__(self):
            time.sleep(0.5)

    with pytest.raises(OutOfTime), Clock(0.2).stops():
        Deleted()
        time.sleep(30)


def test_nothing_is_interrupted_after_the_block():
    with Clock(0.1).stops():
        pass
    time.sleep(0.2)
