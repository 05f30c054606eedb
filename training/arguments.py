"""Translate a recipe into the arguments of `transformers.Trainer`."""

from typing import TYPE_CHECKING

import torch
from accelerate import PartialState
from transformers import TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks

from .launch import divide_batch
from .recipe import Recipe

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

SHORTEST_CURVE = 10  # points of the training loss, if `epochs` shortens the run


def prepare_arguments(recipe: Recipe, state: PartialState) -> TrainingArguments:
    """Translate a recipe into the arguments of `transformers.Trainer`.

    Args:
        recipe: The recipe of the run.
        state: The processes of the run, and their devices.

    Returns:
        The arguments. [`set_steps`] sets their number of steps once the data is known.

    Raises:
        ValueError: The batch size does not fit the processes, or `trainer` of the recipe has a wrong value.
    """
    batch = divide_batch(recipe, state.num_processes)
    if recipe.trainer.fp16 and state.device.type == "cpu":
        raise ValueError("`trainer.fp16` of the recipe has no effect on a CPU: leave it out, or use `trainer.bf16`.")
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
        "per_device_train_batch_size": batch.micro,
        "per_device_eval_batch_size": batch.micro,
        "gradient_accumulation_steps": batch.accumulated,
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
        arguments = TrainingArguments(**defaults | recipe.trainer.given(), **decided)
        # `Trainer` makes these after the data is tokenised. Making one here shows at once which package it lacks.
        for callback in get_reporting_integration_callbacks(arguments.report_to):
            callback()
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"`trainer` of the recipe: {error}") from error
    if recipe.streaming:
        # Each process reads the whole stream. By default one reads it and joins what it sends, which must be tensors.
        arguments.accelerator_config.dispatch_batches = False
    return arguments


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
