"""Train one model on packed token blocks, without a recipe, and measure its held-out loss for each sequence.

`attnres train` would do most of this, but not what the declared experiments compare: text that was tokenised on
another machine, in an order that each seed draws from prepared blocks; runs that diverge, whose loss is stored; healing
that trains some tensors only. The stored results were made in this way, and new ones can be paired with them.
"""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from attnres.training.optimizer import build_schedule, parameter_groups
from attnres.training.resuming import check_checkpoint
from attnres.training.saving import ResumableTrainer


@dataclass(frozen=True)
class Run:
    """The settings of a run: linear warm-up, a stable rate, and a decay to zero.

    Attributes:
        steps: The number of optimizer steps.
        batch_size: Sequences in a step.
        learning_rate: The stable rate.
        warmup_steps: Steps over which the rate rises from 0.
        decay_steps: Steps at the end over which the rate falls to 0.
        weight_decay: The decay of matrices.
        residual_lr_factor: The rate of the residual connections' tensors, as a factor of `learning_rate`.
        seed: The seed of the order of the blocks, and of dropout.
    """

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
    work: Path,
    on_step: Callable[[], None] = lambda: None,
    callbacks: Sequence[TrainerCallback] = (),
    save_seconds: float = 120.0,
    **arguments: Any,
) -> list[tuple[int, float]]:
    """Train a model in place with AdamW, in an order that depends only on the run's seed.

    Args:
        model: The model.
        blocks: The token blocks, `[blocks, seq]`.
        run: The settings of the run.
        work: A folder for the checkpoints of this run alone. A run that was stopped resumes from the last complete one.
        on_step: A function that is called after each step. After a resume it is also called at once for each earlier
            step.
        callbacks: Other callbacks of the `Trainer`.
        save_seconds: The least seconds between checkpoints. A checkpoint is made only where a point of the loss ends,
            so that a resumed run returns the same points as a run that was not stopped.
        arguments: Fields of `TrainingArguments`, such as `bf16` or `torch_compile`.

    Returns:
        The training loss as points (step, mean over the steps since the point before), in nats/token.

    Raises:
        ValueError: `work` holds a checkpoint of a run with another number of steps.
    """
    settings = TrainingArguments(
        output_dir=str(work),
        max_steps=run.steps,
        per_device_train_batch_size=run.batch_size,
        max_grad_norm=1.0,
        logging_steps=max(1, run.steps // 50),
        logging_nan_inf_filter=False,  # it would show a loss of 0 when the model diverges
        save_strategy="no",  # `_Progress` saves by the clock instead
        save_total_limit=1,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        seed=run.seed,
        data_seed=run.seed,
        **arguments,
    )
    optimizer = torch.optim.AdamW(
        parameter_groups(model, run.learning_rate, run.weight_decay, run.residual_lr_factor), betas=(0.9, 0.95)
    )
    schedule = build_schedule(
        optimizer, "wsd", steps=run.steps, warmup_steps=run.warmup_steps, decay_steps=run.decay_steps
    )
    trainer = _Trainer(
        model,
        settings,
        train_dataset=[{"input_ids": block, "labels": block} for block in blocks],
        optimizers=(optimizer, schedule),
        callbacks=[_Progress(on_step, save_seconds), *callbacks],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=_checkpoint(work, run))
    # With `bf16`, the `Trainer` has wrapped `forward` in autocast. The caller gets the model without it.
    trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    return [(int(point["step"]), point["loss"]) for point in trainer.state.log_history if "loss" in point]


def _checkpoint(folder: Path, run: Run) -> str | None:
    """Return the checkpoint to resume from. Raise ValueError if its run has another number of steps."""
    checkpoint = last_whole_checkpoint(folder)
    if checkpoint and (steps := json.loads(Path(checkpoint, TRAINER_STATE_NAME).read_text())["max_steps"]) != run.steps:
        raise ValueError(
            f"{checkpoint} belongs to a run of {steps} steps, not {run.steps}: choose another folder, or empty it."
        )
    return checkpoint


def last_whole_checkpoint(folder: Path) -> str | None:
    """Return the newest complete checkpoint in a folder; `None` if there is none."""
    steps = {}
    for state in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*/{TRAINER_STATE_NAME}"):
        with suppress(ValueError):
            check_checkpoint(state.parent)
            steps[json.loads(state.read_text())["global_step"]] = str(state.parent)
    return steps[max(steps)] if steps else None


@torch.no_grad()
def sequence_losses(model: PreTrainedModel, blocks: Tensor, batch_size: int = 16) -> Tensor:
    """Compute the mean next-token loss of each sequence.

    Args:
        model: The model.
        blocks: The sequences, token ids `[blocks, seq]`.
        batch_size: Sequences at a time.

    Returns:
        The losses in nats/token, float64 `[blocks]`, on the CPU.
    """
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


class _Trainer(ResumableTrainer):
    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        # A checkpoint has the model's own names of tensors, since resuming does not read a published layout.
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        # pyrefly: ignore[not-callable]  # every model here is of `transformers`
        model.save_pretrained(output_dir, state_dict=state_dict, save_original_format=False)


class _Progress(TrainerCallback):
    def __init__(self, on_step: Callable[[], None], save_seconds: float):
        self.on_step, self.save_seconds = on_step, save_seconds
        self.saved = time.monotonic()

    def on_train_begin(self, args, state, control, **kwargs):
        for _ in range(state.global_step):
            self.on_step()

    def on_step_end(self, args, state, control, **kwargs):
        self.on_step()
        is_point = state.global_step % state.logging_steps == 0
        if is_point and time.monotonic() - self.saved >= self.save_seconds:
            control.should_save, self.saved = True, time.monotonic()
