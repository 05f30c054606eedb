"""Models that `transformers` divides among processes as it loads them: FSDP2, tensor and expert parallel.

Weights go from the disk to the process that keeps them, so a model that has only just been made, from a named
configuration or by a retrofit, is written there first.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, parse_flag_from_env
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Trainer, __version__
from transformers.conversion_mapping import WeightConverter, get_model_conversion_mapping
from transformers.distributed import DistributedConfig

from attnres.conversion.whole import load_whole
from attnres.utils.wording import counted, did_you_mean

# What accelerate calls processes that share nothing but gradients, on CPUs.
_UNDIVIDED = (DistributedType.NO, DistributedType.MULTI_CPU)
# Neither is a division that a `Trainer` can train under.
_REFUSED = ("enable_sequence_parallel", "enable_expert_parallel", "pp_size")


def read_division(settings: Mapping[str, Any] | None, num_processes: int) -> DistributedConfig | None:
    """The recipe's `distributed` as `transformers` reads it; `None` where the model is not divided.

    Raises:
        ValueError: an unknown field or a wrong value; another number of processes than the sizes multiply to; an
            engine of accelerate's that divides the model too; or a version of `transformers` that divides otherwise.
    """
    if not settings:
        return None
    if not hasattr(DistributedConfig, "dp_size"):
        raise ValueError(f"`distributed` of the recipe needs transformers 5.23 or newer, not {__version__}.")
    known = [item.name for item in fields(DistributedConfig) if item.name not in _REFUSED]
    for name, value in settings.items():
        if name not in known:
            raise ValueError(f"`distributed` of the recipe cannot have `{name}`.{did_you_mean(name, known)}")
        if name.endswith("_size") and (isinstance(value, bool) or not isinstance(value, int)):
            raise ValueError(f"`{name}` of the recipe's `distributed` is {value!r}, but must be a number of processes.")
    try:
        division = DistributedConfig(**settings)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`distributed` of the recipe: {error}") from error
    for engine in ("FSDP", "DEEPSPEED"):
        if parse_flag_from_env(f"ACCELERATE_USE_{engine}"):
            raise ValueError(
                f"`distributed` of the recipe and accelerate's {engine} would both divide the model: leave out one."
            )
    size = division.dp_size * division.tp_size
    if size != num_processes:
        raise ValueError(
            f"`distributed` of the recipe divides the model among {size} processes, but this run has {num_processes}. "
            f"Start it by `accelerate launch --multi_gpu --num_processes {size} -m attnres train`, or change "
            "the sizes."
        )
    return division if size > 1 else None


def check_engines(state: PartialState) -> None:
    """Raise RuntimeError if accelerate was told to divide the model by an engine that does not run on this machine.

    On CPUs accelerate takes no notice of such an engine, and trains a whole model in each process.
    """
    if parse_flag_from_env("ACCELERATE_USE_FSDP") and state.distributed_type in _UNDIVIDED:
        raise RuntimeError(_not_divided("FSDP"))


def check_division(trainer: Trainer, division: DistributedConfig | None) -> None:
    """Raise RuntimeError if the model is not divided as the recipe, or accelerate's settings, ask for.

    Args:
        trainer: The trainer of the run, made with the model.
        division: What the recipe asks for.
    """
    engines = {"FSDP": trainer.is_fsdp_enabled, "DEEPSPEED": trainer.is_deepspeed_enabled, "MEGATRON_LM": False}
    for engine, is_made in engines.items():
        if parse_flag_from_env(f"ACCELERATE_USE_{engine}") and not is_made:
            raise RuntimeError(_not_divided(engine))
    if (trainer.args.fsdp and not trainer.is_fsdp_enabled) or (trainer.args.deepspeed and not engines["DEEPSPEED"]):
        raise RuntimeError(_not_divided("`fsdp`" if trainer.args.fsdp else "`deepspeed`"))
    if division is not None and not getattr(trainer.model, "is_distributed_loading_by_transformers", False):
        raise RuntimeError("the model is not divided by the recipe's `distributed`, which asks for it.")


def describe_division(trainer: Trainer, division: DistributedConfig | None) -> str:
    """Return how many processes train, and how they share the model, in a line for people."""
    count = trainer.args.world_size
    processes = f"{count} processes"
    if division is not None:
        sizes = {"dp_replicate_size": "replicas", "fsdp_size": "FSDP2", "tp_size": "TP", "ep_size": "EP"}
        parts = [f"{title} {size}" for name, title in sizes.items() if (size := getattr(division, name, None) or 1) > 1]
        return f"{processes}, the model divided by transformers ({', '.join(parts)})"
    if trainer.is_fsdp_enabled:
        version = getattr(trainer.accelerator.state.fsdp_plugin, "fsdp_version", 1)
        return f"{processes}, the model divided by accelerate (FSDP{version})"
    if trainer.is_deepspeed_enabled:
        stage = trainer.accelerator.state.deepspeed_plugin.zero_stage
        return f"{processes}, the model divided by DeepSpeed (ZeRO-{stage})"
    if count > 1:
        return f"{processes}, each with the whole model (DDP)"
    return "1 process"


def _not_divided(engine: str) -> str:
    return (
        f"accelerate was told to divide the model by {engine}, but cannot do so here: it divides models on GPUs and "
        "other accelerators only. Without them give ddp.yaml, which trains a whole model in each process, or divide "
        "the model by the recipe's 'distributed={fsdp_size: N}', which runs on CPUs too."
    )


def check_fsdp2(model: nn.Module) -> None:
    """Raise ValueError if accelerate's FSDP2 cannot divide this model as its settings ask for.

    - With `fsdp_cpu_ram_efficient_loading` accelerate takes every tensor of the state dict to be divided. FSDP2 divides
      parameters only: routing biases are buffers.
    - Without mixed precision the parameters of a layer must have one dtype. A model in 16 bits has some in float32.
    """
    if not parse_flag_from_env("ACCELERATE_USE_FSDP") or os.environ.get("FSDP_VERSION", "1") == "1":
        return
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in model.parameters() if tensor.requires_grad})
    if len(dtypes) > 1 and os.environ.get("ACCELERATE_MIXED_PRECISION", "no") == "no":
        raise ValueError(
            f"FSDP2 without mixed precision cannot divide a model with parameters in {' and '.join(dtypes)}. Load it "
            "in float32 (`config.dtype=float32` in the recipe) with `mixed_precision: bf16` in accelerate's file, or "
            "divide the model by the recipe's `distributed`."
        )
    buffers = [name for name, _ in model.named_buffers() if name in model.state_dict()]
    if buffers and parse_flag_from_env("FSDP_CPU_RAM_EFFICIENT_LOADING"):
        raise ValueError(
            "FSDP2 cannot load this model with `fsdp_cpu_ram_efficient_loading: true`: its "
            f"{counted(len(buffers), 'saved buffer')}, such as `{buffers[0]}`, cannot be divided. Set the flag to "
            "false in accelerate's file, or divide the model by the recipe's `distributed`."
        )


def load_divided(
    source: str | None, division: DistributedConfig, start: Path, build: Callable[[], PreTrainedModel], **config: Any
) -> PreTrainedModel:
    """Load a model, each process its part.

    Args:
        source: a directory or Hub id; `None` for a model that is not on the disk, or not as this run begins with it.
        division: of the model among the processes.
        start: a folder for the whole model, where it cannot be loaded from `source`; it is removed again.
        build: makes that model, on the first process.
        config: fields of the configuration to set in a model from `source`.

    Raises:
        OSError, RuntimeError, ValueError: the model cannot be loaded, or not be divided like this.
    """
    if source is not None and not _is_converted(source):
        return load_whole(AutoModelForCausalLM, source, starts_anew=True, distributed_config=division, **config)
    state = PartialState()
    if state.is_main_process:
        shutil.rmtree(start, ignore_errors=True)
        build().save_pretrained(start, save_original_format=False)
    state.wait_for_everyone()
    try:
        model = AutoModelForCausalLM.from_pretrained(start, distributed_config=division)
    finally:
        state.wait_for_everyone()
        if state.is_main_process:
            shutil.rmtree(start, ignore_errors=True)
    # What was loaded from decides the layout of what is saved: it is to be that of the whole model.
    vars(model).pop("_weight_conversions", None)
    return model


def _is_converted(source: str) -> bool:
    """Whether a model's published layout has other tensors than the model: several of them make one.

    `transformers` makes it of each process's parts of them, which in order are not that process's part of the one:
    Kimi Linear's convolutions would be scrambled.
    """
    from transformers.distributed.checkpoint import is_sharded_checkpoint  # older versions do not have it

    if is_sharded_checkpoint(source):
        return False
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    return any(isinstance(rule, WeightConverter) for rule in get_model_conversion_mapping(model, add_legacy=False))


__all__ = ["check_division", "check_engines", "check_fsdp2", "describe_division", "load_divided", "read_division"]
