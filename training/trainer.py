"""`transformers.Trainer` for a recipe, with checkpoints that are either complete or absent.

It differs from `Trainer` as follows:

- The recipe decides the optimizer and the schedule.
- A checkpoint is written under another name and then renamed. SIGTERM saves a checkpoint and stops the run.
- A loss or a gradient that is not finite stops the run. The error names the documents of a loss.
- The held-out loss is a mean over tokens.
- The log has the load of the experts, tokens/s and the depth attention.
"""

import contextlib
import math
import os
import secrets
import shutil
import warnings
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments
from transformers.distributed import load_optimizer_distributed, save_optimizer_distributed
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import (
    PREFIX_CHECKPOINT_DIR,
    EvalLoopOutput,
    TrainOutput,
    get_last_checkpoint,
    rotate_checkpoints,
)
from transformers.utils.generic import is_flash_attention_requested

from attnres.configuration_attnres import ResidualConfig
from attnres.residual_attnres import residual_tensors
from attnres.utils.errors import about, is_lost_connection, is_timeout, why_not_written
from attnres.utils.token_ids import check_token_ids

from .balance import ExpertBalance
from .checkpoints import ResumableTrainer, cannot_resume_note
from .held_out import ROW, NumberedRows, TokenMean
from .monitor import Monitor
from .optimizer import build_optimizer, build_schedule
from .recipe import Recipe
from .run_folder import PARTIAL
from .trainer_callbacks import Intervals, StopOnSignal

OPTIMIZER = "optimizer"  # the folder of a sharded model's optimizer in a checkpoint


def collate(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Stack rows of [`attnres.training.data.blocks.load_blocks`] to a batch.

    Args:
        rows: The rows.

    Returns:
        `input_ids`, `labels` and, if the rows have them, `position_ids`, int64 `[batch, seq]`; the rows' numbers
        `[batch]`, for held-out data; and `documents`, the places of each row.
    """
    names = [name for name in ("input_ids", "labels", "position_ids") if name in rows[0]]
    batch = {name: torch.stack([row[name] for row in rows]).long() for name in names}
    if ROW in rows[0]:
        batch[ROW] = torch.tensor([row[ROW] for row in rows])
    return batch | {"documents": [row["documents"] for row in rows]}


class AttnResTrainer(ResumableTrainer):
    """A `Trainer` of a model by a [`Recipe`].

    Args:
        model: The model, whole or sharded among the processes by `transformers`.
        recipe: The recipe of the run.
        arguments: The arguments that [`attnres.training.arguments.prepare_arguments`] makes from the recipe.
        options: Other arguments of `Trainer`, such as the data sets.

    Attributes:
        recipe: The recipe.
        stopping: The callback that ends the run after SIGTERM.
        is_sharded: Whether `transformers` has sharded the model among the processes.
        best_step: The step of the checkpoint that `load_best_model_at_end` has loaded, `None` without one.

    Raises:
        ValueError: The recipe sets `separate_documents`, and the model cannot keep documents apart.
        FloatingPointError: From `train`: the loss, a held-out loss or the norm of the gradients is not finite. From
            `evaluate`: the held-out loss is not.
        OSError: From `train`: a checkpoint cannot be written. The one before it stays.
    """

    model: PreTrainedModel

    def __init__(self, model: PreTrainedModel, recipe: Recipe, arguments: TrainingArguments, **options):
        if recipe.separate_documents:
            _check_separable(model, recipe)
        self.recipe = recipe
        self.stopping = StopOnSignal(self)
        self._saving_in: str | None = None  # the folder that a checkpoint is being written into
        self.best_step: int | None = None
        callbacks = [Intervals(), *self._callbacks(), self.stopping]
        # The warning is about changing a layer's output in place, which nothing here does.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        self.is_sharded: bool = getattr(model, "is_distributed_loading_by_transformers", False)
        if self.is_sharded:
            # `Trainer` cannot save a sharded optimizer; `_save_checkpoint` does.
            arguments.save_only_model = True
        if options.get("eval_dataset") is not None:
            options["eval_dataset"] = NumberedRows(options["eval_dataset"])
        super().__init__(model, arguments, data_collator=self._collate, callbacks=callbacks, **options)
        if self.label_smoother is not None:
            # `Trainer` does not shift the labels of a compiled model, whose class it does not know.
            self.label_smoother = partial(self.label_smoother, shift_labels=True)
        # A random part of the name of that folder, the same in all processes of this run. So a process that outlives
        # its run cannot write into a checkpoint of the next one.
        self._run_id: str = broadcast_object_list([secrets.token_hex(4)])[0]

    def _callbacks(self) -> list[TrainerCallback]:
        """Return the callbacks that measure and balance the model."""
        return [Monitor(), ExpertBalance(self.recipe.expert_balancing)]

    @property
    def total_parameters(self) -> int | None:
        """Return the number of parameters of the whole model if this process has only some layers, else `None`."""
        return None

    def results(self) -> dict[str, Any]:
        """Return what `results.json` holds beside the losses. All processes call it together."""
        return {}

    def _collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Make a batch of rows. Raise ValueError if it has a token id that the model does not know."""
        batch = collate(rows)
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
            self._hold_back(optimizer, schedule, round(recipe.residual_alone * steps))
            self.lr_scheduler = schedule
        return self.lr_scheduler

    def _hold_back(self, optimizer: torch.optim.Optimizer, schedule: LambdaLR, steps: int) -> None:
        """Set the rate of all but the residual tensors to 0 in the first `steps`.

        Freezing these parameters would be simpler, but not every engine that shards models can do so during a run.
        """
        if not steps:
            return
        for i, group in enumerate(optimizer.param_groups):
            if not self._is_residual[i]:
                factor = schedule.lr_lambdas[i]
                schedule.lr_lambdas[i] = lambda step, factor=factor: 0.0 if step < steps else factor(step)
                group["lr"] = 0.0  # the schedule has set the rate of the first step already

    # The training loss

    def compute_loss(self, model, inputs: dict[str, Any], return_outputs: bool = False, **kwargs):
        """Compute the loss of a batch, as `Trainer` does. Raise FloatingPointError if it is not finite."""
        documents = inputs.pop("documents", None)
        result = super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)
        loss: Tensor = result[0] if return_outputs else result
        if model.training:
            self._check_loss(loss.detach(), documents)
        return result

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

    # Checkpoints

    def _get_output_dir(self, trial=None) -> str:
        """Return the folder that `Trainer` puts the next checkpoint into."""
        return self._saving_in or super()._get_output_dir(trial)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Write the weights: for a checkpoint as resuming reads them, else as a whole model in the published layout."""
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        if not isinstance(model, PreTrainedModel):
            return super()._save(output_dir, state_dict)
        is_main, is_checkpoint = self.args.should_save, self._saving_in is not None
        sharding = getattr(model.config, "distributed_config", None)
        if self.is_sharded and not is_checkpoint:
            state_dict = model.gather_sharded_state_dict_for_save(
                model, model.state_dict(), sharding, save_on_this_rank=is_main
            )
            model.config.distributed_config = None  # since the files hold a whole model
        if state_dict is not None:
            # Gathering copies tied weights, and `save_pretrained` does not see that the copies are tied.
            state_dict = {name: state_dict[name] for name in state_dict if name not in model.all_tied_weights_keys}
        in_parts = self.is_sharded and is_checkpoint
        with _untied(model) if in_parts else contextlib.nullcontext():
            # A checkpoint has the model's own names of tensors, since resuming does not read a published layout.
            model.save_pretrained(
                output_dir or self.args.output_dir or "",
                state_dict=state_dict,
                is_main_process=is_main,
                save_original_format=not is_checkpoint,
                distributed_checkpoint=in_parts,
            )
        if sharding is not None:
            model.config.distributed_config = sharding

    def _save_checkpoint(self, model, trial) -> None:
        """Write a checkpoint under another name, and rename it once every process has written its part."""
        run = Path(self.args.output_dir or "")
        self._saving_in = str(run / f"{PARTIAL}{self._run_id}")
        try:
            if self.args.should_save:
                shutil.rmtree(self._saving_in, ignore_errors=True)
            self.accelerator.wait_for_everyone()
            super()._save_checkpoint(model, trial)
            if self.is_sharded:
                folder = f"{self._saving_in}/{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
                self._save_optimizer_and_scheduler(folder)
                self._save_rng_state(folder)
            self._name_best(run)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                (folder,) = Path(self._saving_in).iterdir()  # `checkpoint-N`
                if self.state.best_global_step:
                    self.state.save_to_json(str(folder / TRAINER_STATE_NAME))
                shutil.rmtree(run / folder.name, ignore_errors=True)
                # Otherwise a machine that loses its power could leave a checkpoint with empty files.
                _flush(folder)
                folder.rename(run / folder.name)
        except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
            if is_lost_connection(error) or is_timeout(error):
                raise  # another process has failed, and reports why; or it hangs
            last = get_last_checkpoint(str(run))
            raise OSError(
                f"the checkpoint of step {self.state.global_step} could not be written: {why_not_written(error)}. "
                f"The last one is {last or 'none'}."
            ) from error
        finally:
            if self.args.should_save:
                shutil.rmtree(self._saving_in, ignore_errors=True)
            self._saving_in = None
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            rotate_checkpoints(str(run), save_total_limit=self.args.save_total_limit, best_model_checkpoint=best)
        self.accelerator.wait_for_everyone()

    def _name_best(self, run: Path) -> None:
        """Set the path of the best checkpoint, which `Trainer` takes for a part of the folder being written into."""
        if step := self.state.best_global_step:
            path = run / f"{PREFIX_CHECKPOINT_DIR}-{step}"
            if step == self.state.global_step or path.is_dir():
                self.state.best_model_checkpoint = str(path)

    def _load_best_model(self) -> None:
        """Load the checkpoint with the lowest held-out loss, as `Trainer` calls it when training ends.

        Raises:
            FileNotFoundError: Someone has removed it. `Trainer` would only log this, and go on with the last weights.
        """
        # pyrefly: ignore[bad-argument-type]  # `Trainer` calls this only if there is one
        folder = Path(self.state.best_model_checkpoint)
        if not folder.is_dir():
            raise FileNotFoundError(
                f"{folder}, the checkpoint with the lowest held-out loss, was removed during the run. Take another "
                f"checkpoint in {folder.parent} as the result."
            )
        self._load_best_weights(folder)
        self.best_step = self.state.best_global_step

    def _load_best_weights(self, folder: Path) -> None:
        """Load the weights of the best checkpoint, in this folder."""
        super()._load_best_model()

    # Checkpoints of sharded models: each process reads and writes its part.

    @property
    def has_optimizer_parts(self) -> bool:
        """Return whether each process writes its part of the optimizer's state into a checkpoint."""
        return self.is_sharded

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: PreTrainedModel | None = None) -> None:
        # A sharded model has been loaded from the checkpoint already.
        if not self.is_sharded:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.has_optimizer_parts:
            return super()._save_optimizer_and_scheduler(output_dir)
        # pyrefly: ignore[missing-attribute]  # `accelerate` has wrapped it
        save_optimizer_distributed(self.model, self.optimizer.optimizer, f"{output_dir}/{OPTIMIZER}")
        if self.args.should_save:
            # pyrefly: ignore[missing-attribute]  # made before the first step
            torch.save(self.lr_scheduler.state_dict(), f"{output_dir}/{SCHEDULER_NAME}")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        self._load_states(checkpoint)
        schedule = self.lr_scheduler
        if checkpoint is not None and isinstance(schedule, LambdaLR):  # DeepSpeed has its own
            # The checkpoint has the rates of the next step in a run of its length, and this run may be longer.
            for group, rate, factor in zip(schedule.optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas):
                group["lr"] = rate * factor(schedule.last_epoch)
            schedule._last_lr = [group["lr"] for group in schedule.optimizer.param_groups]  # which `Trainer` logs

    def _load_states(self, checkpoint: str | None) -> None:
        if not self.has_optimizer_parts or checkpoint is None:
            return super()._load_optimizer_and_scheduler(checkpoint)
        folder = Path(checkpoint)
        with about(folder / OPTIMIZER, cannot_resume_note(folder)):
            # pyrefly: ignore[missing-attribute]  # `accelerate` has wrapped it
            load_optimizer_distributed(self.model, self.optimizer.optimizer, str(folder / OPTIMIZER))
        with about(folder / SCHEDULER_NAME, cannot_resume_note(folder)):
            self._load_schedule(folder / SCHEDULER_NAME)

    def _load_schedule(self, path: Path) -> None:
        """Continue the schedule at the step of a checkpoint."""
        # pyrefly: ignore[missing-attribute]  # made before the first step
        self.lr_scheduler.load_state_dict(torch.load(path, weights_only=True))


@contextlib.contextmanager
def _untied(model: PreTrainedModel) -> Generator[None]:
    """Give tied parameters memory of their own for a while.

    `transformers` writes all parameters of a sharded checkpoint, and `safetensors` refuses those that share memory, as
    they do in a resumed run.
    """
    model.state_dict()  # FSDP2 puts the parts of parameters into the modules before it reads them
    tied = []
    for name in model.all_tied_weights_keys:
        owner, _, leaf = name.rpartition(".")
        parameters = model.get_submodule(owner)._parameters
        if (parameter := parameters[leaf]) is None:
            continue
        tied.append((parameters, leaf, parameter))
        parameters[leaf] = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
    try:
        yield
    finally:
        for parameters, leaf, parameter in tied:
            parameters[leaf] = parameter


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


def _flush(folder: Path) -> None:
    """Make sure that the files of a folder are on the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
