"""`transformers.Trainer` for a recipe.

It differs from `Trainer` as follows, beside the checkpoints of [`attnres.training.saving.ResumableTrainer`]:

- The recipe decides the optimizer and the schedule.
- SIGTERM saves a checkpoint and stops the run.
- A loss or a gradient that is not finite stops the run. The error names the documents of a loss.
- The held-out loss is a mean over tokens.
- The log has the load of the experts, tokens/s and the depth attention.

`Trainer` averages the means of batches. That number depends on `micro_batch_size` and on the number of processes if
batches have different numbers of labels: with conversations, with a shorter last batch, or with the rows that pad the
last batch of several processes. Here each row of the held-out data counts once, weighted by its tokens.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import gather_object
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput, TrainOutput, get_last_checkpoint
from transformers.utils.generic import is_flash_attention_requested

from attnres import AttnResKimiK3Processor
from attnres.configuration_attnres import ResidualConfig
from attnres.residual_attnres import residual_tensors
from attnres.utils.token_ids import check_token_ids

from .callbacks import ExpertBalance, Intervals, LossAhead, Monitor, StopOnSignal
from .data import IGNORED
from .data.images import collate_images
from .optimizer import build_optimizer, build_schedule
from .recipe import Recipe
from .saving import ResumableTrainer

ROW = "row"  # the key of a row's number in the data set


def collate(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Stack rows of [`attnres.training.data.blocks.load_blocks`] to a batch.

    Args:
        rows: The rows.

    Returns:
        `input_ids`, `labels` and, if the rows have them, `position_ids`, int64 `[batch, seq]`; and `documents`, the
        places of each row.
    """
    names = [name for name in ("input_ids", "labels", "position_ids") if name in rows[0]]
    batch = {name: torch.stack([row[name] for row in rows]).long() for name in names}
    return batch | {"documents": [row["documents"] for row in rows]}


class NumberedRows(torch.utils.data.Dataset):
    """A data set that adds to each row its number, so that a row that two processes evaluate counts once.

    Args:
        rows: The data set.
    """

    def __init__(self, rows: Sequence[dict[str, Any]]):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.rows[number] | {ROW: number}


class TokenMean:
    """The sums from which the mean loss over the tokens of all processes is computed."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[float, int]] = {}  # number -> sum of the loss, count of tokens

    def add(self, numbers: Tensor, logits: Tensor, labels: Tensor) -> float:
        """Add the rows of a batch, and return the sum of their losses.

        Args:
            numbers: The rows' numbers, `[batch]`.
            logits: The model's logits, `[batch, seq, vocab]`. The logits at a position predict the next label.
            labels: Token ids, `[batch, seq]`. `-100` is ignored.

        Returns:
            The sum over the tokens of the batch.
        """
        total = 0.0
        # Row by row, since the logits of a whole batch in float32 would take as much memory again as training does.
        for number, row, targets in zip(numbers.tolist(), logits, labels):
            targets = targets[1:].to(row.device)
            loss = F.cross_entropy(row[:-1].float(), targets, reduction="sum", ignore_index=IGNORED)
            self._rows[number] = loss.item(), int((targets != IGNORED).sum())
            total += self._rows[number][0]
        return total

    def result(self) -> float:
        """Return the mean loss in nats/token over the rows of all processes. All processes call it together.

        Raises:
            ValueError: No row has a token to predict.
        """
        rows: Mapping[int, tuple[float, int]] = dict(gather_object(list(self._rows.items())))
        tokens = sum(count for _, count in rows.values())
        if not tokens:
            raise ValueError("the held-out data has no token to predict: give other data by `held_out`.")
        return math.fsum(loss for loss, _ in rows.values()) / tokens


class AttnResTrainer(ResumableTrainer):
    """A `Trainer` of a model by a [`Recipe`].

    Args:
        model: The model, whole or sharded among the processes by `transformers`.
        recipe: The recipe of the run.
        arguments: The arguments that [`attnres.training.prepare.prepare_arguments`] makes from the recipe.
        processor: The processor of a model that is trained on images.
        options: Other arguments of `Trainer`, such as the data sets.

    Attributes:
        recipe: The recipe.
        processor: The processor of a model that is trained on images.
        stopping: The callback that ends the run after SIGTERM.

    Raises:
        ValueError: The recipe sets `separate_documents`, and the model cannot keep documents apart.
        FloatingPointError: From `train`: the loss, a held-out loss or the norm of the gradients is not finite. From
            `evaluate`: the held-out loss is not.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        recipe: Recipe,
        arguments: TrainingArguments,
        processor: AttnResKimiK3Processor | None = None,
        **options: Any,
    ):
        if recipe.separate_documents:
            _check_separable(model, recipe)
        self.recipe, self.processor = recipe, processor
        self._ahead = LossAhead()
        callbacks = [Intervals(), *self._callbacks(), self._ahead]
        self.stopping = StopOnSignal(self)
        # The warning is about changing a layer's output in place, which nothing here does.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        if options.get("eval_dataset") is not None:
            options["eval_dataset"] = NumberedRows(options["eval_dataset"])
        super().__init__(
            model, arguments, data_collator=self._collate, callbacks=[*callbacks, self.stopping], **options
        )
        if self.label_smoother is not None:
            # `Trainer` does not shift the labels of a compiled model, whose class it does not know.
            self.label_smoother = partial(self.label_smoother, shift_labels=True)

    def _callbacks(self) -> list[TrainerCallback]:
        """Return the callbacks that measure and balance the model."""
        return [Monitor(), ExpertBalance(self.recipe.expert_balancing)]

    def results(self) -> dict[str, Any]:
        """Return what `results.json` holds beside the losses. All processes call it together."""
        return {}

    def _collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Make a batch of rows, of held-out data with their numbers `[batch]`.

        Raises:
            ValueError: The batch has a token id that the model does not know.
        """
        batch = collate(rows) if self.processor is None else collate_images(self.processor, rows)
        if ROW in rows[0]:
            batch[ROW] = torch.tensor([row[ROW] for row in rows])
        check_token_ids(batch["input_ids"], self.model, f"the data ({'; '.join(batch['documents'])})")
        return batch

    def train(self, *arguments: Any, **options: Any) -> TrainOutput:
        """Train as `Trainer` does, and restore the handler of SIGTERM also if training fails."""
        try:
            return super().train(*arguments, **options)
        finally:
            self.stopping.restore_handler()

    # The optimizer and the schedule. `Trainer` may call these methods more than once.

    def create_optimizer(self, model: PreTrainedModel | None = None) -> torch.optim.Optimizer:
        """Make the optimizer of the recipe, as `Trainer` calls it."""
        if self.optimizer is None:
            recipe, model = self.recipe, self.model if model is None else model
            self.optimizer = build_optimizer(
                model,
                name=recipe.optimizer,
                learning_rate=recipe.learning_rate,
                weight_decay=recipe.weight_decay,
                residual_lr_factor=recipe.residual_lr_factor,
                muon_per_head=recipe.muon_per_head,
            )
            # Now, since DeepSpeed will put its own tensors into the groups.
            residual = {id(tensor) for tensor in residual_tensors(model).values()}
            self._is_residual = [
                any(id(parameter) in residual for parameter in group["params"]) for group in self.optimizer.param_groups
            ]
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LambdaLR:
        """Make the schedule of the recipe, as `Trainer` calls it."""
        if self.lr_scheduler is None:
            recipe, steps = self.recipe, num_training_steps
            optimizer = self.create_optimizer() if optimizer is None else optimizer
            warmup = round(recipe.warmup * steps)
            schedule = build_schedule(
                optimizer,
                recipe.schedule,
                steps=steps,
                warmup_steps=warmup,
                decay_steps=min(round(recipe.decay * steps), steps - warmup),
                min_rate=recipe.min_rate,
            )
            if alone := round(recipe.residual_alone * steps):
                self._hold_back(optimizer, schedule, alone)
            self.lr_scheduler = schedule
        return self.lr_scheduler

    def _hold_back(self, optimizer: torch.optim.Optimizer, schedule: LambdaLR, steps: int) -> None:
        """Set the rate of all but the residual tensors to 0 in the first `steps`.

        Freezing these parameters would be simpler, but not every engine that shards models can do so during a run.
        """
        for i, group in enumerate(optimizer.param_groups):
            if not self._is_residual[i]:
                factor = schedule.lr_lambdas[i]
                schedule.lr_lambdas[i] = lambda step, factor=factor: 0.0 if step < steps else factor(step)
                group["lr"] = 0.0  # the schedule has set the rate of the first step already

    # The training loss

    def compute_loss(self, model, inputs: dict[str, Any], return_outputs: bool = False, **kwargs):
        """Compute the loss of a batch, as `Trainer` does. Raise FloatingPointError if it is not finite."""
        documents = inputs.pop("documents", None)
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        if model.training:
            self._check_loss(loss.detach(), documents)
            if "mtp_loss" in outputs:
                self._ahead.add(outputs["mtp_loss"])
        return (loss, outputs) if return_outputs else loss

    def _check_loss(self, loss: Tensor, documents: Sequence[str] | None) -> None:
        """Raise FloatingPointError if the loss of a training batch is not finite."""
        if not torch.isfinite(loss):
            raise self._not_finite("loss", loss.item(), self.state.global_step + 1, documents)

    def _not_finite(
        self, name: str, value: float, step: int, documents: Sequence[str] | None = None, kind: str = ""
    ) -> FloatingPointError:
        """Return the error for a number of a step that is not finite."""
        place = f", on {kind}{'; '.join(documents)}" if documents else ""
        last = get_last_checkpoint(self.args.output_dir) or "none"
        return FloatingPointError(f"the {name} is {value} in step {step}{place}. The last good checkpoint is {last}.")

    def _maybe_log_save_evaluate(
        self, tr_loss: Tensor, grad_norm: Tensor | float | None, *arguments: Any, **options: Any
    ) -> None:
        """Log, evaluate and save after a step, as `Trainer` calls it.

        Raises:
            FloatingPointError: The norm of the step's gradients is not finite. A checkpoint would hold NaN.
        """
        # Here, not before the step of the optimizer: the GPU has just been waited for, by `StopOnSignal`. The scaler of
        # fp16 skips the step for such a norm, and goes on with a smaller scale.
        if grad_norm is not None and not self.accelerator.optimizer_step_was_skipped:
            norm = float(grad_norm)
            if not math.isfinite(norm):
                raise self._not_finite("norm of the gradients", norm, self.state.global_step)
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *arguments, **options)

    def _track_num_input_tokens(self, inputs: Mapping[str, Any]) -> None:
        """Count the tokens of a batch, as `Trainer` calls it, once for all processes that compute the same batch."""
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        added = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + added // self.get_tp_size()

    # The held-out loss

    def prediction_step(
        self,
        model: PreTrainedModel,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor, None, None]:
        """Compute the loss of a batch of held-out rows, and add it to the mean over tokens.

        Raises:
            FloatingPointError: The loss is not finite.
        """
        documents = inputs.pop("documents", None)
        inputs = self._prepare_inputs(inputs)
        numbers, labels = inputs.pop(ROW), inputs.pop("labels")
        with torch.no_grad(), self.compute_loss_context_manager():
            logits = self._compute_logits(model, inputs)
        if logits is not None:
            loss = self._held_out.add(numbers, logits, labels)
            if not math.isfinite(loss):
                raise self._not_finite("loss", loss, self.state.global_step, documents, "held-out ")
        # `Trainer` averages the returned losses, and `evaluation_loop` replaces its average.
        return torch.zeros((), device=labels.device), None, None

    def _compute_logits(self, model: PreTrainedModel, inputs: Mapping[str, Any]) -> Tensor | None:
        """Return the logits `[batch, seq, vocab]` of a batch; `None` on a process that does not have them."""
        return model(**inputs, use_cache=False).logits

    def evaluation_loop(self, *arguments: Any, metric_key_prefix: str = "eval", **options: Any) -> EvalLoopOutput:
        """Return what `Trainer` returns, with the loss as the mean over the tokens of all rows, in nats/token.

        It is the plain loss also if training smoothes labels, so that its exponential is the perplexity.
        """
        self._held_out = TokenMean()
        output = super().evaluation_loop(*arguments, metric_key_prefix=metric_key_prefix, **options)
        loss = {f"{metric_key_prefix}_loss": self._held_out.result()}
        return output._replace(metrics={**(output.metrics or {}), **loss})


def _check_separable(model: PreTrainedModel, recipe: Recipe) -> None:
    """Raise ValueError if the model would silently let documents of one row attend to each other."""
    config = model.config.get_text_config()
    # A private name, by which `transformers` marks models with a state beside their keys and values.
    if getattr(model, "_is_stateful", False) and not isinstance(config, ResidualConfig):
        raise ValueError(
            f"`separate_documents` of the recipe must be false: the layers of {config.model_type} carry a state from "
            "one document to the next. Retrofit a Kimi Linear model (retrofit={}), or leave `separate_documents` out."
        )
    if is_flash_attention_requested(config) and recipe.micro_batch_size > 1:
        raise ValueError(
            "`separate_documents` of the recipe needs micro_batch_size=1 with flash attention, which keeps documents "
            f"apart in a single row only; it is {recipe.micro_batch_size}."
        )


__all__ = ["ROW", "AttnResTrainer", "TokenMean", "collate"]
