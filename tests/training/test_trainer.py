"""`AttnResTrainer`: no checkpoint holds NaN, a resumed run follows its own settings, and SIGTERM loses nothing."""

import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel, TrainerCallback, TrainingArguments

from attnres.training.recipe import Recipe
from attnres.training.saving import ResumableTrainer
from attnres.training.trainer import AttnResTrainer

STEPS = 4


class At(TrainerCallback):
    """A callback that calls a function at an event of one step."""

    def __init__(self, event: str, step: int, call: Callable):
        def at_event(args, state, control, **kwargs) -> None:
            if state.global_step == step:
                call(control)

        setattr(self, event, at_event)


@pytest.fixture
def make(tiny_model, tmp_path) -> Callable[..., AttnResTrainer]:
    """Return `make(*callbacks, **fields)`, which gives a trainer of `STEPS` steps that evaluates and saves each step.

    It learns another token than the held-out one, so that the last held-out loss is not the lowest.
    """

    def build(*callbacks: TrainerCallback, gpus: int = 0, **fields) -> AttnResTrainer:
        recipe = Recipe("tiny", ("a.txt",), str(tmp_path), steps=STEPS, learning_rate=0.01, warmup=0.0)
        defaults = {"max_steps": STEPS, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "report_to": "none"}
        arguments = TrainingArguments(str(tmp_path), use_cpu=True, remove_unused_columns=False, **defaults | fields)
        arguments._n_gpu = gpus  # as if this machine had so many
        train, held_out = (
            [{"input_ids": torch.full((8,), token), "labels": torch.full((8,), token), "documents": name}] * 8
            for token, name in ((5, "a.txt:1"), (7, "b.txt:2"))
        )
        trainer = AttnResTrainer(tiny_model(), recipe, arguments, train_dataset=train, eval_dataset=held_out)
        for callback in callbacks:
            trainer.add_callback(callback)
        return trainer

    return build


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def terminate(_) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_gradient_that_is_not_finite_stops_the_run_before_a_checkpoint_is_spoilt(make, tmp_path):
    trainer = make(save_total_limit=1)
    scale = lambda gradient: gradient * (math.inf if trainer.state.global_step == 1 else 1)  # noqa: E731
    next(trainer.model.parameters()).register_hook(scale)
    with pytest.raises(FloatingPointError, match=r"^the norm of the gradients is (inf|nan) in step 2\. ") as caught:
        trainer.train()
    assert str(caught.value).endswith(f"The last good checkpoint is {tmp_path / 'checkpoint-1'}.")
    assert checkpoints(tmp_path) == ["checkpoint-1"]
    weights = load_file(tmp_path / "checkpoint-1" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())


@pytest.mark.parametrize("event, documents", [("on_step_begin", "a.txt:1"), ("on_optimizer_step", "held-out b.txt:2")])
def test_a_loss_that_is_not_finite_stops_the_run_before_its_result(event, documents, make, tmp_path):
    """The weights overflow in the last step, before its training loss or after it."""
    trainer = make(save_total_limit=1)
    trainer.add_callback(At(event, STEPS - 1, lambda _: next(trainer.model.parameters()).data.fill_(math.inf)))
    with pytest.raises(FloatingPointError, match=rf"^the loss is nan in step {STEPS}, on {documents}; "):
        trainer.train()
    assert checkpoints(tmp_path) == [f"checkpoint-{STEPS - 1}"]


def test_a_resumed_run_logs_evaluates_and_saves_by_its_own_settings(make, tmp_path):
    def stop(control) -> None:
        control.should_training_stop = True

    make(At("on_step_end", 1, stop)).train()
    every = {"save_steps": 3, "eval_steps": 3, "logging_steps": 2}
    trainer = make(**every)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert checkpoints(tmp_path) == ["checkpoint-1", "checkpoint-3", f"checkpoint-{STEPS}"]
    logged = {
        name: [line["step"] for line in trainer.state.log_history if name in line] for name in ("loss", "eval_loss")
    }
    assert logged == {"loss": [2, 4], "eval_loss": [1, 3, 4]}


def test_a_single_process_uses_one_gpu_of_several(make):
    trainer = make(gpus=8, per_device_train_batch_size=2)
    assert trainer.args.n_gpu == 1
    assert len(next(iter(trainer.get_train_dataloader()))["input_ids"]) == 2


def test_the_model_keeps_use_cache_in_its_configuration_and_trains_without_a_cache(make, tmp_path):
    trainer, seen = make(), []
    trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["use_cache"]), with_kwargs=True
    )
    trainer.train()
    assert seen and not any(seen)
    trainer.save_model(str(tmp_path / "model"))
    for folder in (tmp_path / "model", tmp_path / "checkpoint-1"):
        assert json.loads((folder / "config.json").read_text())["use_cache"] is True


def test_the_configuration_of_a_model_without_use_cache_gets_none(tmp_path):
    model = OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=8, n_positions=8, n_embd=4, n_layer=1, n_head=1))
    ResumableTrainer(model, TrainingArguments(str(tmp_path), report_to="none")).save_model(str(tmp_path))
    assert "use_cache" not in json.loads((tmp_path / "config.json").read_text())


def test_sigterm_keeps_the_checkpoint_that_it_saves_also_beside_the_best_one(make, tmp_path):
    """Otherwise `Trainer` removes all checkpoints but the best when training ends."""
    trainer = make(At("on_step_begin", 2, terminate), save_total_limit=1, load_best_model_at_end=True)
    trainer.train()
    assert trainer.stopping.received and trainer.state.global_step == 3
    best = trainer.state.best_global_step
    assert best < 3 and checkpoints(tmp_path) == [f"checkpoint-{best}", "checkpoint-3"]


def test_sigterm_after_the_last_step_lets_the_run_end(make):
    """The other processes do not know of the signal. This one must not leave alone."""
    trainer = make(At("on_evaluate", STEPS, terminate))
    trainer.train()
    assert trainer.state.global_step == STEPS and not trainer.stopping.received


def test_the_handler_of_sigterm_is_restored_also_if_training_fails(make):
    def fail(_) -> None:
        raise RuntimeError("broken")

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RuntimeError, match="broken"):
        make(At("on_step_end", 1, fail)).train()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_longer_run_continues_with_the_rates_of_its_own_schedule(make, tmp_path):
    make(save_total_limit=1).train()
    rates = []
    note = At("on_step_begin", STEPS, lambda _: rates.append(trainer.optimizer.param_groups[0]["lr"]))
    trainer = make(note, max_steps=8, logging_steps=1)
    trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS}"))
    assert trainer.state.global_step == 8
    assert rates == [pytest.approx(0.01)]  # the decay of `wsd` begins here, and had ended in the shorter run
    logged = {line["step"]: line["learning_rate"] for line in trainer.state.log_history if "learning_rate" in line}
    assert logged[STEPS + 1] == pytest.approx(0.01)
