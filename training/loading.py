"""Models that `transformers` divides among processes as it loads them: FSDP2, tensor and expert parallel.

Weights go from the disk to the process that keeps them, so a model that has only just been made, from a named
configuration or by a retrofit, is written there first.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, __version__
from transformers.conversion_mapping import WeightConverter, get_model_conversion_mapping
from transformers.distributed import DistributedConfig

from attnres.wording import did_you_mean

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
        return AutoModelForCausalLM.from_pretrained(source, distributed_config=division, **config)
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


__all__ = ["load_divided", "read_division"]
