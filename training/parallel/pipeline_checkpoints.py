"""Checkpoints of a pipeline: one model directory, to which each process writes its layers, and which any number reads.

No process gathers the model. The files have the names of a sharded checkpoint of `transformers`, with one index, so the
folder loads like any other. The optimizer's state is stored by the names of tensors, so a run can resume with another
number of stages.
"""

import json
import random
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from transformers.core_model_loading import revert_weight_conversion
from transformers.trainer_pt_utils import safe_globals
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..resuming import cannot_resume, check_size
from .pipeline import TrainingPipeline

LARGEST_FILE = 5 * 10**9  # bytes


def save_parts(pipeline: TrainingPipeline, folder: Path, is_checkpoint: bool) -> None:
    """Write the model into a folder, each process its part. All processes call it together.

    Args:
        pipeline: The part of this process.
        folder: The folder.
        is_checkpoint: Whether to write the model's own names of tensors, as resuming reads them, and not the published
            layout.

    Raises:
        OSError, SafetensorError: A file cannot be written.
    """
    # With FSDP2, all pipelines take part in gathering a tensor, but only the first writes it.
    tensors = _whole_tensors(pipeline)
    if pipeline.replica == 0:
        if pipeline.stage == 0:
            # This writes configuration and code too, and replaces an older model in the folder.
            pipeline.model.save_pretrained(
                folder, state_dict=tensors, save_original_format=not is_checkpoint, max_shard_size=LARGEST_FILE
            )
            for number, path in enumerate(sorted(folder.glob("*.safetensors"))):
                path.rename(folder / _part(0, number))
            (folder / SAFE_WEIGHTS_INDEX_NAME).unlink(missing_ok=True)
        dist.barrier(pipeline.group)
        if pipeline.stage > 0:
            # `save_pretrained` writes on the first process only.
            if not is_checkpoint:
                tensors = revert_weight_conversion(pipeline.model, tensors)
            files = split_torch_state_dict_into_shards(tensors, max_shard_size=LARGEST_FILE).filename_to_tensors
            for number, names in enumerate(files.values()):
                part = {name: tensors[name].contiguous() for name in names}
                save_file(part, folder / _part(pipeline.stage, number), metadata={"format": "pt"})
        _name_parts(pipeline, folder)
    dist.barrier()


def save_adapter(pipeline: TrainingPipeline, folder: Path) -> None:
    """Write the adapter into a folder, in PEFT's format. All processes call it together, and the first one writes it.

    Args:
        pipeline: The part of this process, whose model has adapters.
        folder: The folder, which all processes see.

    Raises:
        OSError, SafetensorError: A file cannot be written.
    """
    from peft import get_peft_model_state_dict  # here, since `peft` comes with an extra

    if pipeline.replica == 0:
        tensors = {name: tensor.contiguous() for name, tensor in get_peft_model_state_dict(pipeline.adapted).items()}
        if pipeline.stage > 0:
            save_file(tensors, folder / _part(pipeline.stage, 0))
        dist.barrier(pipeline.group)
        if pipeline.stage == 0:
            pipeline.adapted.save_pretrained(folder)  # with the configuration
            for path in sorted(folder.glob(".part-*.safetensors")):
                tensors |= load_file(path)
                path.unlink()
            save_file(tensors, folder / ADAPTER_SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
    dist.barrier()


def load_adapter_part(pipeline: TrainingPipeline, folder: Path) -> None:
    """Read the adapters of this process's layers from a checkpoint.

    Args:
        pipeline: The part of this process, whose model has adapters.
        folder: A folder that [`save_adapter`] has written.

    Raises:
        OSError, SafetensorError: The file cannot be read.
        ValueError: The checkpoint lacks a tensor.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    path = folder / ADAPTER_SAFE_WEIGHTS_NAME
    names = get_peft_model_state_dict(pipeline.adapted).keys()
    with safe_open(path, "pt") as file:
        if missing := sorted(names - {*file.keys()}):
            raise cannot_resume(f"{path} lacks {missing[0]}", folder)
        set_peft_model_state_dict(pipeline.adapted, {name: file.get_tensor(name) for name in names})


def _part(stage: int, number: int) -> str:
    """Return the name of a file before the number of all files is known."""
    return f".part-{stage:05d}-{number:05d}.safetensors"


def _whole_tensors(pipeline: TrainingPipeline) -> dict[str, Tensor]:
    """Return the tensors of this process by name, without the copy of a tied embedding, which the first one writes."""
    model, tensors = pipeline.model, {}
    ignored = set(model._keys_to_ignore_on_save or ())
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in ignored or (pipeline.stage > 0 and tensor is pipeline.tied):
            continue
        tensor = tensor.detach()
        tensors[name] = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensors


def _name_parts(pipeline: TrainingPipeline, folder: Path) -> None:
    """Give the files of all processes their numbers, and write the index."""
    mine = {}
    for path in sorted(folder.glob(f".part-{pipeline.stage:05d}-*.safetensors")):
        with safe_open(path, "pt") as file:
            mine[path.name] = [*file.keys()], path.stat().st_size
    gathered: list = [None] * pipeline.settings.stages
    dist.all_gather_object(gathered, mine, group=pipeline.group)
    parts = [(name, *rest) for one in gathered for name, rest in one.items()]
    weight_map, size = {}, 0
    for number, (part, names, num_bytes) in enumerate(parts, start=1):
        name = SAFE_WEIGHTS_NAME.replace(".safetensors", f"-{number:05d}-of-{len(parts):05d}.safetensors")
        weight_map |= dict.fromkeys(names, name)
        size += num_bytes
        if part in mine:
            (folder / part).rename(folder / name)
    if pipeline.stage == 0:
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


@torch.no_grad()
def load_part(pipeline: TrainingPipeline, folder: Path) -> None:
    """Read the tensors of this process from a checkpoint, whatever number of processes has written it.

    Args:
        pipeline: The part of this process.
        folder: A folder that [`save_parts`] has written with `is_checkpoint`.

    Raises:
        OSError, SafetensorError: A file cannot be read.
        ValueError: The checkpoint lacks a tensor, or has one of another size.
    """
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    by_file: dict[str, list[tuple[str, Tensor]]] = {}
    for name, tensor in pipeline.model.state_dict(keep_vars=True).items():
        stored = pipeline.embedding_name if tensor is pipeline.tied else name
        if stored not in weight_map:
            raise cannot_resume(f"{index} lacks {stored}", folder)
        by_file.setdefault(weight_map[stored], []).append((stored, tensor.detach()))
    for file_name, wanted in by_file.items():
        with safe_open(folder / file_name, "pt") as file:
            for name, tensor in wanted:
                value = file.get_tensor(name)
                check_size(name, tensor, value.shape, folder / file_name)
                if isinstance(tensor, DTensor):
                    # Each process of a stage reads the tensor, and keeps its part.
                    value = DTensor.from_local(value.to(tensor.device), tensor.device_mesh, run_check=False)
                    value = value.redistribute(placements=tensor.placements)
                tensor.copy_(value)


def load_schedule(scheduler: LambdaLR, path: Path) -> None:
    """Continue a schedule at the step of a checkpoint.

    The rates of its groups come from this run: with another number of stages, a process has other groups of parameters.

    Args:
        scheduler: The schedule.
        path: The file with its state.
    """
    state = torch.load(path, weights_only=True)
    # The functions of the groups stay.
    scheduler.load_state_dict({name: state[name] for name in ("last_epoch", "_step_count")} | {"lr_lambdas": []})
    scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]


def load_random_state(path: Path) -> None:
    """Set the random numbers of the CPU as the first process had them, for a process that the checkpoint did not have.

    Args:
        path: The file of the first process.
    """
    with safe_globals():
        state = torch.load(path, weights_only=True)
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.random.set_rng_state(state["cpu"])


__all__ = ["load_adapter_part", "load_part", "load_random_state", "load_schedule", "save_adapter", "save_parts"]
