"""The types of a recipe's values, the settings that a recipe nests, and the error message on a wrong value.

Pydantic converts and checks the values. The command line reads a recipe before it imports PyTorch, so this file imports
no heavy package.
"""

from collections.abc import Collection, Generator
from contextlib import contextmanager, suppress
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
    model_validator,
)

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
    keys = [str(part) for part in detail["loc"] if isinstance(part, str)]
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
    "Whole",
    "check_keys",
    "explained",
]
