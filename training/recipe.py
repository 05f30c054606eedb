"""A recipe: everything that decides a training run, as a YAML file and `key=value` changes to it.

Wrong keys and values are refused here, before models and data are touched. The command line reads a recipe before it
imports PyTorch, so neither this file nor the files that it imports import heavy packages.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import field, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, StrictBool, model_validator
from pydantic.dataclasses import dataclass

from attnres.checkpoints.source import ModelSource
from attnres.utils.declared import declared_connections, import_files
from attnres.utils.packaged import recipe_names, recipe_path
from attnres.utils.wording import did_you_mean
from attnres.utils.yaml_files import TextScalars, UniqueKeys, parse_yaml

from .parallel.pipeline_settings import PipelineSettings
from .settings import (
    DECIDED_BY_RUN,
    Count,
    Factor,
    LoraSettings,
    Name,
    Place,
    Places,
    Positive,
    Settings,
    ShardingSettings,
    Share,
    TrainerFields,
    Whole,
    check_keys,
    explained,
    read_trainer_fields,
    trainer_fields,
)

# The values of three keys. They stand here, not beside the code that they choose, so that reading a recipe does not
# import PyTorch.
BadRows = Literal["error", "skip"]
Optimizer = Literal["adamw", "muon"]
Schedule = Literal["cosine", "wsd"]
BAD_ROWS, OPTIMIZERS, SCHEDULES = map(get_args, (BadRows, Optimizer, Schedule))
# Names that other tools use -> the key of a recipe. Those of `TrainingArguments` follow below.
_OTHER_NAMES = {"lr": "`learning_rate`", "dataset": "`train`", "output": "`out`", "max_length": "`length`"}
_NEEDED = ("model", "train", "out")
_DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")  # of `config.dtype`
RUN_LENGTHS = ("steps", "tokens", "epochs")
# Keys whose values are names of models, files, folders, columns or splits. They are taken as they are written: `007` is
# no number, and `on` is not true.
_AS_WRITTEN = ("model", "train", "out", "import", "tokenizer", "held_out", "held_out_split", "column", "split")


def _check_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return `config` of a recipe. Raise ValueError if `dtype` is unknown; other fields depend on the model."""
    dtype = config.get("dtype")
    if isinstance(dtype, str) and dtype not in _DTYPES:
        raise ValueError(
            f"`config.dtype` of the recipe is {dtype!r}, but must be {', '.join(_DTYPES[:-1])} or {_DTYPES[-1]}."
        )
    return config


def _import_files(paths: tuple[str, ...]) -> tuple[str, ...]:
    """Return the paths, after the connections in these files have been declared."""
    import_files(paths)
    return paths


def _check_retrofit(options: dict[str, Any]) -> dict[str, Any]:
    """Return `retrofit` of a recipe. Raise ValueError if the connection is unknown, or does not have an option."""
    connections = declared_connections()
    residual = options.get("residual", next(iter(connections)))
    if residual not in [*connections]:
        raise ValueError(
            f"`retrofit.residual` of the recipe is {residual!r}, but must be one of "
            f"{', '.join(connections)}.{did_you_mean(str(residual), connections, otherwise_all=False)}"
        )
    declared = connections[residual]
    check_keys("retrofit", options, ["residual", *declared.options, *declared.fields])
    return options


# Fields of `TrainingArguments` that a pipeline does not follow -> the remedy in the error message.
_NOT_IN_PIPELINES = {
    "fp16": "use `bf16`, which needs no scaling of the loss",
    "torch_compile": "leave it out",
    # Each of these two turns `torch_compile` on.
    "torch_compile_backend": "leave it out",
    "torch_compile_mode": "leave it out",
    "label_smoothing_factor": "leave it out",
    "neftune_noise_alpha": "leave it out",
    "use_liger_kernel": "leave it out",
    "fsdp": "set `fsdp: true` in `pipeline`",
    "deepspeed": "leave it out",
}


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
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
        trust_remote_code: Run Python code that comes with the tokenizer, and save it with the model. The model's own
            code is never run.
        held_out: Data sets to measure the loss on. Without it, `held_out_sequences` are taken from the training data.
        held_out_split: The split of `held_out`. By default `split`.
        held_out_sequences: How many sequences are taken from the training data if there is no `held_out`. By default
            64, but at most a tenth of the data.
        column: The column of the text or, with `chat`, of the messages.
        split: The split of data sets that have several.
        streaming: Read the data during training, instead of tokenising all of it first.
        bad_rows: `error` ends the run at a row that cannot be used. `skip` leaves such rows out and counts them.
        chat: The data is conversations. Only the assistant's part is learned.
        images: With `chat`, conversations may hold images, and the model is trained with its vision part, which stays
            as it is. Each conversation is a sequence of its own, of at most `length` tokens.
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
        muon_per_head: Whether Muon orthogonalises each head of the Q, K and V projections by itself. By default as the
            model was trained: true for Kimi K3, else false.
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
        expert_balancing: The rate of [`attnres.training.callbacks.ExpertBalance`], which evens out the experts' load. 0
            turns balancing off.
        mtp_loss_weight: The weight of the loss of a layer for multi-token prediction, which is added to the loss: 0.3
            and later 0.1 in DeepSeek-V3. A model without such a layer gets a new one. By default the weight in the
            model's configuration, which is 0 if it has none: a layer is kept then, and not trained.
        lora: Arguments of [`attnres.training.lora.add_adapters`]. Only adapters and residual tensors are trained then.
        merge: With `lora`, write the merged model beside the adapter.
        seed: The seed of the data's order and of everything random, such as new weights.
        log_every: Steps from one line of the log to the next.
        save_every: Steps from one checkpoint to the next. The held-out loss is measured at the same steps.
        keep: How many checkpoints stay. Older ones are removed.
        distributed: How the model is sharded among processes: fields of `transformers`' `DistributedConfig`, such as
            `{fsdp_size: 8}`; beside `tp_size`, `sequence_parallel: true` shards the sequence too. See
            `docs/guides/many_devices.md`.
        pipeline: How the model is cut into the stages of a pipeline: fields of
            [`attnres.training.parallel.pipeline_settings.PipelineSettings`], such as `{stages: 4, microbatches: 8}`.
        trainer: Fields of `transformers.TrainingArguments`, except those that the run sets (`DECIDED_BY_RUN` in
            `settings.py`): `bf16`, `activation_checkpointing`, `torch_compile`, `report_to` (`tensorboard`,
            `trackio`), and so on.

    Raises:
        ValueError: A value is not allowed, or two values contradict each other.
    """

    model: Place
    train: Annotated[Places, Field(min_length=1)]
    out: Place
    config: Annotated[dict[str, Any], AfterValidator(_check_config)] = field(default_factory=dict)
    imports: Annotated[Places, AfterValidator(_import_files)] = ()  # read first: `retrofit` may name their connections
    retrofit: Annotated[dict[str, Any], AfterValidator(_check_retrofit)] | None = None
    tokenizer: Place | None = None
    trust_remote_code: StrictBool = False
    held_out: Places = ()
    held_out_split: Name | None = None
    held_out_sequences: Count | None = None
    column: Name = "text"
    split: Name = "train"
    streaming: StrictBool = False
    bad_rows: BadRows = "error"
    chat: StrictBool = False
    images: StrictBool = False
    # Each token is predicted from earlier ones.
    length: Annotated[Whole, Field(ge=2, lt=2**31)] = 1024
    separate_documents: StrictBool = False
    batch_size: Count = 32
    micro_batch_size: Count = 8
    steps: Count | None = None
    tokens: Count | None = None
    epochs: Positive | None = None
    optimizer: Optimizer = "adamw"
    muon_per_head: StrictBool | None = None
    learning_rate: Positive = 3e-4
    weight_decay: Factor = 0.1
    residual_lr_factor: Factor = 1.0
    residual_alone: Share = 0.0
    schedule: Schedule = "wsd"
    warmup: Share = 0.05
    decay: Share = 0.5
    min_rate: Share = 0.0
    max_grad_norm: Factor = 1.0
    expert_balancing: Factor = 0.0
    mtp_loss_weight: Factor | None = None
    lora: LoraSettings | None = None
    merge: StrictBool = False
    seed: Annotated[Whole, Field(ge=0, lt=2**32)] = 0
    log_every: Count = 10
    save_every: Count = 200
    keep: Count = 2
    distributed: ShardingSettings | None = None
    pipeline: PipelineSettings | None = None
    trainer: Annotated[TrainerFields, BeforeValidator(read_trainer_fields)] = field(default_factory=TrainerFields)

    @cached_property
    def source(self) -> ModelSource:
        """Return the model that the run starts from."""
        return ModelSource(self.model)

    @property
    def config_fields(self) -> dict[str, Any]:
        """Return the fields of the model's configuration to set: `config`, and those that other keys stand for."""
        weight = self.mtp_loss_weight
        fields = {} if weight is None else {"mtp_loss_weight": weight}
        return self.config | fields | ({"num_nextn_predict_layers": 1} if weight else {})

    @property
    def timeout(self) -> int:
        """Return the seconds that a process of the run waits for the others."""
        return self.trainer.ddp_timeout if self.pipeline is None else self.pipeline.timeout

    @model_validator(mode="after")
    def _check_length(self) -> "Recipe":
        """Raise ValueError if the length of the run is not given once, or not known."""
        if self.steps is not None and self.tokens is not None:
            raise ValueError("The recipe has both `steps` and `tokens`: give one of them.")
        if self.steps is self.tokens is self.epochs is None:
            raise ValueError("The recipe must have `steps`, `tokens` or `epochs`: give one of them.")
        if self.streaming and self.steps is self.tokens is None:
            raise ValueError("The length of a stream is not known before it ends: give `steps` or `tokens`.")
        if self.streaming and not self.held_out:
            raise ValueError("A stream has no end to take `held_out_sequences` from: give `held_out`.")
        return self

    @model_validator(mode="after")
    def _check_combinations(self) -> "Recipe":
        """Raise ValueError if two keys exclude each other."""
        if self.lora is not None and self.retrofit is not None:
            raise ValueError(
                "`lora` and `retrofit` of the recipe exclude each other, since an adapter's base has to be on disk: "
                "run `attnres convert` first, and leave `retrofit` out."
            )
        if self.mtp_loss_weight and self.retrofit is not None:
            raise ValueError(
                "`mtp_loss_weight` and `retrofit` of the recipe exclude each other: run `attnres convert` first, which "
                "keeps the layer for multi-token prediction, and leave `retrofit` out."
            )
        if self.lora is not None and self.source.is_named:
            raise ValueError(f"{self.model} starts from scratch: an adapter would have no base. Leave out `lora`.")
        for name, needed in (("merge", "lora"), ("held_out_split", "held_out")):
            if getattr(self, name) and not getattr(self, needed):
                raise ValueError(f"`{name}` of the recipe has no effect without `{needed}`: give both or neither.")
        if self.distributed is not None and self.pipeline is not None:
            raise ValueError("`pipeline` and `distributed` of the recipe exclude each other: leave out one of them.")
        if self.lora is not None and self.distributed is not None and (self.distributed.tp_size or 1) > 1:
            raise ValueError(
                "`lora` of the recipe does not work with `tp_size` of `distributed`, since PEFT does not cut adapters "
                "as `transformers` cuts matrices: shard the model by `fsdp_size`, `ep_size` or `pipeline`."
            )
        if self.mtp_loss_weight and self.trainer.label_smoothing_factor:
            raise ValueError(
                "`mtp_loss_weight` of the recipe does not work with `trainer.label_smoothing_factor`, with which "
                "`Trainer` computes the loss without the model: leave out one of them."
            )
        if self.distributed is not None and self.distributed.sequence_parallel and self.trainer.neftune_noise_alpha:
            raise ValueError(
                "`trainer.neftune_noise_alpha` of the recipe does not work with `sequence_parallel`, where each "
                "process has a part of the embedding: leave out one of them."
            )
        return self

    @model_validator(mode="after")
    def _check_images(self) -> "Recipe":
        """Raise ValueError if a key does not work with images."""
        if not self.images:
            return self
        if not self.chat:
            raise ValueError("`images` of the recipe is for conversations: set `chat` to true, or leave `images` out.")
        if self.source.is_named:
            raise ValueError(f"{self.model} starts from scratch and has no vision part: leave out `images`.")
        sharding = self.distributed
        for name, is_set in {
            "retrofit": self.retrofit is not None,
            "streaming": self.streaming,
            "separate_documents": self.separate_documents,
            "pipeline": self.pipeline is not None,
            "distributed.tp_size": sharding is not None and (sharding.tp_size or 1) > 1,
        }.items():
            if is_set:
                raise ValueError(f"`images` of the recipe does not work with `{name}`: leave out one of them.")
        return self

    @model_validator(mode="after")
    def _check_pipeline(self) -> "Recipe":
        """Raise ValueError if a field of the trainer has no effect in a pipeline."""
        for name, remedy in _NOT_IN_PIPELINES.items() if self.pipeline is not None else ():
            if getattr(self.trainer, name, None) not in (None, False, 0, 0.0, "", []):
                raise ValueError(f"`trainer.{name}` of the recipe does not work with `pipeline`: {remedy}.")
        is_shared = self.pipeline is not None or (self.distributed is not None and (self.distributed.tp_size or 1) > 1)
        if is_shared and not self.trainer.average_tokens_across_devices:
            way = "`tp_size` of `distributed`" if self.pipeline is None else "`pipeline`"
            raise ValueError(
                f"`trainer.average_tokens_across_devices` of the recipe must be true with {way}, where several "
                "processes compute the same batch: `Trainer` would divide the loss by too few labels. Leave it out."
            )
        return self

    @model_validator(mode="after")
    def _check_best(self) -> "Recipe":
        """Raise ValueError if a run cannot end with its best checkpoint."""
        subject, trainer = "`trainer.load_best_model_at_end` of the recipe", self.trainer
        if not trainer.load_best_model_at_end:
            return self
        if self.distributed is not None:
            raise ValueError(
                f"{subject} does not work with `distributed`, whose checkpoints are in parts: leave it out, and take "
                "the checkpoint that you want."
            )
        if trainer.metric_for_best_model not in (None, "loss", "eval_loss") or trainer.greater_is_better:
            raise ValueError(
                f"{subject} chooses the lowest held-out loss: leave out `metric_for_best_model` and "
                "`greater_is_better`."
            )
        if trainer.eval_delay > 0:
            raise ValueError(f"{subject} needs a held-out loss for each checkpoint: leave out `trainer.eval_delay`.")
        if trainer.eval_steps not in (None, self.save_every):
            raise ValueError(
                f"{subject} needs a held-out loss for each checkpoint and no other: leave out `trainer.eval_steps`, "
                "which then is `save_every`."
            )
        return self

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


# Key of a recipe's file -> field of `Recipe`. They differ where the key is a word of Python.
_FIELDS = {"import" if item.name == "imports" else item.name: item.name for item in fields(Recipe)}


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
    text, known = _read_text(path), _FIELDS.keys()
    content = _read_keys(text, path)
    changed = {}
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals:
            raise ValueError(f"{change!r} is not of the form key=value. A value with spaces needs quotes.")
        name, dot, inner = key.partition(".")
        try:
            parsed = parse_yaml(value, change, TextScalars if key in _AS_WRITTEN else UniqueKeys)
        except ValueError as error:
            raise ValueError(f"{error}. A value with spaces needs quotes.") from error
        if dot:
            outer = changed.get(name, content.get(name)) or {}
            if not isinstance(outer, dict):
                raise ValueError(f"`{name}` of the recipe is {outer!r}, but must be a mapping of names to values.")
            parsed = {**outer, inner: parsed}
        changed[name] = parsed
    if any(changed.get(name) is not None for name in RUN_LENGTHS):
        # A length on the command line replaces the file's, which may be given by another of these keys.
        content = {name: value for name, value in content.items() if name not in RUN_LENGTHS}
    content |= changed
    if unknown := [name for name in content if name not in known]:
        raise ValueError(f"A recipe has no `{unknown[0]}`.{_remedy(str(unknown[0]), known)}")
    with explained("the recipe"):
        # A needed key without a value counts as missing.
        given = {name: value for name, value in content.items() if value or name not in _NEEDED}
        return Recipe(**{_FIELDS[name]: value for name, value in given.items()})


def _read_keys(text: str, path: str | Path) -> dict[Any, Any]:
    """Return the keys and values of a recipe's file."""
    content, as_written = parse_yaml(text, path), parse_yaml(text, path, TextScalars)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a recipe: it must hold `key: value` lines.")
    return content | {name: as_written[name] for name in _AS_WRITTEN if name in as_written}


def write_recipe(recipe: Recipe) -> str:
    """Return a recipe as YAML, with every key, including keys at their default."""
    values = {key: getattr(recipe, name) for key, name in _FIELDS.items()}
    content = {name: value.given() if isinstance(value, Settings) else value for name, value in values.items()}
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


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


__all__ = [
    "BAD_ROWS",
    "OPTIMIZERS",
    "RUN_LENGTHS",
    "SCHEDULES",
    "Recipe",
    "read_recipe",
    "recipe_names",
    "write_recipe",
]
