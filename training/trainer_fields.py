"""The key `trainer` of a recipe: fields of `TrainingArguments`, their types, and those that the run sets.

The command line reads a recipe before it imports PyTorch, so the fields are taken from the source text of
`transformers`.
"""

import ast
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool, create_model, model_validator

from attnres.utils.packaged import package_folder

from .settings import Number, Settings, Whole

LONGEST_TIMEOUT = 30 * 24 * 3600  # seconds; gloo counts nanoseconds in 64 bits, and fails at once beyond their range
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
    # It would leave out held-out rows too.
    "dataloader_drop_last": None,
}
_Switch = StrictBool | None  # `TrainingArguments` take `null` for false
_TYPES = {"bool": _Switch, "int": Whole, "float": Number}
# YAML reads `no` as `false`.
_Strategy = Annotated[Any, BeforeValidator(lambda value: "no" if value is False else value)]


class AccumulationSettings(Settings):
    """The field `accelerator_config.gradient_accumulation_kwargs`, without `num_steps`, which the recipe decides."""

    key = "trainer.accelerator_config.gradient_accumulation_kwargs"
    sync_each_batch: StrictBool = False
    sync_with_dataloader: StrictBool = True
    adjust_scheduler: StrictBool = True


class AcceleratorSettings(Settings):
    """The field `accelerator_config`. Other values would change which rows a process reads or accumulates."""

    key = "trainer.accelerator_config"
    # It would divide `batch_size` a second time.
    split_batches: Literal[False] = False
    # It sends tensors only.
    dispatch_batches: Literal[False] | None = None
    # Without it, the processes evaluate different numbers of batches.
    even_batches: Literal[True] = True
    # Without it, a resumed run reads other rows.
    use_seedable_sampler: Literal[True] = True
    non_blocking: StrictBool = False
    gradient_accumulation_kwargs: AccumulationSettings | None = None
    use_configured_state: StrictBool = False


class TrainerFields(Settings):
    """The key `trainer` of a recipe. Only the fields that the run itself reads stand here; the others are `Any`."""

    key = "trainer"
    accelerator_config: AcceleratorSettings | None = None
    average_tokens_across_devices: _Switch = True
    ddp_timeout: Annotated[Whole, Field(ge=1, le=LONGEST_TIMEOUT)] = 1800  # seconds, the default of `transformers`
    eval_delay: Annotated[Number, Field(ge=0)] = 0.0
    eval_steps: Number | None = None
    eval_strategy: _Strategy = "steps"
    fp16: _Switch = False
    fsdp: Any = None
    greater_is_better: _Switch = None
    label_smoothing_factor: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    load_best_model_at_end: _Switch = False
    logging_strategy: _Strategy = "steps"
    metric_for_best_model: str | None = None
    neftune_noise_alpha: Number | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_decided(cls, values: Any) -> Any:
        for key in values if isinstance(values, dict) else ():
            if key in DECIDED_BY_RUN:
                remedy = DECIDED_BY_RUN[key]
                reason = f", since the run sets it: give {remedy} instead" if remedy else ": leave it out"
                raise ValueError(f"`trainer.{key}` of the recipe must not be set{reason}.")
        return values


@cache
def trainer_fields() -> dict[str, tuple[str, ...]]:
    """Return the fields of `transformers.TrainingArguments`, each with the names of its types, such as `float`."""
    tree = ast.parse((package_folder("transformers") / "training_args.py").read_text(encoding="utf-8"))
    (declared,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments")
    return {
        item.target.id: tuple(part.strip() for part in ast.unparse(item.annotation).split("|"))
        for item in declared.body
        if isinstance(item, ast.AnnAssign)
    }


@cache
def _all_fields() -> type[TrainerFields]:
    """Return the class with every field of `TrainingArguments`, of which numbers and switches have their types."""
    types = {}
    for name, parts in trainer_fields().items():
        if name not in TrainerFields.model_fields and name not in DECIDED_BY_RUN:
            (*kinds,) = {*parts} - {"None"}
            kind = _TYPES.get("float" if {*kinds} == {"int", "float"} else kinds[0] if len(kinds) == 1 else "", Any)
            types[name] = (kind | None if "None" in parts else kind, None)
    return create_model("TrainerFields", __base__=TrainerFields, **types)


def read_trainer_fields(values: Any) -> Any:
    """Return the fields of the trainer with their types. What is no mapping stays, for Pydantic to refuse.

    Raises:
        ValueError: A field is unknown, is set by the run, or has a value of a wrong type.
    """
    return _all_fields().model_validate(values) if isinstance(values, dict) and values else values


__all__ = ["DECIDED_BY_RUN", "LONGEST_TIMEOUT", "TrainerFields", "read_trainer_fields", "trainer_fields"]
