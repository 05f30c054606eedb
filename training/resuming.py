"""Check that a checkpoint is complete before a run resumes from it.

`transformers` resumes from an incomplete checkpoint without an error, with a new optimizer or other random numbers.
"""

import io
import json
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Sequence, Set
from itertools import groupby
from pathlib import Path, PurePath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.serialization import _get_layout as get_layout
from transformers import PreTrainedModel, TrainerState
from transformers.trainer import (
    OPTIMIZER_NAME,
    SCHEDULER_NAME,
    TRAINER_STATE_NAME,
)
from transformers.trainer_pt_utils import safe_globals
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

_RANDOM = "rng_state"
_METADATA = ".metadata"  # the table of contents of a folder of parts
_SHARDED = ("optimizer", "pytorch_model_fsdp")  # folders of parts, of `transformers` and of accelerate's FSDP
# File of `torch.save` -> the keys of its content.
_KEYS = {
    OPTIMIZER_NAME: {"state", "param_groups"},
    SCHEDULER_NAME: {"last_epoch", "_step_count"},
    _RANDOM: {"python", "numpy", "cpu"},
}
_SHARD = re.compile(r"(?:pytorch_)?model-\d+-of-\d+\.safetensors")
_SHARDED_WEIGHTS = re.compile(r"shard-(\d+)-model-\d+-of-\d+\.safetensors$")
# Files that each process writes, by its number: the parts of a sharded optimizer.
_OF_PROCESS = re.compile(r"__(\d+)_\d+\.distcp$")
_BROKEN_ARCHIVE = (EOFError, NotImplementedError, OSError, RuntimeError, ValueError, zipfile.BadZipFile)


def check_checkpoint(folder: Path) -> None:
    """Check every file of a checkpoint that resuming reads.

    Files of `torch.save`, and the parts of a sharded optimizer, have checksums, which are checked. Weights have none:
    only their length is checked, that they are not all zero, and that the index names the file of each tensor.

    Raises:
        ValueError: A file is missing, empty, cut off or broken, or does not hold what training writes there.
    """
    # Broken files first, since `_missing` reads the index of the shards.
    problem = next(filter(None, map(_broken, sorted(folder.rglob("*")))), None) or _missing(folder)
    if problem:
        raise cannot_resume(problem, folder)


def cannot_resume(problem: str, folder: Path) -> ValueError:
    """Return the error for a checkpoint from which a run cannot resume.

    Args:
        problem: A clause that names the file and says what is wrong with it.
        folder: The checkpoint.
    """
    return ValueError(
        f"{problem}, so the run cannot resume from {folder}. Put the file back, or remove that folder to resume from "
        "the checkpoint before it, or from the start if there is none."
    )


def cannot_resume_note(folder: Path) -> str:
    """Return the remedy for an error of reading a checkpoint."""
    return (
        f"The run cannot resume from {folder}: remove that folder to resume from the checkpoint before it, or from the "
        "start if there is none."
    )


def check_best(folder: Path) -> None:
    """Check that the best checkpoint, with which a resumed run may end, is there.

    Args:
        folder: The checkpoint that the run resumes from, beside the best one.

    Raises:
        ValueError: The best checkpoint is missing, or one of its files is missing or broken.
    """
    step = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME)).best_global_step
    if step:
        best = folder.with_name(f"{PREFIX_CHECKPOINT_DIR}-{step}")
        if not best.is_dir():
            raise ValueError(
                f"{best} is missing, which has the lowest held-out loss so far. `trainer.load_best_model_at_end` needs "
                "it: put it back, or choose another `out`."
            )
        if best != folder:
            check_checkpoint(best)


def _missing(folder: Path) -> str | None:
    """Return a message that names a missing file of a checkpoint; `None` if no file is missing."""
    names = {path.name for path in folder.iterdir()}
    for name in (TRAINER_STATE_NAME, SCHEDULER_NAME):
        if name not in names:
            return f"{folder / name} is missing"
    # Engines that shard a model use other names: `optimizer_0`, `pytorch_model_fsdp_0`, DeepSpeed's `global_step9`.
    for usual, prefixes in (
        (OPTIMIZER_NAME, ("optimizer", "global_step")),
        (SAFE_WEIGHTS_NAME, ("model", "adapter_model", "pytorch_model", "shard-", "global_step")),
    ):
        if not any(name.startswith(prefixes) for name in names):
            return f"{folder / usual} is missing"
    return _missing_shard(folder, names) or _missing_part(folder) or _missing_random_state(folder, names)


def _missing_shard(folder: Path, names: Set[str]) -> str | None:
    """Return a message about weights in several files that are not those of the index, else `None`."""
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if parts := [match for name in names if (match := _SHARDED_WEIGHTS.match(name))]:
        # Each process writes one, and its random numbers.
        count = max(len(parts), sum(name.startswith(_RANDOM) for name in names))
        numbers = {int(match[1]) for match in parts}
        if absent := sorted({*range(1, count + 1)} - numbers):
            return f"{folder}/shard-{absent[0]:05d}-model-*.safetensors is missing"
    if not index.exists():
        if any(_SHARD.fullmatch(name) for name in names):
            return f"{index} is missing"
        return None
    content = json.loads(index.read_text(encoding="utf-8"))
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        return f"{index} is broken (it has no `weight_map` of files)"
    if missing := sorted({*weight_map.values()} - names):
        return f"{folder / missing[0]} is missing"
    stored: dict[str, str] = {}
    for name in sorted({*weight_map.values()} | {name for name in names if _SHARD.fullmatch(name)}):
        with safe_open(folder / name, "pt") as weights:
            stored |= dict.fromkeys(weights.keys(), name)
    for tensor in sorted({*stored, *weight_map}):
        if stored.get(tensor) != weight_map.get(tensor):
            return f"{index} is broken (it has {tensor} in {weight_map.get(tensor)}, not in {stored.get(tensor)})"
    return None


def _missing_part(folder: Path) -> str | None:
    """Return a message about an optimizer or weights in parts, of which one is missing or broken; else `None`."""
    for sharded in sorted(path for path in folder.iterdir() if path.is_dir() and path.name.startswith(_SHARDED)):
        metadata = sharded / _METADATA
        if not metadata.exists():
            return f"{metadata} is missing"
        try:
            with metadata.open("rb") as file:
                parts = _MetadataUnpickler(file).load().storage_data.values()
                places = sorted({(part.relative_path, part.offset, part.length) for part in parts})
        except (AttributeError, EOFError, KeyError, ImportError, IndexError, TypeError, ValueError) as error:
            return f"{metadata} is broken ({' '.join(str(error).split())})"
        except pickle.UnpicklingError:
            return f"{metadata} is broken (it does not hold what training writes there)"
        for name, group in groupby(places, key=lambda place: place[0]):
            if problem := _broken_part(sharded / name, [place[1:] for place in group]):
                return problem
    return None


def _broken_part(path: Path, places: Sequence[tuple[int, int]]) -> str | None:
    """Return a message if a file lacks a tensor at one of the places, (offset, length), or it is damaged."""
    if not path.exists():
        return f"{path} is missing"
    with path.open("rb") as file:
        for offset, length in places:
            file.seek(offset)
            content = file.read(length)
            try:
                with zipfile.ZipFile(io.BytesIO(content)) as archive:  # of `torch.save`
                    is_damaged = archive.testzip() is not None
            except _BROKEN_ARCHIVE:
                is_damaged = True
            if is_damaged or len(content) < length:
                return f"{path} is broken or cut off (its part of {length} bytes at {offset})"
    return None


class _MetadataUnpickler(pickle.Unpickler):
    """Read the table of contents of a folder of parts, and run no code that a strange file may name."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of the table of contents, a dtype, or a path. Raise UnpicklingError for any other object."""
        value = super().find_class(module, name)
        is_known = isinstance(value, type) and (
            value.__module__.startswith("torch.distributed.checkpoint.") or issubclass(value, PurePath)
        )
        if is_known or value in (torch.Size, get_layout, OrderedDict) or isinstance(value, torch.dtype):
            return value
        raise pickle.UnpicklingError(f"{module}.{name}")


def _missing_random_state(folder: Path, names: Set[str]) -> str | None:
    """Return a message if the random numbers of a process are missing, else `None`."""
    # One file for a run of one process; else one for each process, by its number.
    states = [name for name in names if name.startswith(_RANDOM)]
    if states == [f"{_RANDOM}.pth"]:
        return None
    # The parts of an optimizer have the number of their process too.
    numbers = [int(match[1]) for path in folder.rglob("*") if (match := _OF_PROCESS.match(path.name))]
    count = max([1, len(states) - 1, *numbers]) + 1
    expected = [f"{_RANDOM}_{number}.pth" for number in range(count if states else 0)]
    if not states or sorted(states) != sorted(expected):
        missing = next((name for name in expected if name not in states), f"{_RANDOM}.pth")
        return f"{folder / missing} is missing"
    return None


def _broken(path: Path) -> str | None:
    """Return a message about a broken file of a checkpoint; `None` if the file is whole."""
    if not path.is_file():
        return None
    if not path.stat().st_size:
        return f"{path} is empty"
    try:
        if path.name == TRAINER_STATE_NAME:
            return _wrong_state(path)
        if path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
        elif path.suffix == ".safetensors":
            # Opening compares the length with the header.
            with safe_open(path, "pt") as weights:
                # A machine that loses its power may leave zeros. The search ends at the first tensor with other values.
                tensors = map(weights.get_tensor, weights.offset_keys())
                if not any(tensor.flatten().view(torch.uint8).any() for tensor in tensors):
                    return f"{path} is broken (it holds nothing but zeros)"
        elif path.suffix in (".pt", ".pth"):
            return _wrong_archive(path)
    except (SafetensorError, ValueError) as error:
        return f"{path} is broken ({error})"
    return None


def _wrong_state(path: Path) -> str | None:
    """Return a message if the state of the `Trainer` is broken, else `None`."""
    try:
        steps = TrainerState.load_from_json(str(path)).global_step
    except TypeError:  # not a mapping, or one with other keys
        steps = None
    is_valid = isinstance(steps, int) and steps > 0
    return None if is_valid else f"{path} is broken (its `global_step` is not a positive number)"


def _wrong_archive(path: Path) -> str | None:
    """Return a message if a file of `torch.save`, which is a ZIP archive, is broken, else `None`."""
    try:
        # The table of contents stands at the end, so a file that is cut off does not open.
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except _BROKEN_ARCHIVE:
        return f"{path} is broken or cut off"
    if damaged is not None:
        return f"{path} is broken (its part {damaged} is damaged)"
    # Loaded as `transformers` does: `weights_only` runs no code, and `mmap` leaves the tensors on the disk.
    needed = next((keys for prefix, keys in _KEYS.items() if path.name.startswith(prefix)), None)
    if needed is not None:
        try:
            with safe_globals():
                content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (EOFError, KeyError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError):
            content = None
        if not isinstance(content, dict) or not content.keys() >= needed:
            return f"{path} is broken (it does not hold what training writes there)"
    return None


def check_weights(model: PreTrainedModel, folder: Path) -> None:
    """Check that the weights of a checkpoint are those of a model, by names and sizes.

    `Trainer` keeps the tensors that it began with where the checkpoint has none.

    Args:
        model: The model, whole.
        folder: The checkpoint, with files of weights that [`check_checkpoint`] has accepted.

    Raises:
        ValueError: A tensor is missing, or has another size.
    """
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    files = [folder / SAFE_WEIGHTS_NAME]
    if index.exists():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = [folder / name for name in sorted({*weight_map.values()})]
    stored: dict[str, tuple[Path, list[int]]] = {}
    for path in files:
        with safe_open(path, "pt") as weights:
            stored |= {name: (path, weights.get_slice(name).get_shape()) for name in [*weights.keys()]}
    absent = {*model.all_tied_weights_keys, *(model._keys_to_ignore_on_save or ())}
    for name, tensor in model.state_dict().items():
        if name in stored:
            check_size(name, tensor, stored[name][1], stored[name][0])
        elif name not in absent:
            raise cannot_resume(f"{index if index.exists() else files[0]} lacks {name}", folder)


def check_size(name: str, tensor: Tensor, size: Sequence[int], path: Path) -> None:
    """Raise ValueError if a tensor of the model has another size than in a file of a checkpoint."""
    if [*tensor.shape] != [*size]:
        raise cannot_resume(f"{path} has {name} of size {[*size]}, but the model has {[*tensor.shape]}", path.parent)


__all__ = [
    "cannot_resume",
    "check_best",
    "check_checkpoint",
    "check_size",
    "check_weights",
]
