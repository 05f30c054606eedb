"""One training run on packed token blocks through `transformers.Trainer`, and held-out loss per sequence."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from .optimizer import build_schedule, parameter_groups


@dataclass(frozen=True)
class Run:
    """A run's schedule: linear warm-up, a stable rate, and a decay to zero; lengths in optimizer steps."""

    steps: int
    batch_size: int
    learning_rate: float
    warmup_steps: int = 0
    decay_steps: int = 0
    weight_decay: float = 0.1
    residual_lr_factor: float = 1.0
    seed: int = 0


def train(
    model: PreTrainedModel,
    blocks: Tensor,
    run: Run,
    on_step: Callable[[], None] = lambda: None,
    callbacks: Sequence[TrainerCallback] = (),
) -> list[tuple[int, float]]:
    """Train in place with AdamW on `blocks` `[n, length]`, in an order that the run's seed alone decides.

    Returns:
        The training loss (nats/token) as points (step, mean over the steps since the point before).
    """
    callback = _Progress(on_step)
    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            output_dir=scratch,
            max_steps=run.steps,
            per_device_train_batch_size=run.batch_size,
            max_grad_norm=1.0,
            logging_steps=max(1, run.steps // 50),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=torch.cuda.is_available(),
            seed=run.seed,
            data_seed=run.seed,
        )
        optimizer = torch.optim.AdamW(
            parameter_groups(model, run.learning_rate, run.weight_decay, run.residual_lr_factor), betas=(0.9, 0.95)
        )
        schedule = build_schedule(
            optimizer, "wsd", steps=run.steps, warmup_steps=run.warmup_steps, decay_steps=run.decay_steps
        )
        trainer = Trainer(
            model,
            arguments,
            train_dataset=[{"input_ids": block, "labels": block} for block in blocks],
            optimizers=(optimizer, schedule),
            callbacks=[callback, *callbacks],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return callback.losses


@torch.no_grad()
def sequence_losses(model: PreTrainedModel, blocks: Tensor, batch_size: int = 16) -> Tensor:
    """Mean next-token loss (nats/token) of each sequence of `blocks` `[n, length]`, as `[n]` in float64."""
    was_training = model.training
    model.eval()
    losses = []
    for batch in blocks.split(batch_size):
        batch = batch.to(model.device)
        logits = model(batch, use_cache=False).logits[:, :-1].float()
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
        losses.append(loss.double().view(len(batch), -1).mean(1).cpu())
    model.train(was_training)
    return torch.cat(losses)


class _Progress(TrainerCallback):
    def __init__(self, on_step: Callable[[], None]):
        self.on_step = on_step
        self.losses: list[tuple[int, float]] = []

    def on_step_end(self, args, state, control, **kwargs):
        self.on_step()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.losses.append((state.global_step, logs["loss"]))
