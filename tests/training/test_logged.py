"""Measurements appear once in every line with the loss, for any `Trainer` and any reporter."""

import json
import sqlite3
from contextlib import closing

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import Trainer, TrainerCallback, TrainingArguments

from attnres.training import ExpertBalance, Monitor
from attnres.training.recipe import Recipe
from attnres.training.trainer import AttnResTrainer

from .running import BLOCKS, train

NAMES = {
    "tokens_per_second",
    "magnitude_output",
    "magnitude_growth",
    "magnitude_largest",
    "depth_entropy",
    "depth_distance",
    "depth_weight_nearest",
    "depth_weight_embedding",
    "expert_max_violation",
    "expert_max_violation_worst_layer",
    "expert_load_entropy",
}
PLAIN = {"loss", "grad_norm", "learning_rate", "epoch", "step"}


def passed_to_the_constructor(model, folder, **options):
    return train(model, folder, Monitor(), ExpertBalance(0.001), steps=5, save_steps=5, **options)


def added_to_a_trainer(model, folder, **options):
    """Train with callbacks that are added to an existing `Trainer`: one as a class, one as an object."""
    arguments = TrainingArguments(folder, max_steps=5, logging_steps=2, save_steps=5, use_cpu=True, **options)
    rows = [{"input_ids": block, "labels": block} for block in BLOCKS]
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.add_callback(Monitor)
    trainer.add_callback(ExpertBalance(0.001))
    trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line]


def in_the_packages_trainer(model, folder, **options):
    arguments = TrainingArguments(
        folder, max_steps=5, logging_steps=2, save_steps=5, use_cpu=True, remove_unused_columns=False, **options
    )
    rows = [{"input_ids": block, "labels": block, "documents": "a.txt:1"} for block in BLOCKS]
    recipe = Recipe("model", ["a.txt"], str(folder), steps=5)
    trainer = AttnResTrainer(model, recipe, arguments, train_dataset=rows)
    trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize("run", [passed_to_the_constructor, added_to_a_trainer, in_the_packages_trainer])
def test_tensorboard_has_each_number_of_each_line_once(run, tiny_model, tmp_path):
    lines = run(tiny_model(), tmp_path, report_to="tensorboard", save_strategy="steps")
    assert [line["step"] for line in lines] == [2, 4]
    assert all(line.keys() == NAMES | PLAIN for line in lines)
    (events,) = tmp_path.glob("runs/*/events*")
    accumulator = EventAccumulator(str(events)).Reload()
    for name in NAMES | {"loss"}:
        shown = [(event.step, event.value) for event in accumulator.Scalars(f"train/{name}")]
        assert shown == [(line["step"], pytest.approx(line[name], rel=1e-6)) for line in lines]
    saved = json.loads((tmp_path / "checkpoint-5" / "trainer_state.json").read_text())
    assert [line for line in saved["log_history"] if "loss" in line] == lines


def test_trackio_has_each_number_of_each_line_once(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # trackio reads it on import
    pytest.importorskip("trackio", reason="trackio is not installed: `pip install trackio`")
    lines = passed_to_the_constructor(tiny_model(), tmp_path, report_to="trackio", project="depth")
    (database,) = (tmp_path / "trackio").glob("*.db")
    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute("SELECT metrics FROM metrics ORDER BY id").fetchall()
    shown = [json.loads(metrics) for (metrics,) in rows]
    shown = [metrics for metrics in shown if "train/loss" in metrics]
    expected = [{f"train/{name}": line[name] for name in line if name != "step"} for line in lines]
    assert shown == [metrics | {"train/global_step": line["step"]} for metrics, line in zip(expected, lines)]


def test_other_callbacks_keep_their_order_are_called_once_and_see_the_measurements(tiny_model, tmp_path):
    called = []

    class Note(TrainerCallback):
        def __init__(self, name):
            self.name = name

        def on_train_begin(self, *args, **kwargs):
            called.append(self.name)

        def on_log(self, *args, logs=None, **kwargs):
            called.append((self.name, logs.keys() >= NAMES))

    train(tiny_model(), tmp_path, Note("a"), Monitor(), Note("b"), ExpertBalance(), Note("c"), steps=2)
    assert called[:6] == ["a", "b", "c", ("a", True), ("b", True), ("c", True)]
    assert called[6:] == [("a", False), ("b", False), ("c", False)]  # the line of the whole run
