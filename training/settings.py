"""The types of a recipe's values, the mappings that a recipe nests, and the error message on a wrong value.

Pydantic converts and checks the values. The command line reads a recipe before it imports PyTorch, so this file imports
no heavy package. It takes the fields of `transformers.TrainingArguments` from their source text.
"""

import ast
from collections.abc import Collection, Generator
from contextlib import contextmanager, suppress
from functools import cache
from os.path import expanduser
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    ValidationError,
    create_model,
    model_validator,
)

from attnres.utils.packaged import package_folder
from attnres.utils.wording import did_you_mean

# What a value must be, by the type of Pydantic's error, where Pydantic has no plain words for it.
_WORDS = {
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "a mapping of names to values"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    "tuple_type": "a list",
    "too_short": "a list with at least one item",
    "bool_type": "true or false",
    "string_type": "text",
}
_MOST_NAMED = 12  # the largest number of keys that a message names
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


def _read_number(value: Any) -> Any:
    """Return a number that YAML reads as text, such as `3e-4`. Refuse `true`, which Pydantic would take for 1."""
    if isinstance(value, bool):
        raise ValueError("a number")
    if isinstance(value, str):
        with suppress(ValueError):
            return float(value)
    return value


def _list_names(value: Any) -> Any:
    """Return a single name as a list, and `null` as an empty one."""
    return [] if value is None else [value] if isinstance(value, str) else value


Whole = Annotated[int, BeforeValidator(_read_number)]
Count = Annotated[Whole, Field(ge=1)]
Number = Annotated[float, BeforeValidator(_read_number), Field(allow_inf_nan=False)]
Factor = Annotated[Number, Field(ge=0)]
Share = Annotated[Number, Field(ge=0, le=1)]
Positive = Annotated[Number, Field(gt=0)]
Name = Annotated[str, Field(min_length=1)]
# A model, a file or a folder, in which a leading `~` is the home directory.
Place = Annotated[Name, AfterValidator(expanduser)]
Names = Annotated[tuple[Name, ...], BeforeValidator(_list_names)]
Places = Annotated[tuple[Place, ...], BeforeValidator(_list_names)]
_Switch = StrictBool | None  # `TrainingArguments` take `null` for false
_TYPES = {"bool": _Switch, "int": Whole, "float": Number}
# YAML reads `no` as `false`.
_Strategy = Annotated[Any, BeforeValidator(lambda value: "no" if value is False else value)]


class Settings(BaseModel):
    """A mapping in a recipe. Unknown keys and values of a wrong type are refused.

    Attributes:
        key: The key of the recipe that has this mapping.
    """

    key: ClassVar[str]
    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, values: Any) -> Any:
        if isinstance(values, dict):
            check_keys(cls.key, values, cls.model_fields)
        return values

    def given(self) -> dict[str, Any]:
        """Return the keys that were given, with their values."""
        return self.model_dump(exclude_unset=True)


class LoraSettings(Settings):
    """The key `lora` of a recipe: the arguments of [`attnres.training.lora.add_adapters`], which describes them."""

    key = "lora"
    rank: Count = 16
    alpha: Positive | None = None
    dropout: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    targets: Annotated[Names, Field(min_length=1)] | None = None
    experts: StrictBool = True
    expert_rank: Count | None = None
    shared_outer: StrictBool = False


class ShardingSettings(Settings):
    """The key `distributed` of a recipe: how `transformers` shards the model among processes.

    Attributes:
        sequence_parallel: Shard the sequence too, among the processes that shard the matrices.

    The other fields are those of `transformers.distributed.DistributedConfig`, for which `Trainer` has an engine.
    """

    key = "distributed"
    fsdp_size: Count | None = None
    dp_replicate_size: Count | None = None
    tp_size: Count | None = None
    ep_size: Count | None = None
    tp_plan: dict[str, str] | Literal["auto"] | None = None
    fsdp_plan: dict[str, str] | None = None
    ep_plan: dict[str, str] | None = None
    ep_implementation: str = "auto"
    fsdp_cpu_offload: StrictBool = False
    fsdp_mixed_precision: StrictBool = False
    sequence_parallel: StrictBool = False

    @model_validator(mode="after")
    def _check_sizes(self) -> "ShardingSettings":
        experts, matrices = self.ep_size or 1, self.tp_size or 1
        if experts > 1 and (experts % matrices or (self.fsdp_size or 1) * matrices % experts):
            raise ValueError(
                f"`distributed.ep_size` of the recipe is {experts}, but must be a multiple of `tp_size` and divide "
                "`fsdp_size` times `tp_size`."
            )
        if self.sequence_parallel and matrices < 2:
            raise ValueError(
                "`distributed.sequence_parallel` of the recipe shards the sequence among the processes that shard the "
                "matrices, but there are none: give `tp_size` too, or leave it out."
            )
        if self.sequence_parallel and experts > 1:
            raise ValueError(
                "`distributed.sequence_parallel` of the recipe cannot stand beside `ep_size`: leave out one of them."
            )
        return self

    def count_processes(self) -> int | None:
        """Count the processes that share a model and its replicas; `None` if `tp_plan` takes all that there are."""
        if self.tp_size is None and self.tp_plan is not None:
            return None
        return (self.dp_replicate_size or 1) * (self.fsdp_size or 1) * (self.tp_size or 1)


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
        ast.unparse(item.target): tuple(part.strip() for part in ast.unparse(item.annotation).split("|"))
        for item in declared.body
        if isinstance(item, ast.AnnAssign)
    }


@cache
def _all_fields() -> type[TrainerFields]:
    """Return the class with every field of `TrainingArguments`, of which numbers and switches have their types."""
    types: dict[str, Any] = {}
    for name, parts in trainer_fields().items():
        if name not in TrainerFields.model_fields and name not in DECIDED_BY_RUN:
            (*kinds,) = {*parts} - {"None"}
            kind: Any = _TYPES.get(
                "float" if {*kinds} == {"int", "float"} else kinds[0] if len(kinds) == 1 else "", Any
            )
            types[name] = (kind | None if "None" in parts else kind, None)
    return create_model("TrainerFields", __base__=TrainerFields, **types)


def read_trainer_fields(values: Any) -> Any:
    """Return the fields of the trainer with their types. A value that is no mapping stays, for Pydantic to refuse.

    Raises:
        ValueError: A field is unknown, is set by the run, or has a value of a wrong type.
    """
    return _all_fields().model_validate(values) if isinstance(values, dict) and values else values


@contextmanager
def explained(subject: str) -> Generator[None]:
    """Turn Pydantic's error inside the block into a ValueError of one line.

    Args:
        subject: What has the wrong value, such as `the recipe`.

    Raises:
        ValueError: A value is missing, unknown or not allowed. The message names key, value and remedy.
    """
    try:
        yield
    except ValidationError as error:
        raise ValueError(_describe_error(error, subject)) from error


def _describe_error(error: ValidationError, subject: str) -> str:
    """Return the first error in one line, or all missing keys if nothing else is wrong."""
    # A default that follows from another value has an error of its own if that value is wrong.
    details = [d for d in error.errors(include_url=False) if d["type"] != "default_factory_not_called"]
    if missing := [".".join(map(str, detail["loc"])) for detail in details if detail["type"] == "missing"]:
        details = [detail for detail in details if detail["type"] != "missing"]
        if not details:
            names = " and ".join(f"`{name}`" for name in missing)
            return (
                f"{subject[0].upper()}{subject[1:]} lacks {names}: give {' '.join(f'{name}=...' for name in missing)}"
            )
    detail = details[0]
    kind, message = detail["type"], detail["msg"]
    cause = str(detail["ctx"]["error"]) if kind == "value_error" else ""
    if cause.endswith((".", "?")):
        return cause  # a whole sentence, by a check of this project
    keys = [part for part in detail["loc"] if isinstance(part, str)]
    if keys[-1:] == ["[key]"]:
        return f"`{keys[0]}` of {subject} has a key that is no text, but must be {_WORDS['dict_type']}."
    name = f"`{'.'.join(keys)}` of {subject}"
    if kind == "string_too_short":
        return f"{name} is empty: name one, or leave it out."
    allowed = cause or _WORDS.get(kind) or message.removeprefix("Input should be ")
    allowed = allowed.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
    return f"{name} is {detail['input']!r}, but must be {allowed}."


def check_keys(name: str, given: Collection[Any], known: Collection[str]) -> None:
    """Raise ValueError if the mapping `name` of a recipe has an unknown key."""
    for key in (key for key in given if key not in known):
        is_short = len(known) <= _MOST_NAMED
        raise ValueError(f"`{name}` has no `{key}`.{did_you_mean(str(key), known, otherwise_all=is_short)}")


__all__ = [
    "DECIDED_BY_RUN",
    "LONGEST_TIMEOUT",
    "Count",
    "Factor",
    "LoraSettings",
    "Name",
    "Names",
    "Number",
    "Place",
    "Places",
    "Positive",
    "Settings",
    "Share",
    "ShardingSettings",
    "TrainerFields",
    "Whole",
    "check_keys",
    "explained",
    "read_trainer_fields",
    "trainer_fields",
]
