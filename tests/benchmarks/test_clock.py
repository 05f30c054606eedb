"""A budget of time is shared out, and ends whatever runs."""

import contextlib
import time

import pytest

from benchmarks.clock import Clock, OutOfTime


class Hands:
    """A time that goes on when it is told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_part_takes_its_share_of_what_is_left_and_its_rows_share_that():
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


def test_at_its_end_it_stops_even_what_takes_every_exception_for_its_own():
    begin, went_on = time.monotonic(), False
    with pytest.raises(OutOfTime), Clock(0.2).stops():
        while time.monotonic() < begin + 30:
            with contextlib.suppress(Exception):
                time.sleep(0.01)
        went_on = True
    assert not went_on


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_stop_that_went_nowhere_comes_again():
    class Deleted:
        def __del__(self):
            time.sleep(0.5)

    with pytest.raises(OutOfTime), Clock(0.2).stops():
        Deleted()
        time.sleep(30)


def test_afterwards_it_stops_nothing():
    with Clock(0.1).stops():
        pass
    time.sleep(0.2)
