"""A recipe: everything that decides a training run, as a YAML file and `key=value` changes to it.

Wrong keys and values are refused here, before models and data are touched. The command line reads a recipe before it
imports PyTorch, so neither this file nor the files that it imports import heavy packages.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import Field, asdict, dataclass, field, fields
from os.path import expanduser
from pathlib import Path
from typing import Any

import yaml

from attnres.utils.declared import declared_connections, import_files, trainer_fields
from attnres.utils.packaged import recipe_names, recipe_path
from attnres.utils.wording import did_you_mean
from attnres.utils.yaml_files import TextScalars, UniqueKeys, load_yaml

from .lora_options import check_options
from .parallel.pipeline_settings import read_settings
from .recipe_values import check_keys, mapping, options_of, typed
from .trainer_fields import DECIDED_BY_RUN, check_trainer_fields, type_trainer_fields

# The values of `bad_rows`, `optimizer` and `schedule`. They stand here, not beside the code that they choose, so that
# reading a recipe does not import PyTorch.
BAD_ROWS = ("error", "skip")
OPTIMIZERS = ("adamw", "muon")
SCHEDULES = ("cosine", "wsd")
# A check of a value, and the allowed values as the error message names them. NaN fails every check.
_POSITIVE = (lambda value: value >= 1, "at least 1")
_SHARE = (lambda value: 0 <= value <= 1, "a share from 0 to 1")
_FACTOR = (lambda value: 0 <= value < math.inf, "a finite number, at least 0")
# Key of a recipe -> the check of its value.
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    **dict.fromkeys(
        ("batch_size", "micro_batch_size", "steps", "tokens", "log_every", "save_every", "keep", "held_out_sequences"),
        _POSITIVE,
    ),
    "length": (
        lambda value: 2 <= value < 2**31,
        "at least 2, since each token is predicted from earlier ones, and below 2**31",
    ),
    **dict.fromkeys(("warmup", "decay", "min_rate", "residual_alone"), _SHARE),
    "epochs": (lambda value: 0 < value < math.inf, "a number above 0"),
    **dict.fromkeys(("weight_decay", "residual_lr_factor", "max_grad_norm", "expert_balancing"), _FACTOR),
    "learning_rate": (lambda value: 0 < value < math.inf, "a number above 0"),
    "seed": (lambda value: 0 <= value < 2**32, "from 0 to 2**32 - 1"),
}
# Names that other tools use -> the key of a recipe. Those of `TrainingArguments` follow below.
_OTHER_NAMES = {"lr": "`learning_rate`", "dataset": "`train`", "output": "`out`", "max_length": "`length`"}
_NEEDED = ("model", "train", "out")
_DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")  # of `config.dtype`
RUN_LENGTHS = ("steps", "tokens", "epochs")
# Keys whose values are names of models, files, folders, columns or splits, which must not be empty.
_NAMES = ("model", "train", "out", "tokenizer", "held_out", "held_out_split", "column", "split")
# Keys whose values may be paths, in which a leading `~` is the home directory.
_PATHS = ("model", "train", "out", "import", "tokenizer", "held_out")


@dataclass(frozen=True)
class Recipe:
    """The settings of one run. Steps are optimizer steps; a batch counts sequences of `length` tokens.

    Attributes:
        model: The directory or Hub id of a model to train further, or a named configuration (`attnres-tiny`) to train
            from scratch.
        train: Data sets: Hub ids, files, patterns and folders.
        out: The folder of the run, for checkpoints, the model, results and figures.
        config: Fields of the model's configuration to set, such as `rms_norm_eps`. `dtype: float32` trains a checkpoint
            of half precision in full precision.
        retrofit: Arguments of [`attnres.conversion.retrofit`] for a standard model, such as `{block_size: 4}`
            or `{residual: NAME}`.
        imports: Python files with residual connections of your own. The key of a recipe's file is `import`.
        tokenizer: A directory or Hub id. By default the model's; a model from scratch needs one.
        held_out: Data sets to measure the loss on. Without it, `held_out_sequences` are taken from the training data.
        held_out_split: The split of `held_out`. By default `split`.
        held_out_sequences: How many sequences are taken from the training data if there is no `held_out`. By default
            64, but at most a tenth of the data.
        column: The column of the text or, with `chat`, of the messages.
        split: The split of data sets that have several.
        streaming: Read the data during training, instead of tokenising all of it first.
        bad_rows: `error` ends the run at a row that cannot be used. `skip` leaves such rows out and counts them.
        chat: The data is conversations. Only the assistant's part is learned.
        length: Tokens in a sequence.
        separate_documents: Keep the documents of a sequence apart: a token attends only to its own document, and each
            document begins at position 0.
        batch_size: Sequences in a step, over all processes.
        micro_batch_size: Sequences that a process computes at once, or, with `pipeline`, that a pipeline takes at once
            and cuts into micro-batches. Gradients accumulate up to `batch_size`.
        steps: The length of the run in optimizer steps. Give this or `tokens`.
        tokens: The length of the run in tokens, over all processes.
        epochs: The length of the run in passes over the training data. `steps` or `tokens` may end the run earlier.
        optimizer: `adamw`, or `muon` for the matrices.
        learning_rate: The highest rate of the schedule.
        weight_decay: The decay of matrices. Vectors and the tensors of residual connections do not decay.
        residual_lr_factor: The rate of the residual connections' tensors, as a factor of `learning_rate`. A
            connection may declare that some of its tensors get less, as the guide to training says.
        residual_alone: The share of the steps at the start in which only these tensors are trained.
        schedule: `cosine`, or `wsd` (warm-up, stable, decay).
        warmup: The share of the steps in which the rate rises from 0.
        decay: With `wsd`, the share of the steps at the end in which the rate falls.
        min_rate: The rate at the end, as a factor of `learning_rate`.
        max_grad_norm: Gradients with a larger norm are scaled down to this norm. 0 turns this off.
        expert_balancing: The rate of [`attnres.training.balance.ExpertBalance`], which evens out the experts' load. 0
            turns balancing off.
        lora: Arguments of [`attnres.training.lora.add_adapters`]. Only adapters and residual tensors are trained then.
        merge: With `lora`, write the merged model beside the adapter.
        seed: The seed of the data's order and of everything random, such as new weights.
        log_every: Steps from one line of the log to the next.
        save_every: Steps from one checkpoint to the next. The held-out loss is measured at the same steps.
        keep: How many checkpoints stay. Older ones are removed.
        distributed: How the model is divided among processes: fields of `transformers`' `DistributedConfig`, such as
            `{fsdp_size: 8}`; beside `tp_size`, `sequence_parallel: true` divides the sequence too. See
            `docs/guides/many_devices.md`.
        pipeline: How the layers are divided among the processes of a pipeline: fields of
            [`attnres.training.parallel.pipeline_settings.PipelineSettings`], such as `{stages: 4, microbatches: 8}`.
        trainer: Fields of `transformers.TrainingArguments`, except those that the run sets (`DECIDED_BY_RUN` in
            `trainer_fields.py`): `bf16`, `activation_checkpointing`, `torch_compile`, `report_to` (`tensorboard`,
            `trackio`), and so on.

    Raises:
        ValueError: A value is not allowed, or two values contradict each other.
    """

    model: str
    train: Sequence[str]
    out: str
    config: dict[str, Any] = field(default_factory=dict)
    retrofit: dict[str, Any] | None = None
    imports: Sequence[str] = field(default=(), metadata={"key": "import"})  # `import` is a word of Python
    tokenizer: str | None = None
    held_out: Sequence[str] = ()
    held_out_split: str | None = None
    held_out_sequences: int | None = None
    column: str = "text"
    split: str = "train"
    streaming: bool = False
    bad_rows: str = "error"
    chat: bool = False
    length: int = 1024
    separate_documents: bool = False
    batch_size: int = 32
    micro_batch_size: int = 8
    steps: int | None = None
    tokens: int | None = None
    epochs: float | None = None
    optimizer: str = "adamw"
    learning_rate: float = 3e-4
    weight_decay: float = 0.1
    residual_lr_factor: float = 1.0
    residual_alone: float = 0.0
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
    pipeline: dict[str, Any] | None = None
    trainer: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        import_files(self.imports)  # first, so that `retrofit` may name their connections
        self._check_values()
        self._check_mappings()
        self._check_combinations()

    def _check_values(self) -> None:
        """Raise ValueError if a value is not allowed, or the length of the run is not given once."""
        if self.steps is not None and self.tokens is not None:
            raise ValueError("The recipe has both `steps` and `tokens`: give one of them.")
        if self.steps is self.tokens is self.epochs is None:
            raise ValueError("The recipe must have `steps`, `tokens` or `epochs`: give one of them.")
        if self.streaming and self.steps is self.tokens is None:
            raise ValueError("The length of a stream is not known before it ends: give `steps` or `tokens`.")
        if self.streaming and not self.held_out:
            raise ValueError("A stream has no end to take `held_out_sequences` from: give `held_out`.")
        for name, (is_allowed, range_in_words) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not is_allowed(value):
                raise ValueError(f"`{name}` of the recipe is {value}, but must be {range_in_words}.")
        for name, allowed in (("optimizer", OPTIMIZERS), ("schedule", SCHEDULES), ("bad_rows", BAD_ROWS)):
            if getattr(self, name) not in allowed:
                choices = " or ".join(map(repr, allowed))
                raise ValueError(f"`{name}` of the recipe is {getattr(self, name)!r}, but must be {choices}.")
        for name in _NAMES:
            values = getattr(self, name)
            if "" in ((values,) if isinstance(values, str) else values or ()):
                raise ValueError(f"`{name}` of the recipe is empty: name one, or leave it out.")
        if not self.train:
            raise ValueError("`train` of the recipe is empty: name at least one data set.")

    def _check_mappings(self) -> None:
        """Raise ValueError if a mapping has a wrong key or value."""
        check_trainer_fields(self.trainer)
        if self.retrofit is not None:
            connections = declared_connections()
            residual = self.retrofit.get("residual", next(iter(connections)))
            if residual not in [*connections]:
                raise ValueError(
                    f"`residual` of the recipe's `retrofit` is {residual!r}, but must be one of "
                    f"{', '.join(connections)}.{did_you_mean(str(residual), connections, otherwise_all=False)}"
                )
            declared = connections[residual]
            check_keys("retrofit", self.retrofit, ["residual", *declared.options, *declared.fields])
        if self.lora is not None:
            check_keys("lora", self.lora, options_of(check_options))
            check_options(**self.lora)
        read_settings(self.pipeline)
        dtype = self.config.get("dtype")
        if isinstance(dtype, str) and dtype not in _DTYPES:
            raise ValueError(
                f"`config.dtype` of the recipe is {dtype!r}, but must be {', '.join(_DTYPES[:-1])} or {_DTYPES[-1]}."
            )

    def _check_combinations(self) -> None:
        """Raise ValueError if two keys exclude each other."""
        if self.lora is not None and self.retrofit is not None:
            raise ValueError(
                "`lora` and `retrofit` of the recipe exclude each other, since an adapter's base has to be on disk: "
                "run `attnres convert` first, and leave `retrofit` out."
            )
        for name, needed in (("merge", "lora"), ("held_out_split", "held_out")):
            if getattr(self, name) and not getattr(self, needed):
                raise ValueError(f"`{name}` of the recipe has no effect without `{needed}`: give both or neither.")
        if self.lora is not None and self.distributed is not None:
            raise ValueError("An adapter cannot be trained on a divided model: leave out `lora` or `distributed`.")
        if (self.distributed or {}).get("sequence_parallel") and self.trainer.get("neftune_noise_alpha"):
            raise ValueError(
                "`trainer.neftune_noise_alpha` of the recipe does not work with `sequence_parallel`, where each "
                "process has a part of the embedding: leave out one of them."
            )
        if self.pipeline is not None:
            for name in ("lora", "distributed"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"`pipeline` and `{name}` of the recipe exclude each other: leave out one of them."
                    )

    @property
    def most_steps(self) -> int | None:
        """Return the optimizer steps that `steps` or `tokens` ask for; `None` if only `epochs` is given.

        `tokens` are rounded up to whole steps.
        """
        if self.tokens is not None:
            return math.ceil(self.tokens / (self.batch_size * self.length))
        return self.steps

    def count_steps(self, sequences: int | None) -> int:
        """Count the optimizer steps of the run.

        Args:
            sequences: The number of sequences to train on; `None` for a stream, which `epochs` does not end.

        Returns:
            The smaller of [`most_steps`] and the steps that `epochs` asks for.
        """
        by_epochs = None
        if self.epochs is not None and sequences is not None:
            by_epochs = max(1, int(self.epochs * sequences / self.batch_size))
        return min(count for count in (self.most_steps, by_epochs) if count is not None)


def read_recipe(path: str | Path, changes: Sequence[str] = ()) -> Recipe:
    """Read a recipe, and apply `key=value` changes to it.

    Args:
        path: A YAML file, or the name of a recipe that comes with `attnres`.
        changes: Changes whose values are YAML: `steps=100`, `train=[a.jsonl,b.jsonl]`, or `trainer.bf16=true` for one
            key of a mapping. `steps`, `tokens` and `epochs` all set the length of the run. A change of one of them
            replaces all three in the file.

    Returns:
        The recipe, whose values have been checked.

    Raises:
        FileNotFoundError: There is no such file or recipe.
        ValueError: A key is unknown, or a value has the wrong type or is not allowed.
    """
    text, known = _read_text(path), {_key(item): item for item in fields(Recipe)}
    texts = {name for name, item in known.items() if item.type in (str, str | None, Sequence[str])}
    content = read_yaml(text, path)
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a recipe: it must hold `key: value` lines.")
    as_text = read_yaml(text, path, TextScalars) or {}
    content |= {name: value for name, value in as_text.items() if name in texts}
    changed = set()
    for number, change in enumerate(changes):
        key, equals, value = change.partition("=")
        if not equals:
            raise ValueError(f"{change!r} is not of the form key=value. A value with spaces needs quotes.")
        name, dot, inner = key.partition(".")
        try:
            parsed = read_yaml(value, change, TextScalars if key in texts else UniqueKeys)
        except ValueError:
            _check_undivided(changes[number:])
            raise
        content[name] = {**mapping(name, content.get(name) or {}), inner: parsed} if dot else parsed
        changed.add(name)
    if any(content.get(name) is not None for name in changed.intersection(RUN_LENGTHS)):
        # A length on the command line replaces the file's, which may be given by another of these keys.
        for name in {*RUN_LENGTHS} - changed:
            content.pop(name, None)
    # A needed key without a value counts as missing.
    content = {name: value for name, value in content.items() if value is not None or name not in _NEEDED}
    for name, value in content.items():
        if name not in known:
            raise ValueError(f"A recipe has no `{name}`.{_remedy(str(name), known)}")
        content[name] = typed(name, value, known[name].type)
        if name in _PATHS:
            content[name] = _expanded(content[name])
    content["trainer"] = type_trainer_fields(content.get("trainer", {}))
    if missing := [name for name in _NEEDED if not content.get(name)]:
        names = " and ".join(f"`{name}`" for name in missing)
        raise ValueError(f"The recipe lacks {names}: give {' '.join(f'{name}=...' for name in missing)}")
    return Recipe(**{known[name].name: value for name, value in content.items()})


def write_recipe(recipe: Recipe) -> str:
    """Return a recipe as YAML, with every key, including keys at their default."""
    values = asdict(recipe)
    content = {_key(item): values[item.name] for item in fields(Recipe)}
    content = {key: list(value) if isinstance(value, tuple) else value for key, value in content.items()}
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def _key(item: Field) -> str:
    """Return the key of a recipe's file for a field of [`Recipe`]."""
    return item.metadata.get("key", item.name)


def _remedy(name: str, known: Collection[str]) -> str:
    """Return the end of a message on an unknown key, with a leading space."""
    if remedy := _OTHER_NAMES.get(name) or DECIDED_BY_RUN.get(name):
        return f" Give {remedy} instead."
    if typo := did_you_mean(name, known, otherwise_all=False, alike=0.8):
        return typo
    if name in trainer_fields() and name not in DECIDED_BY_RUN:
        return f" It is a field of the trainer: give `trainer.{name}`."
    return did_you_mean(name, known)


def _read_text(path: str | Path) -> str:
    """Return the content of a recipe's file, or of a recipe that comes with `attnres`."""
    if Path(path).is_file():
        try:
            return Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not a recipe: it is not text in UTF-8 ({error}).") from error
    packaged = recipe_path(str(path))
    if not packaged.is_file():
        raise FileNotFoundError(
            f"There is no file {path}, and no recipe of that name. The recipes are {', '.join(recipe_names())}."
        )
    return packaged.read_text(encoding="utf-8")


def read_yaml(text: str, place: str | Path, loader: type[UniqueKeys] = UniqueKeys) -> Any:
    """Parse YAML.

    Args:
        text: The YAML.
        place: Where it stands, for the error message.
        loader: The class that constructs the values.

    Returns:
        The value.

    Raises:
        ValueError: The text is not YAML.
    """
    try:
        return load_yaml(text, loader)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{place} is broken YAML: {' '.join(str(error).split())}") from error


def _check_undivided(changes: Sequence[str]) -> None:
    """Raise ValueError if the first change is broken YAML only because the shell divided it at its spaces."""
    for end in range(2, len(changes) + 1):
        whole = " ".join(changes[:end])
        try:
            read_yaml(whole.partition("=")[2], whole)
        except ValueError:
            continue
        raise ValueError(f"The shell divides {whole} at its spaces: put it in quotes, '{whole}'.")


def _expanded(value: Any) -> Any:
    """Return a path, or each of several, with the home directory in place of a leading `~`."""
    if isinstance(value, tuple):
        return tuple(map(expanduser, value))
    return expanduser(value) if isinstance(value, str) else value
