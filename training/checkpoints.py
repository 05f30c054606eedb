"""Exact resuming: a check that a checkpoint is complete, and a `Trainer` that makes no step too many.

`transformers` resumes from an incomplete checkpoint without an error, with a new optimizer or other random numbers.
"""

import json
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import Trainer, TrainerState
from transformers.trainer import (
    OPTIMIZER_NAME,
    SCHEDULER_NAME,
    TRAINER_STATE_NAME,
)
from transformers.trainer_pt_utils import safe_globals
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

_RANDOM = "rng_state"


def check_checkpoint(folder: Path) -> None:
    """Check every file of a checkpoint.

    Files of `torch.save` have checksums, which are checked. Weights have none: only their length is checked, and that
    they are not all zero.

    Raises:
        ValueError: A file is missing, empty, cut off or broken.
    """
    # Broken files first, since `_missing` reads the index of the shards.
    problem = next(filter(None, map(_broken, sorted(folder.rglob("*")))), None) or _missing(folder)
    if problem:
        raise ValueError(
            f"{problem}, so the run cannot resume from {folder}. Put the file back, or remove that folder to resume "
            "from the checkpoint before it, or from the start if there is none."
        )


def _missing(folder: Path) -> str | None:
    """Return a message that names a missing file of a checkpoint; `None` if no file is missing."""
    names = {path.name for path in folder.iterdir()}
    for name in (TRAINER_STATE_NAME, SCHEDULER_NAME):
        if name not in names:
            return f"{folder / name} is missing"
    # Engines that divide a model use other names: `optimizer_0`, `pytorch_model_fsdp_0`, DeepSpeed's `global_step9`.
    for usual, prefixes in (
        (OPTIMIZER_NAME, ("optimizer", "global_step")),
        (SAFE_WEIGHTS_NAME, ("model", "adapter_model", "pytorch_model", "shard-", "global_step")),
    ):
        if not any(name.startswith(prefixes) for name in names):
            return f"{folder / usual} is missing"
    if SAFE_WEIGHTS_INDEX_NAME in names:
        shards = json.loads((folder / SAFE_WEIGHTS_INDEX_NAME).read_text(encoding="utf-8"))["weight_map"].values()
        if missing := sorted({*shards} - names):
            return f"{folder / missing[0]} is missing"
    # One file for a run of one process; else one for each process, by its number.
    states = [name for name in names if name.startswith(_RANDOM)]
    expected = [f"{_RANDOM}_{number}.pth" for number in range(len(states))]
    if states != [f"{_RANDOM}.pth"] and (not states or sorted(states) != sorted(expected)):
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
    except (EOFError, NotImplementedError, OSError, RuntimeError, ValueError, zipfile.BadZipFile):
        return f"{path} is broken or cut off"
    if damaged is not None:
        return f"{path} is broken (its part {damaged} is damaged)"
    # Loaded as `transformers` does: `weights_only` runs no code, and `mmap` leaves the tensors on the disk.
    if path.name.startswith((OPTIMIZER_NAME, SCHEDULER_NAME, _RANDOM)):
        try:
            with safe_globals():
                torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (EOFError, KeyError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError):
            return f"{path} is broken (it does not hold what training writes there)"
    return None


class ResumableTrainer(Trainer):
    """A `Trainer` whose `train(resume_from_checkpoint=...)` ends at once if all steps have been made.

    `Trainer` checks whether training is over only after a step. Resumed from its last checkpoint it makes one more,
    which changes the weights, and the checkpoint of that step replaces an older one.
    """

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, torch.Tensor | int | None]:
        """Return the micro-batches of a step, as `Trainer` calls it; none if all steps have been made."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return [], None
        return super().get_batch_samples(epoch_iterator, num_batches, device)


__all__ = ["ResumableTrainer", "check_checkpoint"]
