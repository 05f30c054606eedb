"""A checkpoint directory read as a table of tensors: name, dtype, shape, file and place in it. No weight is loaded.

Weights are only ever read in pieces of `CHUNK` bytes, on their way to another file, and checked for NaN as they pass.
"""

import json
import os
import pickle
import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import BinaryIO

import torch
from huggingface_hub import parse_local_safetensors_file_metadata, snapshot_download
from huggingface_hub.utils import httpx
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from attnres.loading_attnres import explain_broken_shard

from .side_files import SIDE_FILES

CHUNK = 2**20  # stays in the cache between reading, checking and writing
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Entry:
    """One tensor: its bytes are `file[start:end]`; `dtype` by its name in safetensors, such as `"BF16"`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Shard:
    """One safetensors file; `entries` in the order of their bytes, which begin at `data_start`."""

    path: Path
    entries: tuple[Entry, ...]
    data_start: int
    metadata: dict[str, str]


@dataclass(frozen=True)
class Checkpoint:
    """The shards of a checkpoint, and for each tensor the one that holds it."""

    folder: Path
    shards: tuple[Shard, ...]
    where: dict[str, Shard]
    is_temporary: bool = False  # its files are rewritten pickles, and nobody else's

    @property
    def entries(self) -> dict[str, Entry]:
        """The tensors by name. What a file holds beside those of the index is copied with it, and ignored otherwise."""
        return {e.name: e for shard in self.shards for e in shard.entries if self.where.get(e.name) is shard}

    @property
    def num_bytes(self) -> int:
        return sum(shard.path.stat().st_size for shard in self.shards)

    def file_of(self, name: str) -> Path:
        """The file of a tensor, or of its nearest relation: a model may have merged or renamed what a file holds."""

        def shared_parts(other: str) -> int:
            pairs = zip(name.split("."), other.split("."))
            return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

        return self.where[name if name in self.where else max(self.where, key=shared_parts)].path


def find(source: str | os.PathLike, revision: str | None = None) -> Path:
    """The local directory of a model: `source` itself, or a snapshot of the Hub's repository of that name.

    Raises:
        FileNotFoundError: it is neither, or the Hub cannot be reached.
        ValueError: a `revision` of a directory.
    """
    folder = Path(source)
    if folder.is_dir():
        if revision is not None:
            raise ValueError(f"{source} is a directory, which has no revisions. Leave out --revision.")
        return folder
    if folder.exists() or folder.is_absolute() or str(source).startswith(".") or len(folder.parts) > 2:
        raise FileNotFoundError(f"{source} is not a directory.")
    small = ["config.json", "*.py", *SIDE_FILES]
    try:
        folder = Path(snapshot_download(str(source), revision=revision, allow_patterns=[*small, "model*.safetensors*"]))
        if not any(folder.glob("model*.safetensors")):
            snapshot_download(str(source), revision=revision, allow_patterns=["pytorch_model*.bin*"])
    except (OSError, httpx.HTTPError) as error:  # a connection that breaks is no `OSError`
        reason = " ".join(str(error).split())  # the first line alone may be "404 Client Error."
        raise FileNotFoundError(f"{source} is not a directory, and the Hub does not give it: {reason}") from error
    return folder


def open_checkpoint(folder: Path, scratch: Path) -> Checkpoint:
    """Read the headers of a directory's weights, safetensors if there are any.

    Legacy `pytorch_model.bin` files are rewritten as safetensors in `scratch` first, without running code from them.

    Raises:
        FileNotFoundError: no weights, or a file or a tensor that the index names is not there.
        OSError: a file is truncated or damaged.
        ValueError: a pickle that needs code to be loaded.
    """
    for single, index in ((SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME), (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)):
        if (folder / single).exists():
            files, weight_map = [single], None
        elif (folder / index).exists():
            weight_map = _read_index(folder / index)
            files = sorted(set(weight_map.values()))
        else:
            continue
        for file in files:
            if Path(file).name != file:
                raise ValueError(f"{folder / index} names {file}, which does not lie beside it. Move it there.")
            if not (folder / file).exists():
                raise FileNotFoundError(f"{folder} is incomplete: {index} names {file}, which is not there.")
        if single == WEIGHTS_NAME:
            check_space(scratch, sum((folder / file).stat().st_size for file in files))
            names = [f"{Path(file).stem.removeprefix('pytorch_')}.safetensors" for file in files]
            shards = [_read_pickle(folder / file, scratch / name) for file, name in zip(files, names)]
            return _checkpoint(folder, shards, None, is_temporary=True)
        with explain_broken_shard(folder):
            shards = [read_shard(folder / file) for file in files]
        return _checkpoint(folder, shards, weight_map)
    raise FileNotFoundError(f"{folder} has no weights: neither {SAFE_WEIGHTS_NAME} nor {WEIGHTS_NAME}, nor an index.")


def read_shard(path: Path) -> Shard:
    """Read the header of a safetensors file.

    Raises:
        SafetensorError: the file is truncated or damaged.
    """
    with safe_open(path, framework="pt"):
        pass  # holds the header against the length of the file
    header = parse_local_safetensors_file_metadata(path)
    size = sum(info.data_offsets[1] - info.data_offsets[0] for info in header.tensors.values())
    data_start = path.stat().st_size - size
    entries = [
        Entry(name, info.dtype, tuple(info.shape), *(data_start + offset for offset in info.data_offsets))
        for name, info in header.tensors.items()
    ]
    return Shard(path, tuple(sorted(entries, key=lambda entry: (entry.start, entry.end))), data_start, header.metadata)


def copy_shard(
    shard: Shard,
    target: Path | None,
    *,
    dropped: Collection[str] = (),
    unused: Collection[str] = (),
    on_bytes: Callable[[int], None] = lambda n: None,
) -> None:
    """Copy a shard byte for byte, or without the tensors that are `dropped`; to no `target`, only check it.

    Raises:
        ValueError: a tensor holds NaN or infinite values, and is not `unused` by the model.
        OSError: the shard ends early, or the target cannot be written.
    """
    kept = [entry for entry in shard.entries if entry.name not in dropped]
    with open(shard.path, "rb") as source, open(target or os.devnull, "wb") as sink:
        if len(kept) == len(shard.entries):
            sink.write(source.read(shard.data_start))
        else:
            _write_header(sink, kept, shard.metadata)
        for entry in kept:
            for chunk in _read(source, entry, shard.path):
                if entry.name not in unused:
                    _check_finite(chunk, entry, shard.path)
                sink.write(chunk)
                on_bytes(len(chunk))


def check_space(folder: Path, needed: int) -> None:
    """Raises OSError if the file system of `folder` has less than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        message = (
            f"not enough space in {folder.parent}: {needed / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free."
        )
        raise OSError(message)


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        return {str(name): os.fspath(file) for name, file in weight_map.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise OSError(f"{path} is not an index of weights ({error!r}). Copy it again.") from error


def _checkpoint(
    folder: Path, shards: list[Shard], weight_map: dict[str, str] | None, is_temporary: bool = False
) -> Checkpoint:
    by_file = {shard.path.name: shard for shard in shards}
    held = {(shard.path.name, entry.name) for shard in shards for entry in shard.entries}
    if weight_map is None:
        weight_map = {name: file for file, name in sorted(held)}
    for name, file in weight_map.items():
        if (file, name) not in held:
            raise FileNotFoundError(f"{folder} is incomplete: {file} lacks `{name}`, which the index says it holds.")
    return Checkpoint(folder, tuple(shards), {name: by_file[file] for name, file in weight_map.items()}, is_temporary)


def _read_pickle(path: Path, target: Path) -> Shard:
    """Rewrite a `pytorch_model.bin` as safetensors; its tensors are mapped into memory, not read."""
    try:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):  # written by a PyTorch before 1.6
                raise
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle fails in any way
        if isinstance(error, pickle.UnpicklingError) and "Unsupported operand" not in str(error):
            raise ValueError(f"{path} needs code to be loaded, which may do anything: it is refused.") from error
        reason = str(error).strip() or type(error).__name__
        if isinstance(error, pickle.UnpicklingError):
            reason = "it is not a pickle"
        raise OSError(f"{path} is truncated or damaged ({reason}). Copy it again.") from error
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise ValueError(f"{path} is not a dictionary of tensors.")
    # Tied tensors share their memory, which safetensors does not write: the first name keeps it.
    first = {(t.data_ptr(), t.shape, t.stride()): name for name, t in reversed(state.items())}
    save_file({name: state[name].contiguous() for name in first.values()}, target, {"format": "pt"})
    return read_shard(target)


def _read(source: BinaryIO, entry: Entry, path: Path) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(CHUNK, entry.end - entry.start)))
    source.seek(entry.start)
    left = entry.end - entry.start
    while left:
        chunk = buffer[: min(CHUNK, left)]
        if source.readinto(chunk) < len(chunk):
            raise OSError(f"{path} ends within `{entry.name}`. Copy it again.")
        left -= len(chunk)
        yield chunk


def _write_header(sink: BinaryIO, entries: list[Entry], metadata: dict[str, str]) -> None:
    """The header of a safetensors file that holds these tensors one after the other."""
    header, offset = {"__metadata__": metadata}, 0
    for entry in entries:
        size = entry.end - entry.start
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the data
    sink.write(len(text).to_bytes(8, "little") + text)


def _check_finite(chunk: memoryview, entry: Entry, path: Path) -> None:
    dtype = DTYPES.get(entry.dtype)
    if dtype is None or not dtype.is_floating_point:
        return
    values = torch.frombuffer(chunk, dtype=dtype)
    if dtype.itemsize == 1:
        values = values.float()
    # One pass; both are NaN if any value is.
    low, high = values.aminmax()
    if not (torch.isfinite(low) and torch.isfinite(high)):
        raise ValueError(f"`{entry.name}` in {path} holds NaN or infinite values. Use an earlier checkpoint.")


__all__ = [
    "DTYPES",
    "Checkpoint",
    "Entry",
    "Shard",
    "copy_shard",
    "find",
    "open_checkpoint",
    "read_shard",
]
