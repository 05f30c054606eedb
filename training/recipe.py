"""A recipe: everything that decides a training run, as a YAML file and `key=value` changes to it."""

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from importlib.resources import files
from inspect import signature
from pathlib import Path
from typing import Any

import yaml
from transformers import TrainingArguments

from attnres.conversion import retrofit

from .documents import BAD_ROWS
from .optimizer import OPTIMIZERS, SCHEDULES


@dataclass(frozen=True)
class Recipe:
    """One run. Steps are optimizer steps; batches count sequences of `length` tokens over all processes.

    Attributes:
        model: a directory or Hub id, to go on with; or a named configuration (`attnres-tiny`), to train from scratch.
        config: fields of the model's configuration to set, such as `attn_res_block_size`; `dtype: float32` trains a
            checkpoint of half precision in full.
        retrofit: arguments of [`attnres.conversion.retrofit`] for a standard model, such as `{block_size: 4}`.
        tokenizer: a directory or Hub id; by default the model's. From scratch there must be one.
        train, held_out: data sets, see [`attnres.training.data.DataSpec`]. Without `held_out`, `held_out_sequences` are
            taken from the training data.
        split, held_out_split: of data sets that have several; the second is the first by default.
        column: of the text; with `chat`, of the messages.
        chat: the data is conversations; only the assistant's part is learned.
        steps, tokens: the length of the run; one of them.
        micro_batch_size: sequences that a process computes at once; the rest of `batch_size` is accumulated.
        optimizer: `adamw`, or `muon` for the matrices.
        attn_res_lr_factor: of the pseudo-queries and key norms, times `learning_rate`.
        attn_res_alone: the share of the steps in which these alone are trained.
        schedule: `cosine` or `wsd`; `warmup` and `decay` are shares of the steps.
        expert_balancing: the rate at which the routers' biases follow the load; 0 is off.
        lora: arguments of [`attnres.training.lora.add_adapters`]; only adapters and AttnRes vectors are trained then.
        merge: with `lora`, write the merged model beside the adapter.
        distributed: divides the model among processes: fields of `transformers`' `DistributedConfig`, such as
            `{fsdp_size: 8}`; see `training/many_devices.md`.
        trainer: any other field of `transformers.TrainingArguments`: `bf16`, `activation_checkpointing`,
            `torch_compile`, `report_to` (`tensorboard`, `wandb`), and so on.
    """

    model: str
    train: Sequence[str]
    out: str
    config: dict[str, Any] = field(default_factory=dict)
    retrofit: dict[str, Any] | None = None
    tokenizer: str | None = None
    held_out: Sequence[str] = ()
    held_out_split: str | None = None
    held_out_sequences: int = 64
    column: str = "text"
    split: str = "train"
    streaming: bool = False
    bad_rows: str = "error"
    chat: bool = False
    length: int = 1024
    batch_size: int = 32
    micro_batch_size: int = 8
    steps: int | None = None
    tokens: int | None = None
    optimizer: str = "adamw"
    learning_rate: float = 3e-4
    weight_decay: float = 0.1
    attn_res_lr_factor: float = 1.0
    attn_res_alone: float = 0.0
    schedule: str = "wsd"
    warmup: float = 0.05
    decay: float = 0.5
    min_rate: float = 0.0
    max_grad_norm: float = 1.0
    expert_balancing: float = 0.0
    lora: dict[str, Any] | None = None
    merge: bool = False
    seed: int = 0
    log_every: int = 10
    save_every: int = 200
    keep: int = 2
    distributed: dict[str, Any] | None = None
    trainer: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.tokens is None):
            raise ValueError("Give the recipe either `steps` or `tokens`.")
        for name in (
            "length",
            "batch_size",
            "micro_batch_size",
            "log_every",
            "save_every",
            "keep",
            "held_out_sequences",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` of the recipe is {getattr(self, name)}, but must be at least 1.")
        for name in ("warmup", "decay", "min_rate", "attn_res_alone"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"`{name}` of the recipe is {getattr(self, name)}, but must be a share from 0 to 1.")
        for name, allowed in (("optimizer", OPTIMIZERS), ("schedule", SCHEDULES), ("bad_rows", BAD_ROWS)):
            if getattr(self, name) not in allowed:
                wanted = " or ".join(map(repr, allowed))
                raise ValueError(f"`{name}` of the recipe is {getattr(self, name)!r}, but must be {wanted}.")
        _check_keys("trainer", self.trainer, TrainingArguments)
        _check_keys("retrofit", self.retrofit, retrofit)
        if self.lora is not None:
            with suppress(ImportError):  # peft is an extra, and takes a while to import
                from .lora import add_adapters

                _check_keys("lora", self.lora, add_adapters)
        if self.lora is not None and self.retrofit is not None:
            raise ValueError(
                "An adapter's base has to be on disk: `attnres convert` it first, and leave `retrofit` out."
            )
        if self.lora is not None and self.distributed is not None:
            raise ValueError("An adapter is trained on whole models: leave out `lora` or `distributed`.")
        if not self.train:
            raise ValueError("`train` of the recipe names no data.")

    @property
    def num_steps(self) -> int:
        """Optimizer steps; the last one may go beyond `tokens`."""
        return self.steps or max(1, math.ceil(self.tokens / (self.batch_size * self.length)))


def read_recipe(path: str | Path, changes: Sequence[str] = ()) -> Recipe:
    """The recipe in a file, or one of those that come with `attnres` by its name, with `key=value` changes.

    A value is YAML: `steps=100`, `train=[a.jsonl,b.jsonl]`, `trainer.bf16=true` (one key of a mapping). `steps` takes
    the place of the file's `tokens` too, and the other way round.

    Raises:
        FileNotFoundError: no such file or recipe.
        ValueError: unknown key, value of the wrong type, or one that the recipe cannot have.
    """
    content = yaml.safe_load(_text(path)) or {}
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a recipe: it should hold `key: value` lines.")
    given = set()
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals:
            raise ValueError(f"{change!r} is not of the form key=value.")
        name, dot, inner = key.partition(".")
        parsed = yaml.safe_load(value)
        content[name] = {**(content.get(name) or {}), inner: parsed} if dot else parsed
        given.add(name)
    # A run is as long as one of the two says: that of a change, where the file has the other.
    for name, other in (("steps", "tokens"), ("tokens", "steps")):
        if name in given and other not in given and content[name] is not None:
            content.pop(other, None)
    known = {item.name: item for item in fields(Recipe)}
    for name, value in content.items():
        if name not in known:
            raise ValueError(f"A recipe has no `{name}`.{did_you_mean(name, known)}")
        content[name] = _typed(name, value, known[name].type)
    if missing := [name for name in ("model", "train", "out") if not content.get(name)]:
        names = " and ".join(f"`{name}`" for name in missing)
        raise ValueError(f"The recipe lacks {names}: add it to {path}, or give {missing[0]}=...")
    return Recipe(**content)


def recipe_names() -> tuple[str, ...]:
    """The recipes that come with `attnres`."""
    return tuple(sorted(path.name.removesuffix(".yaml") for path in _folder().iterdir()))


def write_recipe(recipe: Recipe) -> str:
    """The recipe as YAML, all of it."""
    content = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(recipe).items()}
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def did_you_mean(name: str, known: Collection[str], *, otherwise_all: bool = True) -> str:
    """The end of a message on an unknown name: the one spelt alike, or all that are known."""
    if similar := get_close_matches(name, known, n=1):
        return f" Did you mean `{similar[0]}`?"
    return f" There is {', '.join(known)}." if otherwise_all else ""


def _check_keys(name: str, arguments: dict[str, Any] | None, taken_by: Callable) -> None:
    known = signature(taken_by).parameters
    for key in (key for key in arguments or () if key not in known):
        raise ValueError(f"`{name}` has no `{key}`.{did_you_mean(key, known, otherwise_all=False)}")


def _folder():
    return files("attnres.configuration").joinpath("recipes")


def _text(path: str | Path) -> str:
    if Path(path).is_file():
        return Path(path).read_text(encoding="utf-8")
    packaged = _folder().joinpath(f"{path}.yaml")
    if not packaged.is_file():
        raise FileNotFoundError(
            f"There is no file {path}, and no recipe of that name. There is {', '.join(recipe_names())}."
        )
    return packaged.read_text(encoding="utf-8")


def _typed(name: str, value: Any, kind: Any) -> Any:
    """A YAML value as the type of its field; YAML reads `3e-4` as text."""
    kind = str(kind).removeprefix("<class '").removesuffix("'>")
    try:
        if value is None and ("None" in kind or kind.startswith("collections.abc.Sequence")):
            return () if "Sequence" in kind else None
        if "Sequence" in kind:
            return (value,) if isinstance(value, str) else tuple(map(str, value))
        if "dict" in kind:
            return dict(value)
        if "bool" in kind:
            return {True: True, False: False}[value]
        if "int" in kind:
            if float(value) != int(float(value)) or isinstance(value, bool):
                raise ValueError
            return int(float(value))
        return float(value) if "float" in kind else str(value)
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"`{name}` of the recipe is {value!r}, which is not {kind.replace(' | None', '')}.") from None
