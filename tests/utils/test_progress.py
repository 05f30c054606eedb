"""Long work shows a bar on a terminal, and prints plain lines with the time left elsewhere."""

import io
import re

import pytest
from rich.console import Console

import attnres.utils.progress as progress_module
from attnres.utils.progress import Pace, ProgressBar, show_duration, status


class Clock:
    """A clock that a test sets."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def lines_of(total: float | None, seconds_each: float, clock: Clock, count: int, unit: str = "steps") -> dict:
    """Return the lines printed during `count` steps that take `seconds_each`: step -> line."""
    pace, found = Pace(total, unit=unit, clock=clock), {}
    for done in range(1, count + 1):
        clock.now += seconds_each
        if line := pace.line(done):
            found[done] = line
    return found


def test_short_work_prints_nothing(clock):
    assert lines_of(20, 1.0, clock, 20) == {}


def test_long_work_prints_each_tenth_with_the_time_left(clock):
    lines = lines_of(600, 1.0, clock, 600)
    assert list(lines) == [*range(60, 601, 60)]
    assert lines[60] == "60 of 600 steps (10%), about 9 min left"
    assert lines[600] == "600 of 600 steps (100%)"


def test_short_tenths_share_a_line(clock):
    """A tenth takes 10 seconds, and a line is printed every 30."""
    assert list(lines_of(100, 1.0, clock, 100)) == [30, 60, 90]


def test_work_of_hours_prints_a_line_every_five_minutes(clock):
    assert list(lines_of(10_000, 10.0, clock, 90)) == [30, 60, 90]


def test_work_without_a_known_end_prints_its_count(clock):
    assert lines_of(None, 10.0, clock, 6, unit="rows") == {3: "3 rows", 6: "6 rows"}


def test_the_time_left_does_not_count_the_work_of_an_earlier_run(clock):
    pace = Pace(200, done=100, unit="steps", clock=clock)
    clock.now = 60.0
    assert pace.line(120) == "120 of 200 steps (60%), about 4 min left"


def written(clock: Clock, **console) -> str:
    """Return the text that a bar writes during 4 steps of 20 seconds."""
    file = io.StringIO()
    with ProgressBar(console=Console(file=file, width=80, **console), unit="steps", get_time=clock) as bar:
        task = bar.add_task("a[b]", total=None)
        bar.update(task, total=8, description="training [x]")
        for _ in range(4):
            clock.now += 20.0
            bar.advance(task)
    return file.getvalue()


def test_a_file_gets_plain_lines(clock):
    lines = written(clock).splitlines()
    assert [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in lines] == [
        "training [x]: 2 of 8 steps (25%), about 2 min left",
        "training [x]: 4 of 8 steps (50%), about 80 s left",
    ]


def test_a_terminal_gets_a_bar_and_no_lines(clock):
    assert "left" not in written(clock, force_terminal=True)
    assert "\x1b[" in written(clock, force_terminal=True)


def test_a_dumb_terminal_gets_lines(clock, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert written(clock, force_terminal=True).count("left") == 2


def test_a_thread_prints_lines_during_one_long_call(monkeypatch):
    file = io.StringIO()
    monkeypatch.setattr(progress_module, "LEAST_SECONDS", 0.02)
    with status(Console(file=file, width=80), "Comparing [them] ...") as show:
        while "Comparing" not in file.getvalue():
            pass
        show("Loading ...")
        while "Loading" not in file.getvalue():
            pass
    assert re.match(r"\d\d:\d\d:\d\d Comparing \[them\] \.\.\. 1 s so far\n", file.getvalue())


def test_a_terminal_without_a_spinner_gets_the_message_at_once(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    file = io.StringIO()
    with status(Console(file=file, force_terminal=True), "Comparing ..."):
        assert file.getvalue().endswith(" Comparing ...\n")


def test_a_quick_call_prints_nothing():
    file = io.StringIO()
    with status(Console(file=file), "Comparing ..."):
        pass
    assert file.getvalue() == ""


@pytest.mark.parametrize(
    "seconds, words",
    [
        (0.2, "1 s"),
        (89, "89 s"),
        (91, "2 min"),
        (5300, "88 min"),
        (7000, "2 h"),
        (7800, "2 h 10 min"),
        (300_000, "3 days"),
    ],
)
def test_durations_are_rounded_like_estimates(seconds, words):
    assert show_duration(seconds) == words
