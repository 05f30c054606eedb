"""A run with `load_best_model_at_end` ends with the checkpoint of the lowest held-out loss."""

import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainingArguments

from attnres.training.recipe import Recipe
from attnres.training.report import collect_results, describe_results
from attnres.training.trainer import AttnResTrainer


@pytest.mark.slow
@pytest.mark.parametrize("keep", [1, 9])
def test_the_model_and_the_held_out_loss_at_the_end_are_those_of_the_best_checkpoint(keep, tiny_model, tmp_path):
    """The model learns another token than the held-out one, so that loss grows. The best checkpoint is kept."""
    recipe = Recipe("tiny", ("a.txt",), str(tmp_path), steps=5, learning_rate=0.01, warmup=0.0, optimizer="adamw")
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=5,
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        save_total_limit=keep,
        load_best_model_at_end=True,
        report_to="none",
        use_cpu=True,
        remove_unused_columns=False,
    )
    rows, held_out = (
        [{"input_ids": torch.full((8,), token), "labels": torch.full((8,), token), "documents": "a.txt"}] * 8
        for token in (5, 7)
    )
    trainer = AttnResTrainer(tiny_model(), recipe, arguments, train_dataset=rows, eval_dataset=held_out)
    trainer.train()
    results = collect_results(trainer)
    losses = {step: loss for step, loss in results["held_out_losses"]}
    best = min(losses, key=losses.get)
    assert len(losses) == 5 and best < 5
    assert (results["best_step"], results["held_out_loss"]) == (best, losses[best])
    assert results["perplexity"] == math.exp(losses[best])
    line = describe_results(results, tmp_path)
    assert line.startswith(f"Held-out loss of step {best}, the best: {losses[best]:.4f}, perplexity ")
    # With `keep: 1`, the last checkpoint goes when the run ends.
    kept = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert kept == ([f"checkpoint-{best}"] if keep == 1 else [f"checkpoint-{step}" for step in losses])
    stored = load_file(tmp_path / f"checkpoint-{best}" / "model.safetensors")
    found = trainer.model.state_dict()
    assert all(torch.equal(found[name], stored[name]) for name in stored)
