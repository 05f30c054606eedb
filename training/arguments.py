"""Translate a recipe into the arguments of `transformers.Trainer`."""

from typing import TYPE_CHECKING

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from transformers import TrainingArguments
from transformers.distributed import DistributedConfig
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_pt_utils import AcceleratorConfig

from .recipe import Recipe
from .start import divide_batch

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

SHORTEST_CURVE = 10  # points of the training loss, if `epochs` shortens the run


def prepare_arguments(recipe: Recipe, state: PartialState, division: DistributedConfig | None) -> TrainingArguments:
    """Translate a recipe into the arguments of `transformers.Trainer`.

    Args:
        recipe: The recipe of the run.
        state: The processes of the run, and their devices.
        division: How they divide the model; `None` if each has the whole model.

    Returns:
        The arguments. [`set_steps`] sets their number of steps once the data is known.

    Raises:
        ValueError: The batch size does not fit the processes, or `trainer` of the recipe has a wrong value.
    """
    tp_size = 1 if division is None else division.tp_size
    ranks_per_batch, micro, accumulated = divide_batch(recipe, state.num_processes, tp_size)
    if ranks_per_batch > 1 and not recipe.trainer.get("average_tokens_across_devices", True):
        way = "`tp_size` of `distributed`" if recipe.pipeline is None else "`pipeline`"
        raise ValueError(
            f"`trainer.average_tokens_across_devices` of the recipe must be true with {way}, where several processes "
            "compute the same batch: `Trainer` would divide the loss by too few labels. Leave it out."
        )
    _check_for_processes(recipe, state)
    # The recipe may override these.
    defaults = {
        "eval_strategy": "steps",
        "eval_steps": recipe.save_every,
        "eval_on_start": True,
        "report_to": "none",
        "dataloader_pin_memory": torch.cuda.is_available(),
    }
    # The recipe must not set these: they are keys of `DECIDED_BY_RUN`.
    decided = {
        "output_dir": recipe.out,
        "max_steps": recipe.most_steps or 1,  # until `set_steps` knows the data
        "per_device_train_batch_size": micro,
        "per_device_eval_batch_size": micro,
        "gradient_accumulation_steps": accumulated,
        "max_grad_norm": recipe.max_grad_norm,
        "logging_steps": recipe.log_every,
        "logging_nan_inf_filter": False,  # it would show a loss of 0 when the model diverges
        "save_steps": recipe.save_every,
        "save_total_limit": recipe.keep,
        "seed": recipe.seed,
        "remove_unused_columns": False,
        "label_names": ["labels"],
        "use_cpu": state.device.type == "cpu",
    }
    try:
        arguments = TrainingArguments(**defaults | recipe.trainer, **decided)
        # `Trainer` makes these after the data is tokenised. Making one here shows at once which package it lacks.
        for callback in get_reporting_integration_callbacks(arguments.report_to):
            callback()
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"`trainer` of the recipe: {error}") from error
    _check_loading(arguments.accelerator_config)
    if recipe.streaming:
        # Each process reads the whole stream. By default one reads it and joins what it sends, which must be tensors.
        arguments.accelerator_config.dispatch_batches = False
    if arguments.load_best_model_at_end:
        _check_best(arguments, division)
    return arguments


def _check_for_processes(recipe: Recipe, state: PartialState) -> None:
    """Raise ValueError if a field of the trainer does not work with the processes of the run or their devices."""
    trainer = recipe.trainer
    if trainer.get("fp16") and state.device.type == "cpu":
        raise ValueError("`trainer.fp16` of the recipe has no effect on a CPU: leave it out, or use `trainer.bf16`.")
    if trainer.get("fsdp") and state.distributed_type == DistributedType.NO:
        raise ValueError(
            "`trainer.fsdp` of the recipe divides the model among processes, but this run was not launched as several: "
            "start it by `accelerate launch`, or leave it out."
        )


def _check_loading(settings: AcceleratorConfig) -> None:
    """Raise ValueError if accelerate's settings would change which rows a process reads or accumulates."""
    # `split_batches` would divide `batch_size` a second time. Without `even_batches` the processes evaluate different
    # numbers of batches, and without `use_seedable_sampler` a resumed run reads other rows.
    expected = AcceleratorConfig()
    changed = [
        name
        for name in ("split_batches", "even_batches", "use_seedable_sampler")
        if getattr(settings, name) != getattr(expected, name)
    ]
    changed += ["dispatch_batches"] if settings.dispatch_batches else []  # it sends tensors only
    changed += ["gradient_accumulation_kwargs"] if "num_steps" in (settings.gradient_accumulation_kwargs or {}) else []
    if changed:
        raise ValueError(
            f"`trainer.accelerator_config` of the recipe sets `{changed[0]}`, by which the processes would read or "
            "accumulate other rows than the recipe says: leave it out."
        )


def _check_best(arguments: TrainingArguments, division: DistributedConfig | None) -> None:
    """Raise ValueError if a run cannot end with its best checkpoint."""
    subject = "`trainer.load_best_model_at_end` of the recipe"
    if division is not None:
        raise ValueError(
            f"{subject} does not work with `distributed`, whose checkpoints are in parts: leave it out, and take the "
            "checkpoint that you want."
        )
    if arguments.metric_for_best_model not in ("loss", "eval_loss") or arguments.greater_is_better:
        raise ValueError(
            f"{subject} chooses the lowest held-out loss: leave out `metric_for_best_model` and `greater_is_better`."
        )
    if arguments.eval_delay > 0:
        raise ValueError(f"{subject} needs a held-out loss for each checkpoint: leave out `trainer.eval_delay`.")
    if arguments.eval_steps != arguments.save_steps:
        raise ValueError(
            f"{subject} needs a held-out loss for each checkpoint and no other: leave out `trainer.eval_steps`, which "
            "then is `save_every`."
        )


def set_steps(arguments: TrainingArguments, recipe: Recipe, train: "Dataset | IterableDataset") -> None:
    """Set the number of steps in `arguments`. `epochs` of the recipe may limit it, now that the data is known.

    Args:
        arguments: The arguments of the run; they are changed in place.
        recipe: The recipe of the run.
        train: The sequences to train on.
    """
    arguments.max_steps = recipe.count_steps(None if recipe.streaming else len(train))
    if arguments.max_steps != recipe.most_steps:
        # `log_every` is chosen for a run of full length. With it, the curve of a much shorter run would have one point.
        arguments.logging_steps = min(recipe.log_every, max(1, arguments.max_steps // SHORTEST_CURVE))


__all__ = ["prepare_arguments", "set_steps"]
