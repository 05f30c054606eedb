"""The first phase of a training run: turn a recipe into a tokenizer and a model.

`train.py` calls these functions before and after the text is tokenised: a wrong model is refused before.
"""

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.distributed import DistributedConfig
from transformers.utils import ADAPTER_CONFIG_NAME, find_adapter_config_file

from attnres import ResidualConfig
from attnres.checkpoints.generation_settings import check_generation_saving
from attnres.checkpoints.source import SPECIAL_TOKENS, ModelSource
from attnres.checkpoints.whole import Part, check_memory
from attnres.configuration import count_parameters
from attnres.conversion import retrofit
from attnres.conversion.family import retrofit_config
from attnres.conversion.retrofit import load_source, retrofit_part
from attnres.residual_attnres import residual_tensors

from .parallel.pipeline_parts import make_part, part_of
from .parallel.sharding import check_fsdp2, load_sharded
from .recipe import Recipe
from .run_folder import START
from .start import HEAL, check_from_scratch


def prepare_source(recipe: Recipe, name: str) -> PreTrainedTokenizerBase:
    """Check the model of a recipe, without loading its weights, and load the tokenizer.

    Args:
        recipe: The recipe of the run.
        name: The recipe's name if it comes with `attnres`, else empty.

    Returns:
        The tokenizer.

    Raises:
        OSError, ValueError: As [`check_model`] and [`prepare_tokenizer`], or the recipe cannot start from scratch.
    """
    if recipe.source.is_named:
        check_from_scratch(recipe, name)
        tokenizer = prepare_tokenizer(recipe)
        check_model(recipe, name, tokenizer)
        return tokenizer
    # First, since `transformers` reads the configuration for the tokenizer too.
    check_model(recipe, name)
    return prepare_tokenizer(recipe)


def prepare_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a recipe, which is the model's unless the recipe names one.

    Raises:
        FileNotFoundError: The tokenizer cannot be found or read.
        ValueError: The tokenizer does not load or has no end-of-text token.
    """
    source = ModelSource(recipe.tokenizer or recipe.model)
    tokenizer = source.tokenizer("" if recipe.tokenizer else "name one by tokenizer=DIR")
    # Code that came with the tokenizer was not run, so the saved tokenizer must not refer to it.
    tokenizer.init_kwargs.pop("auto_map", None)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {source.name} has no end-of-text token; set its `eos_token`.")
    return tokenizer


def check_model(recipe: Recipe, name: str, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
    """Check that the configuration of a recipe's model gives a model that the recipe can train.

    Args:
        recipe: The recipe of the run.
        name: The recipe's name if it comes with `attnres`, else empty.
        tokenizer: The tokenizer of the run, of which a model from scratch gets the vocabulary.

    Raises:
        FileNotFoundError: The model cannot be found or read.
        ValueError: `config` or `retrofit` does not fit the model, the recipe `heal` gets a standard model, a model from
            scratch is larger than the free memory, the model's settings of generation cannot be read or saved, or it
            has the files of an adapter.
    """
    source = recipe.source
    config = source.config(**_config_fields(recipe, tokenizer))
    if source.is_named:
        _check_memory(recipe, config)
        return
    if find_adapter_config_file(recipe.model) is not None:
        # `from_pretrained` would load the adapter and freeze the model, so the run would train the adapter alone.
        raise ValueError(
            f"{recipe.model} has the files of an adapter ({ADAPTER_CONFIG_NAME}), so only the adapter would be "
            "trained. Move them elsewhere, or merge the adapter first: by `merge=true` of its recipe, or by "
            "`merge_and_unload` of PEFT."
        )
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
        # Checkpoints of an adapter hold no settings of generation.
        is_saved = recipe.lora is None or recipe.merge
        # A trained model keeps all other special tokens of its source.
        special = {name: recipe.config[name] for name in SPECIAL_TOKENS if name in recipe.config}
        check_generation_saving(source.checkpoint, special if is_saved else {})


def _config_fields(recipe: Recipe, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
    """Return the fields to set in the model's configuration. A model from scratch gets the tokenizer's vocabulary."""
    if not recipe.source.is_named:
        return recipe.config
    special = {name: getattr(tokenizer, name) for name in SPECIAL_TOKENS}
    return {"vocab_size": len(tokenizer), **special, **recipe.config}


def _is_retrofitted(config: PreTrainedConfig) -> bool:
    config = config.get_text_config()
    if not isinstance(config, ResidualConfig):
        return False
    # A conversion may have added only a gate, or only value residuals.
    has_others = config.attention_gate is not None or config.value_residual is not None
    return config.residual_connection != "standard" or has_others


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


def prepare_model(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase | None,
    sharding: DistributedConfig | None,
    checkpoint: str | None,
) -> PreTrainedModel:
    """Make or load the model of a recipe, with its retrofit and adapters.

    Args:
        recipe: The recipe of the run.
        tokenizer: The tokenizer of the run.
        sharding: How `transformers` shards the model; `None` if each process has the whole model or a pipeline's part.
        checkpoint: The checkpoint that the run resumes from; `None` for a new run. Only a sharded model is loaded from
            it here: `Trainer` loads the weights of a whole model.

    Returns:
        The model, of which this process holds its part.

    Raises:
        OSError, RuntimeError, ValueError: The model cannot be loaded, retrofitted or sharded, or a setting of the
            recipe has no effect on it.
    """
    if sharding is None:
        model = build_model(recipe, tokenizer, part_of_process(recipe))
    else:
        start, build = Path(recipe.out) / START, partial(build_model, recipe, tokenizer)
        if checkpoint is not None:
            model = load_sharded(checkpoint, sharding, start, build)
        elif recipe.source.is_named or recipe.retrofit is not None:
            model = load_sharded(None, sharding, start, build)
        else:
            load = partial(load_sharded, sharding=sharding, start=start, build=build)
            model = recipe.source.build(load, **recipe.config)
    if recipe.residual_alone and not residual_tensors(model):
        raise ValueError(
            f"`residual_alone` of the recipe is {recipe.residual_alone:g}, but must be 0: {recipe.model} has no "
            "tensors of residual connections, so nothing would be trained in these steps."
        )
    if sharding is not None and recipe.distributed.sequence_parallel:
        # Here, since older versions of `transformers`, which shard no model, do not have the styles that it changes.
        from .parallel.sequence_parallel import shard_sequence

        model = shard_sequence(model)
    return model


def part_of_process(recipe: Recipe) -> Part | None:
    """Return the function that gives the names of this process's tensors; `None` if the recipe has no `pipeline`."""
    settings = recipe.pipeline
    return None if settings is None else part_of(settings, PartialState().process_index % settings.stages)


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase | None, part: Part | None = None) -> PreTrainedModel:
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
    source, fields = recipe.source, _config_fields(recipe, tokenizer)
    if source.is_named:
        model = source.build(**fields) if part is None else make_part(source.config(**fields), part)
    else:
        loaded = part if part is None or recipe.retrofit is None else partial(_part_of_retrofit, recipe, part)
        load = None if recipe.retrofit is None else load_source
        options = {} if loaded is None else {"part": loaded}
        model = source.build(load, starts_anew=True, **options, **fields)
    if recipe.retrofit is not None:
        # A retrofit of the whole model refuses one that is offloaded.
        model = retrofit(model, **recipe.retrofit) if part is None else retrofit_part(model, **recipe.retrofit)
    if recipe.lora is not None:
        from .lora import add_adapters  # here, since `peft` comes with an extra

        model = add_adapters(model, **recipe.lora.given())
    check_fsdp2(model)
    return model


def _part_of_retrofit(recipe: Recipe, part: Part, source: PreTrainedModel) -> frozenset[str]:
    """Return the names that `part` gives for the retrofit of a model: its layers decide how it is cut."""
    with torch.device("meta"):
        return part(AutoModelForCausalLM.from_config(retrofit_config(source.config, **recipe.retrofit)))


__all__ = ["build_model", "check_model", "prepare_model", "prepare_source", "prepare_tokenizer"]
