"""Runs without a recipe: the seed alone decides them, a stopped run resumes, and held-out losses are the model's."""

import copy
import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from experiments.training import Run, last_whole_checkpoint, sequence_losses, train


def random_blocks(n: int) -> torch.Tensor:
    return torch.randint(3, 20, (n, 16), generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
def test_the_seed_alone_decides_a_run_and_the_loss_falls(tiny_model, tmp_path):
    model, blocks = tiny_model(), random_blocks(16)
    steps = []
    runs = []
    for number, seed in enumerate((0, 0, 1)):
        trained = copy.deepcopy(model)
        run = Run(steps=12, batch_size=4, learning_rate=1e-2, warmup_steps=2, decay_steps=4, seed=seed)
        runs.append((train(trained, blocks, run, tmp_path / str(number), lambda: steps.append(1)), trained))
    assert len(steps) == 36
    (first, model_a), (again, model_b), (other, _) = runs
    assert first == again
    assert first != other
    assert all(torch.equal(a, b) for a, b in zip(model_a.parameters(), model_b.parameters()))
    assert first[-1][1] < first[0][1] - 0.1
    assert first[-1][0] == 12


def test_a_run_that_diverges_reports_a_loss_that_is_not_finite(tiny_model, tmp_path):
    points = train(tiny_model(), random_blocks(16), Run(steps=4, batch_size=4, learning_rate=1e30), tmp_path)
    assert math.isfinite(points[0][1]) and not math.isfinite(points[-1][1])


def test_sequence_losses_average_to_the_models_loss(tiny_model):
    model, blocks = tiny_model().train(), random_blocks(5)
    losses = sequence_losses(model, blocks, batch_size=2)
    assert model.training
    assert losses.shape == (5,)
    with torch.no_grad():
        assert torch.isclose(losses.mean().float(), model.eval()(blocks, labels=blocks).loss, rtol=1e-5)


def test_a_model_trained_in_bfloat16_computes_in_float32_again(tiny_model, tmp_path):
    """The trainer wraps the model's `forward` in autocast."""
    model, blocks = tiny_model(), random_blocks(8)
    train(model, blocks, Run(steps=2, batch_size=4, learning_rate=1e-2), tmp_path, bf16=True, use_cpu=True)
    fresh = tiny_model()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(sequence_losses(model, blocks), sequence_losses(fresh, blocks))
    assert model(blocks).logits.dtype == torch.float32


def train_until(step: int, model: PreTrainedModel, blocks: torch.Tensor, run: Run, work: Path) -> None:
    """Train until an interrupt in a step, with a checkpoint wherever one is allowed."""
    steps = itertools.count(1)

    def stop() -> None:
        if next(steps) == step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(model, blocks, run, work, stop, save_seconds=0)


@pytest.mark.slow
def test_a_stopped_run_resumes_from_its_last_whole_checkpoint(tiny_model, tmp_path):
    run = Run(steps=8, batch_size=2, learning_rate=1e-2, warmup_steps=2, decay_steps=4)
    blocks = random_blocks(16)
    whole = tiny_model()
    points = train(whole, blocks, run, tmp_path / "whole")

    train_until(6, tiny_model(), blocks, run, tmp_path)
    assert Path(last_whole_checkpoint(tmp_path)).name == "checkpoint-5"
    broken = tmp_path / "checkpoint-6"
    broken.mkdir()
    (broken / "trainer_state.json").write_text('{"global_step": 6, "log_h')
    assert Path(last_whole_checkpoint(tmp_path)).name == "checkpoint-5"

    whole_one = tmp_path / "checkpoint-5"
    for name in ("optimizer.pt", "rng_state.pth", "model.safetensors"):
        content = (whole_one / name).read_bytes()
        (whole_one / name).write_bytes(content[: len(content) // 2])
        assert last_whole_checkpoint(tmp_path) is None, "a run does not resume from half a checkpoint"
        (whole_one / name).write_bytes(content)

    resumed, steps = tiny_model(), []
    assert train(resumed, blocks, run, tmp_path, lambda: steps.append(1), save_seconds=0) == points
    assert len(steps) == 8
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters()))
    with pytest.raises(ValueError, match=r"checkpoint-8 belongs to a run of 8 steps, not 6: choose another folder"):
        train(tiny_model(), blocks, replace(run, steps=6), tmp_path)


@pytest.mark.slow
def test_a_run_that_is_resumed_after_its_last_step_makes_no_further_step(tiny_model, tmp_path):
    """A run may have been killed after its last checkpoint, before its model was used."""
    run, blocks = Run(steps=4, batch_size=2, learning_rate=1e-2), random_blocks(6)
    whole = tiny_model()
    points = train(whole, blocks, run, work=tmp_path, save_seconds=0)
    resumed = tiny_model()
    assert train(resumed, blocks, run, work=tmp_path, save_seconds=0) == points
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters()))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]


@pytest.mark.slow
def test_a_run_that_was_stopped_between_two_points_of_its_curve_has_the_same_curve(tiny_model, tmp_path):
    """A point is the mean of three steps here. A checkpoint between points would lose the first steps of one."""
    run, blocks = Run(steps=150, batch_size=1, learning_rate=1e-3), random_blocks(16)
    fields = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "mlp_layer_types": ["dense"]}  # quick
    points = train(tiny_model(**fields), blocks, run, tmp_path / "whole")
    assert [step for step, _ in points[:2]] == [3, 6]

    train_until(8, tiny_model(**fields), blocks, run, tmp_path)
    assert Path(last_whole_checkpoint(tmp_path)).name == "checkpoint-6"
    assert train(tiny_model(**fields), blocks, run, work=tmp_path) == points
