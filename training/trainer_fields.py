"""Fields of `TrainingArguments`, the key `trainer` of a recipe: their types, values, and those that the run sets.

The command line reads a recipe before it imports PyTorch, so the fields are taken from the source text of
`transformers`.
"""

from collections.abc import Callable, Collection
from typing import Any

from attnres.utils.declared import trainer_fields

from .recipe_values import check_keys, typed

# Fields of `TrainingArguments` that the run sets -> the remedy in the error message. `None`: leave the field out.
DECIDED_BY_RUN = {
    "output_dir": "`out`",
    "max_steps": "`steps`",
    "num_train_epochs": "`epochs`",
    **dict.fromkeys(
        ("per_device_train_batch_size", "per_device_eval_batch_size", "auto_find_batch_size"), "`micro_batch_size`"
    ),
    "gradient_accumulation_steps": "`batch_size` and `micro_batch_size`",
    "max_grad_norm": "`max_grad_norm`",
    "logging_steps": "`log_every`",
    **dict.fromkeys(("save_steps", "save_strategy"), "`save_every`"),
    "save_total_limit": "`keep`",
    "seed": "`seed`",
    "learning_rate": "`learning_rate`",
    "weight_decay": "`weight_decay`",
    **dict.fromkeys(("optim", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon"), "`optimizer`"),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler_kwargs"), "`schedule`"),
    **dict.fromkeys(("warmup_steps", "warmup_ratio"), "`warmup`"),
    "resume_from_checkpoint": "`out`",
    **dict.fromkeys(
        ("push_to_hub", "hub_always_push", "hub_model_id", "hub_private_repo", "hub_revision", "hub_strategy"),
        "`attnres push` once the run has ended",
    ),
    "hub_token": "`hf auth login`",
    "use_cpu": "the variable ACCELERATE_USE_CPU=true of the environment",
    "parallelism_config": "`distributed`",
    **dict.fromkeys(("logging_nan_inf_filter", "remove_unused_columns", "label_names", "use_cache"), None),
    # With one of these, a resumed run could not go on, or would be another run.
    **dict.fromkeys(("save_only_model", "ignore_data_skip", "train_sampling_strategy", "dataloader_in_order"), None),
    # After training, `Trainer` casts the model for an evaluation, and the result would be saved in 16 bits.
    **dict.fromkeys(("bf16_full_eval", "fp16_full_eval"), None),
    # Workers are forked. Other processes would have to receive the data set by pickle, which it does not support.
    "dataloader_multiprocessing_context": None,
}
# Fields that YAML reads as `false` where they are `no`.
_STRATEGIES = ("eval_strategy", "logging_strategy")
# Field -> the check of its value, and the allowed values as the error message names them.
_ALLOWED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "dataloader_drop_last": (lambda value: not value, "false, since it leaves out held-out rows too"),
    "label_smoothing_factor": (lambda value: 0 <= value < 1, "at least 0 and below 1"),
}


def type_trainer_fields(values: dict[str, Any]) -> dict[str, Any]:
    """Convert the fields of the trainer, as YAML reads them, to their types.

    Args:
        values: The value of `trainer`.

    Returns:
        The converted values. Values of unknown fields stay.

    Raises:
        ValueError: A number cannot be read.
    """
    converted = dict(values)
    for name, types in trainer_fields().items() if values else ():
        if name not in values or name in DECIDED_BY_RUN:
            continue
        if name in _STRATEGIES and values[name] is False:
            converted[name] = "no"
        kinds = {*types} - {"None"}
        if kinds <= {"int", "float"} and not _is_left_out(values[name], types):
            converted[name] = typed(f"trainer.{name}", values[name], float if "float" in kinds else int)
    return converted


def check_trainer_fields(values: dict[str, Any]) -> None:
    """Raise ValueError if a field of the trainer is unknown, is set by the run, or has a value that is not allowed.

    Args:
        values: The value of `trainer`.
    """
    if decided := next((key for key in values if key in DECIDED_BY_RUN), None):
        remedy = DECIDED_BY_RUN[decided]
        reason = f", since the run sets it: give {remedy} instead" if remedy else ": leave it out"
        raise ValueError(f"`trainer.{decided}` of the recipe must not be set{reason}.")
    if not values:
        return
    known = trainer_fields()
    check_keys("trainer", values, known)
    for key, value in values.items():
        # As text, "false" would count as true.
        if {*known[key]} <= {"bool", "None"} and not isinstance(value, bool | None):
            raise _wrong(key, value, "true or false")
        if key in _ALLOWED and not _is_left_out(value, known[key]) and not _is_allowed(key, value):
            raise _wrong(key, value, _ALLOWED[key][1])


def _is_allowed(key: str, value: Any) -> bool:
    try:
        return _ALLOWED[key][0](value)
    except TypeError:  # of another type
        return False


def _is_left_out(value: Any, types: Collection[str]) -> bool:
    """Return whether a value is the `null` that a field of these types may have."""
    return value is None and "None" in types


def _wrong(key: str, value: Any, allowed: str) -> ValueError:
    return ValueError(f"`trainer.{key}` of the recipe is {value!r}, but must be {allowed}.")


__all__ = ["DECIDED_BY_RUN", "check_trainer_fields", "type_trainer_fields"]
