"""Sharding of a model among processes: by `transformers` as it loads the model, or by an engine of accelerate.

`transformers` shards by FSDP2, tensor and expert parallelism, if the recipe has `distributed`. Each process loads its
part from the disk. So a model that is built in memory, from a named configuration or by a retrofit, is written to the
disk first. This file also checks that the requested sharding takes place, since accelerate may ignore the request.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, parse_flag_from_env
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, __version__
from transformers.conversion_mapping import WeightConverter, get_model_conversion_mapping
from transformers.distributed import DistributedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from attnres import AttnResKimiK3Config
from attnres.checkpoints.whole import load_whole
from attnres.utils.wording import counted

from ..launch import Launch
from ..settings import ShardingSettings
from ..trainer import AttnResTrainer
from .tensor_parallel import sum_gradients_of_norms

# accelerate's types of runs in which each process has the whole model.
_UNSHARDED = (DistributedType.NO, DistributedType.MULTI_CPU)


def make_sharding(settings: ShardingSettings | None) -> DistributedConfig | None:
    """Return `distributed` of a recipe as `transformers` takes it; `None` if the model stays whole.

    Raises:
        ValueError: `transformers` is too old, or refuses the settings.
    """
    if settings is None:
        return None
    if not hasattr(DistributedConfig, "dp_size"):
        raise ValueError(f"`distributed` of the recipe needs transformers 5.23 or newer, not {__version__}.")
    try:
        sharding = DistributedConfig(**settings.model_dump(exclude_unset=True, exclude={"sequence_parallel"}))
    except (TypeError, ValueError) as error:
        raise ValueError(f"`distributed` of the recipe: {error}") from error
    return sharding if sharding.dp_size * (sharding.tp_size or 1) > 1 else None


def check_engine(state: PartialState, launch: Launch) -> None:
    """Raise RuntimeError if accelerate would not shard the model as the launcher asks.

    On CPUs accelerate ignores FSDP, and trains a whole model in each process. `Trainer` does not know Megatron-LM.

    Args:
        state: The processes of the run.
        launch: What the launcher asks for.
    """
    if launch.uses_megatron or (launch.uses_fsdp and state.distributed_type in _UNSHARDED):
        raise RuntimeError(_describe_not_sharded("Megatron-LM" if launch.uses_megatron else "FSDP"))


def allow_tensor_parallel_on_cpus(state: PartialState, sharding: DistributedConfig | None) -> None:
    """Let accelerate train a model that `transformers` has sharded by tensor parallelism among CPUs.

    Such a model trains on CPUs too. But accelerate refuses the `ParallelismConfig` that `Trainer` makes for it, unless
    the processes are of a type with accelerators. The type does not change the devices.

    Args:
        state: The processes of the run.
        sharding: The sharding by the recipe's `distributed`; `None` without one.
    """
    if sharding is not None and (sharding.tp_size or 1) > 1 and state.distributed_type == DistributedType.MULTI_CPU:
        state.distributed_type = DistributedType.MULTI_GPU


def describe_sharding(trainer: AttnResTrainer, sharding: DistributedConfig | None) -> str:
    """Check how the processes share the model, and describe it in a line.

    Args:
        trainer: The trainer of the run.
        sharding: The sharding by the recipe's `distributed`; `None` without one.

    Returns:
        The line, such as `8 processes, the model sharded by transformers (FSDP2 8)`.

    Raises:
        ValueError: As [`check_fsdp2`].
        RuntimeError: accelerate ignores `trainer.fsdp` of the recipe, or the launcher's DeepSpeed; or `transformers`
            ignores `distributed`.
    """
    check_fsdp2(trainer.model)
    if trainer.args.fsdp and not trainer.is_fsdp_enabled:
        raise RuntimeError(_describe_not_sharded("FSDP"))
    if parse_flag_from_env("ACCELERATE_USE_DEEPSPEED") and not trainer.is_deepspeed_enabled:
        raise RuntimeError(_describe_not_sharded("DeepSpeed"))
    if sharding is not None and not trainer.is_sharded:
        # Each process would train a whole model of its own.
        raise RuntimeError("`distributed` of the recipe is set, but `transformers` did not shard the model.")
    count = trainer.args.world_size
    processes = f"{count} processes"
    settings = trainer.recipe.distributed
    if sharding is not None and settings is not None:
        sizes = {"dp_replicate_size": "replicas", "fsdp_size": "FSDP2", "tp_size": "TP", "ep_size": "EP"}
        parts = [f"{title} {size}" for name, title in sizes.items() if (size := getattr(sharding, name, None) or 1) > 1]
        parts += ["sequence parallel"] if settings.sequence_parallel else []
        return f"{processes}, the model sharded by transformers ({', '.join(parts)})"
    if trainer.is_fsdp_enabled:
        version = getattr(trainer.accelerator.state.fsdp_plugin, "fsdp_version", 1)
        return f"{processes}, the model sharded by accelerate (FSDP{version})"
    if trainer.is_deepspeed_enabled:
        # pyrefly: ignore[missing-attribute]  # there is one, since DeepSpeed is enabled
        stage = trainer.accelerator.state.deepspeed_plugin.zero_stage
        return f"{processes}, the model sharded by DeepSpeed (ZeRO-{stage})"
    if count > 1:
        return f"{processes}, each with the whole model (DDP)"
    return "1 process"


def _describe_not_sharded(engine: str) -> str:
    return (
        f"accelerate was told to shard the model by {engine}, but cannot do so here: it shards models on GPUs and "
        "other accelerators only. Without them give ddp.yaml, which trains a whole model in each process, or shard "
        "the model by the recipe's 'distributed={fsdp_size: N}', which runs on CPUs too."
    )


def check_fsdp2(model: nn.Module) -> None:
    """Raise ValueError if accelerate's FSDP2 cannot shard this model under its settings.

    - With `fsdp_cpu_ram_efficient_loading`, accelerate expects every tensor of the state dict to be sharded. But FSDP2
      shards only parameters, and the biases of routers are buffers.
    - Without mixed precision, the parameters of a layer must have one dtype. A model in 16 bits has some in float32.
    """
    if not parse_flag_from_env("ACCELERATE_USE_FSDP") or os.environ.get("FSDP_VERSION", "1") == "1":
        return
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in model.parameters() if tensor.requires_grad})
    if len(dtypes) > 1 and os.environ.get("ACCELERATE_MIXED_PRECISION", "no") == "no":
        raise ValueError(
            f"FSDP2 without mixed precision cannot shard a model with parameters in {' and '.join(dtypes)}. Load it "
            "in float32 (`config.dtype=float32` in the recipe) with `mixed_precision: bf16` in accelerate's file, or "
            "shard the model by the recipe's `distributed`."
        )
    buffers = [name for name, _ in model.named_buffers() if name in model.state_dict()]
    if buffers and parse_flag_from_env("FSDP_CPU_RAM_EFFICIENT_LOADING"):
        raise ValueError(
            "FSDP2 cannot load this model with `fsdp_cpu_ram_efficient_loading: true`: its "
            f"{counted(len(buffers), 'saved buffer')}, such as `{buffers[0]}`, cannot be sharded. Set the flag to "
            "false in accelerate's file, or shard the model by the recipe's `distributed`."
        )


def shard_by_deepspeed_later() -> None:
    """Make models whole in each process, also where DeepSpeed ZeRO-3 will shard them when training begins.

    As soon as DeepSpeed's settings are known, `transformers` makes each tensor of any model in parts, also with
    `zero3_init_flag: false`. But a retrofit is computed from whole tensors, and parameters are counted on the meta
    device. Call it after each step that makes the settings known: `TrainingArguments` and `Trainer`.
    """
    unset_hf_deepspeed_config()


def load_sharded(
    source: str | None,
    sharding: DistributedConfig,
    start: Path,
    build: Callable[[], PreTrainedModel],
    auto_class: Any = AutoModelForCausalLM,
    **config: Any,
) -> PreTrainedModel:
    """Load a model of which each process has a part.

    Args:
        source: A directory or Hub id; `None` for a model that first has to be built.
        sharding: The sharding of the model among the processes.
        start: A temporary folder for the whole model, if the processes cannot load their parts from `source`.
        build: A function that builds the whole model for that folder; the first process calls it.
        auto_class: The Auto class of the model.
        config: Fields of the configuration to set in a model from `source`.

    Returns:
        The model, of which this process has its part.

    Raises:
        OSError, RuntimeError, ValueError: The model cannot be loaded or sharded.
    """
    if source is not None and not _joins_tensors(source, auto_class):
        model = load_whole(auto_class, source, starts_anew=True, distributed_config=sharding, **config)
        return sum_gradients_of_norms(model)
    state = PartialState()
    if state.is_main_process:
        shutil.rmtree(start, ignore_errors=True)
        build().save_pretrained(start, save_original_format=False)
    state.wait_for_everyone()
    try:
        # A saved configuration has all fields but this one, which is for loading.
        packed = {name: value for name, value in config.items() if name == "packed_experts"}
        model = auto_class.from_pretrained(start, distributed_config=sharding, trust_remote_code=False, **packed)
    finally:
        state.wait_for_everyone()
        if state.is_main_process:
            shutil.rmtree(start, ignore_errors=True)
    # `transformers` saves a model in the layout that it was loaded from. `start` is not in a published layout, but the
    # run's result must be.
    vars(model).pop("_weight_conversions", None)
    if source is not None:
        model.name_or_path = model.config.name_or_path = source  # by which the file of an adapter names its base
    return sum_gradients_of_norms(model)


def _joins_tensors(source: str, auto_class: Any) -> bool:
    """Return whether loading the model joins several tensors of its published layout to one.

    Such a layout cannot be sharded while it is loaded. `transformers` would join the parts that a process has of each
    tensor, and they are not the process's part of the joined tensor: Kimi Linear's convolutions would be scrambled.
    """
    # Here, since older versions of `transformers`, which shard no model, do not have this module.
    from transformers.distributed.checkpoint import is_sharded_checkpoint

    if is_sharded_checkpoint(source):
        return False
    config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    if isinstance(config, AttnResKimiK3Config):
        return False  # its class joins them before they are sharded, or stacks them along the axis that is sharded
    with torch.device("meta"):
        model = auto_class.from_config(config)
    return any(isinstance(rule, WeightConverter) for rule in get_model_conversion_mapping(model, add_legacy=False))


__all__ = [
    "allow_tensor_parallel_on_cpus",
    "check_engine",
    "check_fsdp2",
    "describe_sharding",
    "shard_by_deepspeed_later",
    "load_sharded",
    "make_sharding",
]
