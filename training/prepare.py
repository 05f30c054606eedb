"""The first phase of a training run: turn a recipe into a tokenizer, data and a model.

Each function makes one of them. `train.py` calls them in an order that finds errors early: a wrong model is refused
before any text is tokenised.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.distributed import DistributedConfig
from transformers.utils import ADAPTER_CONFIG_NAME, find_adapter_config_file

from attnres import ResidualConfig
from attnres.checkpoints.checkpoint import Checkpoint
from attnres.checkpoints.generation_settings import check_generation_saving
from attnres.checkpoints.source_code import CODE_FIELDS
from attnres.checkpoints.whole import Part, check_memory, load_whole
from attnres.configuration import count_parameters, load, names
from attnres.conversion import retrofit
from attnres.conversion.family import retrofit_config
from attnres.conversion.retrofit import load_source, retrofit_part
from attnres.residual_attnres import residual_tensors
from attnres.utils.hub import meant
from attnres.utils.wording import counted

from .data.blocks import DataSpec, digest_of, load_blocks
from .data.chat import encode_chat
from .data.documents import file_identities
from .parallel.pipeline_parts import make_part, part_of
from .parallel.pipeline_settings import read_settings
from .parallel.sharding import check_fsdp2, divides_sequence, load_divided
from .recipe import Recipe
from .run_folder import COMMIT, START
from .start import HEAL, check_from_scratch
from .text import open_tokenizer

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
MAX_HELD_OUT = 64  # sequences, if the recipe gives no number


def prepare_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a recipe, which is the model's unless the recipe names one.

    Raises:
        FileNotFoundError: The tokenizer cannot be found or read.
        ValueError: The tokenizer does not load or has no end-of-text token.
    """
    source = recipe.tokenizer or recipe.model
    with explain_missing("tokenizer" if recipe.tokenizer else "model", source):
        return open_tokenizer(source, "" if recipe.tokenizer else "name one by tokenizer=DIR")


@contextlib.contextmanager
def explain_missing(kind: str, source: str) -> Iterator[None]:
    """Turn an OSError of `transformers` inside the block into a FileNotFoundError that names the source.

    Args:
        kind: `"model"` or `"tokenizer"`.
        source: A directory, a Hub id, or the name of a configuration.

    Raises:
        FileNotFoundError: `transformers` cannot find or read the source.
    """
    try:
        yield
    except OSError as error:
        reason = " ".join(str(error).split()).rstrip(".")
        if Path(source).is_dir():
            raise FileNotFoundError(f"the {kind} in {source} cannot be read: {reason}.") from error
        known = names() if kind == "model" else ()
        absent = f"directory or named configuration ({', '.join(known)})" if known else "directory"
        raise FileNotFoundError(
            f"the {kind} {source} cannot be read: there is no such {absent}, and loading it from the Hub failed: "
            f"{reason}.{meant(source, known)}"
        ) from error


def check_model_config(recipe: Recipe, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the configuration of a recipe's model gives a model that the recipe can train.

    Args:
        recipe: The recipe of the run.
        name: The recipe's name if it comes with `attnres`, else empty.
        tokenizer: The tokenizer of the run.

    Raises:
        FileNotFoundError: The model cannot be found or read.
        ValueError: `config` or `retrofit` does not fit the model, the recipe `heal` gets a standard model, a model from
            scratch is larger than the free memory, or the model's settings of generation cannot be read or saved.
    """
    try:
        if recipe.model in names():
            config = _named_config(recipe, tokenizer)
        else:
            with explain_missing("model", recipe.model):
                config = AutoConfig.from_pretrained(recipe.model, trust_remote_code=False, **recipe.config)
    except (StrictDataclassError, TypeError, ValueError) as error:
        if not recipe.config:
            raise ValueError(f"the configuration of {recipe.model} cannot be used: {error}") from error
        raise ValueError(f"`config` of the recipe does not fit {recipe.model}: {error}") from error
    if recipe.model in names():
        _check_memory(recipe, config)
        return
    if recipe.retrofit is not None:
        try:
            retrofit_config(config, **recipe.retrofit)
        except (TypeError, ValueError) as error:
            raise ValueError(f"`retrofit` of the recipe is {recipe.retrofit}: {error}") from error
    elif name == HEAL and not _is_retrofitted(config):
        raise ValueError(
            f"{recipe.model} has standard residual connections, so there is nothing to heal. Put attention residuals "
            f"in first, by `attnres convert {recipe.model} DIR`, and give model=DIR; or add 'retrofit={{}}' to this "
            "command. To train it as it is, use the recipe `finetune`."
        )
    with contextlib.suppress(FileNotFoundError):  # a repository of which the Hub gives no snapshot, only single files
        checkpoint = Checkpoint.open(recipe.model)
        # Checkpoints of an adapter hold no settings of generation.
        is_saved = recipe.lora is None or recipe.merge
        check_generation_saving(checkpoint, _special_tokens(recipe) if is_saved else {})


def _special_tokens(recipe: Recipe) -> dict[str, Any]:
    """Return the special tokens that a recipe names in `config`. A trained model keeps all others of its source."""
    return {name: recipe.config[name] for name in SPECIAL_TOKENS if name in recipe.config}


def check_start(recipe: Recipe, name: str) -> None:
    """Raise ValueError if a run cannot start from a named configuration, or gets an adapter.

    `from_pretrained` would load an adapter beside a model and freeze the model, so a run would train and save only the
    adapter.

    Args:
        recipe: The recipe of the run.
        name: The recipe's name if it comes with `attnres`, else empty.
    """
    check_from_scratch(recipe, name)
    if recipe.model not in names() and find_adapter_config_file(recipe.model) is not None:
        raise ValueError(
            f"{recipe.model} has the files of an adapter ({ADAPTER_CONFIG_NAME}), so only the adapter would be "
            "trained. Move them elsewhere, or merge the adapter first: by `merge=true` of its recipe, or by "
            "`merge_and_unload` of PEFT."
        )


def _is_retrofitted(config: PreTrainedConfig) -> bool:
    config = config.get_text_config()
    if not isinstance(config, ResidualConfig):
        return False
    # A conversion may have added only a gate, or only value residuals.
    has_others = config.attention_gate is not None or config.value_residual is not None
    return config.residual_connection != "standard" or has_others


def _named_config(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """Return the named configuration of a recipe, with the tokenizer's vocabulary and special tokens."""
    special = {name: getattr(tokenizer, name) for name in SPECIAL_TOKENS}
    return load(recipe.model, **{"vocab_size": len(tokenizer), **special, **recipe.config})


def _check_memory(recipe: Recipe, config: PreTrainedConfig) -> None:
    """Raise ValueError if the training of a named configuration takes more than the free memory of this machine."""
    count, dtype = count_parameters(config), config.dtype or torch.get_default_dtype()
    if torch.accelerator.is_available():
        # The weights are made in this memory. The other parts are on the device.
        parts, values = "weights", count.total
    else:
        # AdamW keeps two moments of each parameter, and Muon one, except for the embeddings, which AdamW updates.
        moments = 2 * count.total if recipe.optimizer == "adamw" else 2 * count.total - count.non_embedding
        parts, values = f"weights, gradients and moments ({recipe.optimizer})", 2 * count.total + moments
    needed = values * dtype.itemsize
    subject = f"{recipe.model} has {count.total:,} parameters, whose {parts} in {str(dtype).removeprefix('torch.')}"
    if (part := part_of_process(recipe)) is not None:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        held_names = part(model)
        held = sum(parameter.numel() for name, parameter in model.named_parameters() if name in held_names)
        needed = needed * held // count.total
        subject += " on a process"
    check_memory(needed, subject, "Choose a smaller configuration, or smaller numbers by `config`.")


def prepare_data(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase
) -> "tuple[Dataset | IterableDataset, Dataset, dict[str, str]]":
    """Tokenise the data of a recipe, and divide it into sequences to train on and sequences held out.

    Args:
        recipe: The recipe of the run.
        tokenizer: The tokenizer of the run.

    Returns:
        The sequences to train on, the held-out sequences, and a digest of each data set by its key in the recipe.

    Raises:
        OSError: A file cannot be read, or the cache cannot be written.
        ValueError: A data set, file or row cannot be used, or there are too few sequences.
    """
    spec = DataSpec(tuple(recipe.train), recipe.split, recipe.column, recipe.streaming, recipe.bad_rows)
    encode = encode_chat(tokenizer, recipe.column) if recipe.chat else None
    load_spec = partial(load_blocks, encode=encode, separate=recipe.separate_documents)
    train = load_spec(spec, tokenizer, recipe.length, seed=recipe.seed)
    if recipe.streaming:
        # The tokens of a stream are not known yet: its files stand in for them.
        digests = {"train": repr(file_identities(spec))}
        # `Trainer` does not know where a pass over a stream ends: it would add the micro-batches of a short last step
        # to the next step, and resume in the first pass. So there is one pass without an end.
        train = train.repeat(None)
    else:
        digests = {"train": digest_of(train)}
    if recipe.held_out:
        split = recipe.held_out_split or recipe.split
        spec = replace(spec, paths=tuple(recipe.held_out), split=split, streaming=False)
        held_out = load_spec(spec, tokenizer, recipe.length, seed=None)
        whole = train if recipe.streaming else _whole_batches(train, recipe)
        return whole, held_out, digests | {"held_out": digest_of(held_out)}
    # At most a tenth of the data, so that most of a small data set is left to train on.
    count = recipe.held_out_sequences or min(MAX_HELD_OUT, max(1, len(train) // 10))
    num_train = len(train) - count
    if num_train <= 0:
        raise ValueError(
            f"`held_out_sequences` of the recipe is {count}, but the data has only "
            f"{counted(len(train), 'sequence')} of {recipe.length} tokens: hold out fewer, name other data by "
            "`held_out`, or give more data, or a smaller `length`."
        )
    held_out = train.select(range(num_train, len(train)))
    return _whole_batches(train.select(range(num_train)), recipe, len(held_out)), held_out, digests


def _whole_batches(train: "Dataset", recipe: Recipe, num_held_out: int = 0) -> "Dataset":
    """Return the sequences without the last ones, which make no whole batch. Raise ValueError if none is left.

    The last batch of an epoch would be short, and with several processes accelerate would fill it with sequences of the
    epoch's first batch.
    """
    left_out = len(train) % recipe.batch_size
    if left_out == len(train):
        held_out = f", {num_held_out} of them held out" if num_held_out else ""
        raise ValueError(
            f"the data has {counted(len(train) + num_held_out, 'sequence')} of {recipe.length} tokens{held_out}: less "
            f"than one batch of {recipe.batch_size}. Give more data, or smaller `length` or `batch_size`."
        )
    whole = train.select(range(len(train) - left_out))
    if left_out:
        last = f"the last {counted(left_out, 'sequence')} left out, which fill no batch of {recipe.batch_size}"
        whole.info.description = ", ".join(filter(None, [train.info.description, last]))
    return whole


def identify_model(recipe: Recipe) -> dict[str, str]:
    """Return `{"model": TEXT}`, where TEXT changes with the files of a model. Empty for a named configuration.

    For a model on the Hub, TEXT is `commit HASH`. The result is empty too if the Hub gives only single files, and no
    snapshot. A resumed run compares this text with the one that it began with. The checkpoint does not suffice for
    that: the checkpoint of an adapter lacks the base model, and no checkpoint has the configuration that the model
    began with.
    """
    folder = Path(recipe.model)
    if recipe.model in names():
        return {}
    if not folder.is_dir():
        with contextlib.suppress(FileNotFoundError):
            commit = Checkpoint.open(recipe.model).folder.name  # the folder of a snapshot has this name
            return {"model": f"{COMMIT}{commit}"}
        return {}
    paths = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".bin"))
    return {"model": repr([(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths])}


def prepare_model(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, division: DistributedConfig | None, checkpoint: str | None
) -> PreTrainedModel:
    """Make or load the model of a recipe, with its retrofit and adapters.

    Args:
        recipe: The recipe of the run.
        tokenizer: The tokenizer of the run.
        division: How the processes divide the model; `None` if each has the whole model.
        checkpoint: The checkpoint that the run resumes from; `None` for a new run. Only a divided model is loaded from
            it here: `Trainer` loads the weights of a whole model.

    Returns:
        The model, of which this process holds its part.

    Raises:
        OSError, RuntimeError, ValueError: The model cannot be loaded, retrofitted or divided, or a setting of the
            recipe has no effect on it.
    """
    if division is None:
        model = build_model(recipe, tokenizer, part_of_process(recipe))
        _check_effects(recipe, model)
        return model
    start, build = Path(recipe.out) / START, partial(build_model, recipe, tokenizer)
    if checkpoint is not None:
        model = load_divided(checkpoint, division, start, build)
    elif recipe.model in names() or recipe.retrofit is not None:
        model = load_divided(None, division, start, build)
    else:
        model = _load_with_config(recipe, partial(load_divided, recipe.model, division, start, build))
    _check_effects(recipe, model)
    if divides_sequence(recipe.distributed):
        # Here, since older versions of `transformers`, which divide no model, do not have the styles that it changes.
        from .parallel.sequence_parallel import shard_sequence

        model = shard_sequence(model)
    return model


def _check_effects(recipe: Recipe, model: PreTrainedModel) -> None:
    """Raise ValueError if a setting of the recipe has no effect on its model."""
    if recipe.residual_alone and not residual_tensors(model):
        raise ValueError(
            f"`residual_alone` of the recipe is {recipe.residual_alone:g}, but must be 0: {recipe.model} has no "
            "tensors of residual connections, so nothing would be trained in these steps."
        )


def part_of_process(recipe: Recipe) -> Part | None:
    """Return the function that gives the names of this process's tensors; `None` if the recipe has no `pipeline`."""
    settings = read_settings(recipe.pipeline)
    return None if settings is None else part_of(settings, PartialState().process_index % settings.stages)


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, part: Part | None = None) -> PreTrainedModel:
    """Make or load the model of a recipe in this process, with its retrofit and adapters.

    Args:
        recipe: The recipe of the run.
        tokenizer: The tokenizer of the run; a model from scratch has its vocabulary.
        part: A function that gives the names of the tensors that this process needs. The others are left on the meta
            device, except where `load_whole` loads them all. `None` for the whole model.

    Returns:
        The model, a PEFT model if the recipe has `lora`.

    Raises:
        OSError, ValueError: The model cannot be loaded or retrofitted.
    """
    if recipe.model in names():
        config = _named_config(recipe, tokenizer)
        model = AutoModelForCausalLM.from_config(config) if part is None else make_part(config, part)
    else:
        # Absolute, since the file of an adapter names its base by this path.
        source = str(Path(recipe.model).absolute()) if Path(recipe.model).is_dir() else recipe.model
        options = {"starts_anew": True, "trust_remote_code": False}
        if part is not None:
            options["part"] = part if recipe.retrofit is None else partial(_part_of_retrofit, recipe, part)
        load_model = partial(load_whole, AutoModelForCausalLM) if recipe.retrofit is None else load_source
        model = _load_with_config(recipe, partial(load_model, source, **options))
    if recipe.retrofit is not None:
        # A retrofit of the whole model refuses one that is offloaded.
        model = retrofit(model, **recipe.retrofit) if part is None else retrofit_part(model, **recipe.retrofit)
    if recipe.lora is not None:
        from .lora import add_adapters  # here, since `peft` comes with an extra

        model = add_adapters(model, **recipe.lora)
    check_fsdp2(model)
    return model


def _load_with_config(recipe: Recipe, load_model: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    """Load a model with `config` of the recipe by a function that takes its fields, and drop fields that name code."""
    try:
        model = load_model(**recipe.config)
    except TypeError as error:  # the model's constructor gets each key that is not a field of its configuration
        raise ValueError(f"`config` of the recipe does not fit {recipe.model}: {error}") from error
    # The file of settings of generation has its own, by which `generate` ends a text.
    if model.generation_config is not None:
        vars(model.generation_config).update(_special_tokens(recipe))
    # Code that came with the model was not run, so the saved model must not refer to it.
    for name in CODE_FIELDS:
        vars(model.config).pop(name, None)
    return model


def _part_of_retrofit(recipe: Recipe, part: Part, source: PreTrainedModel) -> frozenset[str]:
    """Return the names that `part` gives for the retrofit of a model: its layers decide how it is divided."""
    with torch.device("meta"):
        return part(AutoModelForCausalLM.from_config(retrofit_config(source.config, **recipe.retrofit)))


__all__ = [
    "build_model",
    "check_model_config",
    "check_start",
    "explain_missing",
    "identify_model",
    "prepare_data",
    "prepare_model",
    "prepare_tokenizer",
]
