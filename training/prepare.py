"""The first phases of a training run: turn a recipe into the arguments of `Trainer`, a tokenizer and a model.

`train.py` calls these functions before and after the text is tokenised: a wrong model is refused before.
"""

import contextlib
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import PartialState
from transformers import (
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
)
from transformers.distributed import DistributedConfig
from transformers.integrations import get_reporting_integration_callbacks
from transformers.utils import ADAPTER_CONFIG_NAME, find_adapter_config_file

from attnres import AttnResKimiK3Processor, ResidualConfig
from attnres.checkpoints.generation_settings import check_generation_saving
from attnres.checkpoints.kimi_k3 import is_packed
from attnres.checkpoints.source import SPECIAL_TOKENS, ModelSource
from attnres.checkpoints.whole import Part, check_memory, load_whole
from attnres.configuration import count_parameters
from attnres.conversion import retrofit
from attnres.conversion.family import retrofit_config
from attnres.conversion.retrofit import config_for, load_source, retrofit_part
from attnres.residual_attnres import residual_tensors

from .launch import HEAL, divide_batch
from .parallel.pipeline_parts import make_part, part_of
from .parallel.sharding import load_sharded
from .recipe import Recipe
from .run_folder import START

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
    # With several processes the device of a CPU is `cpu:0`, which does not equal `cpu`.
    # pyrefly: ignore[missing-attribute]  # `accelerate` sets a device when it makes the state
    on_cpu = state.device.type == "cpu"
    if recipe.trainer.fp16 and on_cpu:
        raise ValueError("`trainer.fp16` of the recipe has no effect on a CPU: leave it out, or use `trainer.bf16`.")
    # The recipe may override these.
    options: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": recipe.save_every,
        "eval_on_start": True,
        "report_to": "none",
        "dataloader_pin_memory": torch.cuda.is_available(),
    }
    options |= recipe.trainer.given()
    # The recipe must not set these: they are keys of `DECIDED_BY_RUN`.
    options |= {
        "output_dir": recipe.out,
        "max_steps": 1,  # until `set_steps` knows the data
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
        "use_cpu": on_cpu,
    }
    if recipe.streaming:
        # Each process reads the whole stream. By default one reads it and joins what it sends, which must be tensors.
        options["accelerator_config"] = {**(options.get("accelerator_config") or {}), "dispatch_batches": False}
    try:
        arguments = TrainingArguments(**options)
        # `Trainer` makes these after the data is tokenised. Making one here shows at once which package it lacks.
        for callback in get_reporting_integration_callbacks(arguments.report_to):
            callback()
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"`trainer` of the recipe: {error}") from error
    return arguments


def set_steps(arguments: TrainingArguments, recipe: Recipe, steps: int) -> None:
    """Set the number of steps in `arguments`. `epochs` of the recipe may limit it, now that the data is known.

    Args:
        arguments: The arguments of the run; they are changed in place.
        recipe: The recipe of the run.
        steps: The steps of the run.
    """
    arguments.max_steps = steps
    if steps != recipe.most_steps:
        # `log_every` is chosen for a run of full length. With it, the curve of a much shorter run would have one point.
        arguments.logging_steps = min(recipe.log_every, max(1, steps // SHORTEST_CURVE))


def prepare_source(recipe: Recipe, name: str) -> tuple[PreTrainedTokenizerBase, PreTrainedConfig | None]:
    """Check the model of a recipe, without loading its weights, and load the tokenizer.

    Args:
        recipe: The recipe of the run.
        name: The recipe's name if it comes with `attnres`, else empty.

    Returns:
        The tokenizer, which is the model's unless the recipe names one; and the configuration of a model from scratch,
        with the tokenizer's vocabulary, or `None` for a model that has weights.

    Raises:
        FileNotFoundError: The model or the tokenizer cannot be found or read.
        ValueError: The tokenizer does not load or has no end-of-text token, a model from scratch is larger than the
            free memory, or as [`check_model`].
    """
    source, remedy = recipe.source, "" if recipe.tokenizer else "name one by tokenizer=DIR"
    if not source.is_named:
        check_model(recipe, name)  # first, since `transformers` reads the configuration for the tokenizer too
    tokenizer = open_tokenizer(recipe.tokenizer or recipe.model, remedy, recipe.trust_remote_code)
    if not source.is_named:
        return tokenizer, None
    special: dict[str, Any] = {name: getattr(tokenizer, name) for name in SPECIAL_TOKENS}
    config = source.config(**special | {"vocab_size": len(tokenizer)} | recipe.config_fields)
    check_training_memory(recipe, config)
    return tokenizer, config


def open_tokenizer(name: str, remedy: str = "", trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load a tokenizer to train with.

    Args:
        name: The folder or Hub id of the tokenizer.
        remedy: The end of the error message, which says how to name another tokenizer.
        trust_remote_code: Whether to run Python code that comes with the tokenizer.

    Returns:
        The tokenizer.

    Raises:
        FileNotFoundError: The tokenizer cannot be found or read.
        ValueError: The tokenizer does not load, or has no end-of-text token.
    """
    tokenizer = ModelSource(name).tokenizer(remedy, trust_remote_code)
    if not trust_remote_code:
        # Code that came with the tokenizer was not run, so the saved tokenizer must not refer to it.
        tokenizer.init_kwargs.pop("auto_map", None)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {name} has no end-of-text token; set its `eos_token`.")
    return tokenizer


def open_processor(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> AttnResKimiK3Processor:
    """Load the processor of the model of a recipe with `images`.

    Args:
        recipe: The recipe of the run.
        tokenizer: The tokenizer of the run, which the processor gets.

    Raises:
        ValueError: The model reads no images, or has no image processor.
    """
    source = recipe.source
    if getattr(source.config(**recipe.config_fields), "vision_config", None) is None:
        raise ValueError(f"{recipe.model} reads text alone, but `images` of the recipe is true: leave out `images`.")
    try:
        images = AutoImageProcessor.from_pretrained(source.name, revision=source.revision or "main")
    except OSError as error:
        raise ValueError(
            f"{recipe.model} has no image processor ({' '.join(str(error).split())}). Copy the "
            "preprocessor_config.json of its release."
        ) from error
    return AttnResKimiK3Processor(images, tokenizer)


def check_model(recipe: Recipe, name: str) -> None:
    """Check that the configuration of a model that has weights gives a model that the recipe can train.

    Args:
        recipe: The recipe of the run.
        name: The recipe's name if it comes with `attnres`, else empty.

    Raises:
        FileNotFoundError: The model cannot be found or read.
        ValueError: `config` or `retrofit` does not fit the model, the recipe `heal` gets a standard model, the model's
            settings of generation cannot be read or saved, or it has the files of an adapter.
    """
    source = recipe.source
    config = source.config(**recipe.config_fields)
    if recipe.mtp_loss_weight:
        if not isinstance(config, ResidualConfig):
            raise ValueError(
                f"`mtp_loss_weight` of the recipe is {recipe.mtp_loss_weight:g}, but {recipe.model} is not a model of "
                "the family: convert it by `attnres convert` first."
            )
        config.check_fields()  # not every backbone has such a layer
    if getattr(config, "packed_experts", False):
        if recipe.lora is None:
            raise ValueError(
                "`packed_experts` in `config` freezes the experts, so the recipe would train the model without them. "
                "Remove it, or train adapters by `lora`."
            )
        if not is_packed(source.checkpoint):
            raise ValueError(f"`packed_experts` in `config` is true, but the experts of {recipe.model} are not packed.")
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


def _is_retrofitted(config: PreTrainedConfig) -> bool:
    config = config.get_text_config()
    if not isinstance(config, ResidualConfig):
        return False
    # A conversion may have added only a gate, or only value residuals.
    has_others = config.attention_gate is not None or config.value_residual is not None
    return config.residual_connection != "standard" or has_others


def check_training_memory(recipe: Recipe, config: PreTrainedConfig) -> None:
    """Raise ValueError if the training of a named configuration takes more than the free memory of this machine."""
    part = part_of_process(recipe)
    count = count_parameters(config)
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.get_default_dtype()
    if torch.accelerator.is_available():
        # The weights are made in this memory. The other parts are on the device.
        parts, values = "weights", count.total
    else:
        # AdamW keeps two moments of each parameter, and Muon one, except for the embeddings, which AdamW updates.
        moments = 2 * count.total if recipe.optimizer == "adamw" else 2 * count.total - count.non_embedding
        parts, values = f"weights, gradients and moments ({recipe.optimizer})", 2 * count.total + moments
    needed = values * dtype.itemsize
    subject = f"{recipe.model} has {count.total:,} parameters, whose {parts} in {str(dtype).removeprefix('torch.')}"
    if part is not None:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        held_names = part(model)
        held = sum(parameter.numel() for name, parameter in model.named_parameters() if name in held_names)
        needed = needed * held // count.total
        subject += " on a process"
    check_memory(needed, subject, "Choose a smaller configuration, or smaller numbers by `config`.")


def prepare_model(
    recipe: Recipe,
    config: PreTrainedConfig | None,
    sharding: DistributedConfig | None,
    checkpoint: str | None,
) -> PreTrainedModel:
    """Make or load the model of a recipe, with its retrofit and adapters.

    Args:
        recipe: The recipe of the run.
        config: The configuration of a model from scratch; `None` for a model that has weights.
        sharding: How `transformers` shards the model; `None` if each process has the whole model or a pipeline's part.
        checkpoint: The checkpoint that the run resumes from; `None` for a new run. Only a sharded model is loaded from
            it here: `Trainer` loads the weights of a whole model.

    Returns:
        The model, of which this process holds its part; a PEFT model if the recipe has `lora`.

    Raises:
        OSError, RuntimeError, ValueError: The model cannot be loaded, retrofitted or sharded, or a setting of the
            recipe has no effect on it.
    """
    if sharding is None:
        model = build_model(recipe, config, part_of_process(recipe))
    else:
        start, build = Path(recipe.out) / START, partial(build_model, recipe, config)
        load = partial(load_sharded, sharding=sharding, start=start, build=build, auto_class=_auto_class(recipe))
        # A checkpoint of an adapter has no weights of the base.
        if checkpoint is not None and recipe.lora is None:
            model = load(checkpoint)
        elif config is not None or recipe.retrofit is not None:
            model = load(None)
        else:
            model = recipe.source.build(load, **_packed_if_frozen(recipe) | recipe.config_fields)
    if recipe.images:
        # Both alike: a batch may hold no image, and then no part of these would get a gradient.
        for part in (model.model.vision_tower, model.model.mm_projector):
            part.requires_grad_(False)
    if recipe.lora is not None:
        from .lora import add_adapters  # here, since `peft` comes with an extra

        # A PEFT model passes calls and attributes on to the model that it wraps.
        model = cast(PreTrainedModel, add_adapters(model, **recipe.lora.given()))
    if recipe.residual_alone and not residual_tensors(model):
        raise ValueError(
            f"`residual_alone` of the recipe is {recipe.residual_alone:g}, but must be 0: {recipe.model} has no "
            "tensors of residual connections, so nothing would be trained in these steps."
        )
    if sharding is not None and recipe.distributed is not None and recipe.distributed.sequence_parallel:
        # Here, since older versions of `transformers`, which shard no model, do not have the styles that it changes.
        from .parallel.sequence_parallel import shard_sequence

        model = shard_sequence(model)
    return model


def part_of_process(recipe: Recipe) -> Part | None:
    """Return the function that gives the names of this process's tensors; `None` if the recipe has no `pipeline`."""
    settings = recipe.pipeline
    return None if settings is None else part_of(settings, PartialState().process_index % settings.stages)


def build_model(recipe: Recipe, config: PreTrainedConfig | None, part: Part | None = None) -> PreTrainedModel:
    """Make or load the model of a recipe in this process, with its retrofit and without adapters.

    Args:
        recipe: The recipe of the run.
        config: The configuration of a model from scratch; `None` for a model that has weights.
        part: A function that gives the names of the tensors that this process needs. The others are left on the meta
            device, except where `load_whole` loads them all. `None` for the whole model.

    Returns:
        The model.

    Raises:
        OSError, ValueError: The model cannot be loaded or retrofitted.
    """
    options = recipe.retrofit
    if config is not None:
        model = AutoModelForCausalLM.from_config(config) if part is None else make_part(config, part)
    elif options is None:
        load = partial(load_whole, _auto_class(recipe))
        model = recipe.source.build(
            load, starts_anew=True, part=part, **_packed_if_frozen(recipe) | recipe.config_fields
        )
    else:
        loaded = None if part is None else partial(_part_of_retrofit, options, part)
        model = recipe.source.build(load_source, starts_anew=True, part=loaded, **recipe.config_fields)
    if options is not None:
        # A retrofit of the whole model refuses one that is offloaded.
        model = retrofit(model, **options) if part is None else retrofit_part(model, **options)
    return model


def _auto_class(recipe: Recipe) -> type:
    """Return the Auto class that loads the model of a recipe."""
    return AutoModelForImageTextToText if recipe.images else AutoModelForCausalLM


def _packed_if_frozen(recipe: Recipe) -> dict[str, Any]:
    """Return the field by which packed experts stay packed where only adapters are trained."""
    return {} if recipe.lora is None else recipe.source.as_packed


def _part_of_retrofit(options: dict[str, Any], part: Part, source: PreTrainedModel) -> frozenset[str]:
    """Return the names that `part` gives for the retrofit of a model: its layers decide how it is cut."""
    with torch.device("meta"):
        return part(AutoModelForCausalLM.from_config(config_for(source, **options)))


__all__ = [
    "build_model",
    "check_model",
    "check_training_memory",
    "open_processor",
    "open_tokenizer",
    "prepare_arguments",
    "prepare_model",
    "prepare_source",
    "set_steps",
]
