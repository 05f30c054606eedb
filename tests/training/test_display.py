"""A run estimates its time before the first step, and prints its progress if there is no terminal."""

import time

import pytest
from torch.utils.data import DataLoader
from transformers import TrainerControl, TrainerState, TrainingArguments

from attnres.training import display as display_module
from attnres.training.display import Display


class Clock:
    """A clock that moves only when the test moves it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    monkeypatch.setattr(display_module.Pace.__init__, "__defaults__", (0.0, "", clock))
    return clock


@pytest.fixture
def begun(tmp_path, clock):
    """Return the display of a run of 100 steps of 16 sequences, in micro-batches of 8."""
    arguments = TrainingArguments(
        tmp_path,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=0.5,  # of the run
    )
    state, shown = TrainerState(max_steps=100), Display()
    state.compute_steps(arguments, 100)
    shown.on_train_begin(arguments, state, None)
    yield arguments, state, shown
    shown.close()


def measure(begun, clock, rows: int, seconds: float) -> None:
    """Evaluate on some rows, each of which takes the same time. The first batch takes a minute more."""
    arguments, state, shown = begun
    loader = DataLoader(range(rows), batch_size=8)
    for number, batch in enumerate(loader):
        clock.now += seconds * len(batch) + 60 * (number == 0)
        shown.on_prediction_step(arguments, state, TrainerControl(), eval_dataloader=loader)
    shown.on_evaluate(arguments, state, TrainerControl(), eval_dataloader=loader)


def test_the_time_is_estimated_from_the_held_out_loss(begun, clock, capsys):
    measure(begun, clock, rows=10, seconds=0.5)
    # A step trains 16 rows, each in three times the time of an evaluated row; 3 evaluations of 10 rows follow.
    assert 100 * 16 * 3 * 0.5 + 3 * 10 * 0.5 == 2415
    assert capsys.readouterr().out.splitlines()[-1] == "Time: about 40 min for 100 steps."


def test_without_evaluations_the_time_is_that_of_the_steps_and_of_the_held_out_loss_at_the_end(begun, clock, capsys):
    begun[0].eval_strategy = "no"
    measure(begun, clock, rows=200, seconds=0.1)
    assert 100 * 16 * 3 * 0.1 + 200 * 0.1 == 500
    assert capsys.readouterr().out.splitlines()[-1] == "Time: about 8 min for 100 steps."


def test_the_estimate_is_shown_once(begun, clock, capsys):
    measure(begun, clock, rows=24, seconds=0.5)
    measure(begun, clock, rows=24, seconds=0.5)
    assert capsys.readouterr().out.count("Time: ") == 1


def test_without_a_held_out_loss_at_the_start_the_first_steps_are_timed(begun, clock, capsys):
    arguments, state, shown = begun
    for seconds in (90.0, 2.0, 2.0):
        clock.now += seconds
        state.global_step += 1
        shown.on_step_end(arguments, state, None)
    assert "Time: about 3 min for 98 steps." in capsys.readouterr().out


def test_without_a_terminal_steps_and_held_out_batches_are_counted(begun, clock, capsys):
    arguments, state, shown = begun
    clock.now, state.global_step = 60.0, 20
    shown.on_step_end(arguments, state, None)
    assert capsys.readouterr().out.rstrip().endswith(" 20 of 100 steps (20%), about 4 min left")
    measure(begun, clock, rows=32, seconds=5.0)
    assert "2 of 4 batches of held-out text (50%)" in capsys.readouterr().out
