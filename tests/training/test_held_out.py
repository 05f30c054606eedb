"""The held-out loss is the mean over tokens: the same for every micro-batch size and number of processes."""

import pytest
import torch
import torch.nn.functional as F
from transformers import TrainingArguments

from attnres.training.recipe import Recipe
from attnres.training.trainer import AttnResTrainer

from .running import uneven_rows
from .test_two_processes import two_processes


def mean_over_tokens(model) -> float:
    """Compute the held-out loss of all rows in one batch."""
    rows = uneven_rows()
    ids, labels = (torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels"))
    with torch.no_grad():
        logits = model.eval()(ids).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).item()


def held_out_loss(model, folder, micro_batch_size: int, **options) -> float:
    arguments = TrainingArguments(
        folder,
        per_device_eval_batch_size=micro_batch_size,
        remove_unused_columns=False,
        report_to="none",
        use_cpu=True,
        **options,
    )
    recipe = Recipe("model", ["a.txt"], str(folder), steps=1)
    return AttnResTrainer(model, recipe, arguments, eval_dataset=uneven_rows()).evaluate()["eval_loss"]


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 8])
def test_the_held_out_loss_does_not_depend_on_the_micro_batch_size(micro_batch_size, tiny_model, tmp_path):
    model = tiny_model()
    assert held_out_loss(model, tmp_path, micro_batch_size) == pytest.approx(mean_over_tokens(model), abs=1e-5)


def test_the_held_out_loss_is_the_plain_loss_also_if_training_smoothes_labels(tiny_model, tmp_path):
    model = tiny_model()
    loss = held_out_loss(model, tmp_path, 2, label_smoothing_factor=0.5)
    assert loss == pytest.approx(mean_over_tokens(model), abs=1e-5)


def test_rows_without_a_token_to_predict_are_refused(tiny_model, tmp_path):
    rows = [row | {"labels": torch.full_like(row["labels"], -100)} for row in uneven_rows()]
    arguments = TrainingArguments(tmp_path, remove_unused_columns=False, report_to="none", use_cpu=True)
    trainer = AttnResTrainer(tiny_model(), Recipe("m", ["a"], str(tmp_path), steps=1), arguments, eval_dataset=rows)
    with pytest.raises(ValueError, match="the held-out data has no token to predict"):
        trainer.evaluate()


@pytest.mark.slow
def test_two_processes_report_the_same_held_out_loss(tiny_model, tmp_path):
    """Seven rows in batches of two: the last batch is padded with rows that another process has evaluated."""
    model = tiny_model()
    results = two_processes("held_out", model, tmp_path)
    assert [result["loss"] for result in results] == [pytest.approx(mean_over_tokens(model), abs=1e-5)] * 2


@pytest.mark.slow
def test_smoothed_labels_of_a_compiled_model_are_those_of_the_next_token(tiny_model, tmp_path):
    """`Trainer` shifts labels by the name of the model's class, and a compiled model has another."""
    options = {"report_to": "none", "use_cpu": True, "remove_unused_columns": False, "label_smoothing_factor": 1e-9}
    model, recipe = tiny_model(layer_types=["full_attention"] * 4), Recipe("model", ["a.txt"], str(tmp_path), steps=1)
    trainer = AttnResTrainer(model, recipe, TrainingArguments(tmp_path, **options))
    row = uneven_rows()[0]
    batch = {name: row[name][None] for name in ("input_ids", "labels")}
    losses = [trainer.compute_loss(way, dict(batch)).item() for way in (model, torch.compile(model, backend="eager"))]
    assert losses == pytest.approx([model(**batch).loss.item()] * 2, rel=1e-5)
