"""What a checkpoint must satisfy to become a model of the family, with errors that name the tensor or the file."""

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.integrations.accelerate import load_offloaded_parameter


def check_added(model: nn.Module, added: dict, missing: Collection[str], source: str | os.PathLike) -> None:
    """Raises ValueError: some tensors `added` to a backbone are missing and others are not, or not finite."""
    absent = sorted(set(added) & set(missing))
    if absent and len(absent) < len(added):
        raise ValueError(
            f"{source} holds {len(added) - len(absent)} of the {len(added)} tensors added to its backbone; missing: "
            f"{', '.join(absent)}. Restore them, or remove all to start anew."
        )
    for name, tensor in added.items():
        if tensor.is_meta and hasattr(model, "hf_device_map"):  # offloaded
            shape, tensor = tensor.shape, load_offloaded_parameter(model, name)
            if tensor.shape != shape:
                check_shapes([(name, tensor.shape, shape)], source)
        if not tensor.is_meta and not torch.isfinite(tensor).all():
            raise ValueError(f"{source}: `{name}` holds NaN or infinite values. Use an earlier checkpoint.")


def check_shapes(mismatched: Collection[tuple[str, Sequence[int], Sequence[int]]], source: str | os.PathLike) -> None:
    """Raises RuntimeError: tensors (name, shape in the checkpoint, in the model) mismatch."""
    tensors = [f"`{name}` has shape {list(has)}, but must be {list(must)}" for name, has, must in sorted(mismatched)]
    if tensors:
        raise RuntimeError(f"{source}: {'; '.join(tensors)}. Use the checkpoint's own config.json.")


@contextmanager
def explain_broken_shard(source: str | os.PathLike, subfolder: str = "") -> Iterator[None]:
    """Turn a safetensors error, which names no file, into an OSError that names one in the folder `source`."""
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
