"""What a checkpoint must satisfy to become an AttnRes model, with errors that name the tensor or the file."""

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.integrations.accelerate import load_offloaded_parameter

from .residual_attnres import ResidualConnection, ResidualNorm


def attn_res_tensors(model: nn.Module) -> dict[str, nn.Parameter]:
    """The tensors that the residual connections add to a backbone, by name: pseudo-queries and key-norm weights."""
    return {
        f"{module_name}.{name}": parameter
        for module_name, module in model.named_modules()
        if isinstance(module, (ResidualConnection, ResidualNorm))
        for name, parameter in module.named_parameters(recurse=False)
    }


def check_attn_res_tensors(model: nn.Module, missing: Collection[str], source: str | os.PathLike) -> None:
    """Check the AttnRes tensors that were loaded from `source`; `missing` are the tensors it did not hold.

    All of them missing is a backbone's checkpoint: they are initialised, and `transformers` reports them as new.

    Raises:
        ValueError: some are missing and others are not, or one holds NaN or infinity.
        RuntimeError: one that is offloaded to disk has another shape than the model's.
    """
    tensors = attn_res_tensors(model)
    absent = sorted(set(tensors) & set(missing))
    if absent and len(absent) < len(tensors):
        raise ValueError(
            f"{source} holds {len(tensors) - len(absent)} of the {len(tensors)} AttnRes tensors of its configuration; "
            f"missing: {', '.join(absent)}. Restore them, or remove all AttnRes tensors to start from initial ones."
        )
    for name, tensor in tensors.items():
        if tensor.is_meta and hasattr(model, "hf_device_map"):  # offloaded
            shape, tensor = tensor.shape, load_offloaded_parameter(model, name)
            if tensor.shape != shape:
                check_shapes([(name, tensor.shape, shape)], source)
        if not tensor.is_meta and not torch.isfinite(tensor).all():
            raise ValueError(f"{source}: `{name}` holds NaN or infinite values. Use an earlier checkpoint.")


def check_shapes(mismatched: Collection[tuple[str, Sequence[int], Sequence[int]]], source: str | os.PathLike) -> None:
    """Check that no tensor was `mismatched`: its name, its shape in the checkpoint `source`, and that in the model.

    Raises:
        RuntimeError: naming each of them, the type that `transformers` raises for it.
    """
    if mismatched:
        tensors = (
            f"`{name}` has shape {list(found)}, but must be {list(shape)}" for name, found, shape in sorted(mismatched)
        )
        raise RuntimeError(f"{source}: {'; '.join(tensors)}. Use the checkpoint's own config.json.")


@contextmanager
def explain_broken_shard(source: str | os.PathLike, subfolder: str = "") -> Iterator[None]:
    """Turn a safetensors error, which names no file, into one that names the file.

    Raises:
        OSError: a safetensors file in `subfolder` of the directory `source` cannot be read.
    """
    try:
        yield
    except SafetensorError as error:
        for path in sorted(Path(source, subfolder).glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt"):
                    pass
            except SafetensorError as shard_error:
                raise OSError(f"{path} is truncated or damaged ({shard_error}). Copy it again.") from error
        raise


__all__ = ["attn_res_tensors", "check_attn_res_tensors", "check_shapes", "explain_broken_shard"]
