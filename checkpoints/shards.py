"""One safetensors file: read the table of its tensors, and copy it byte for byte.

Weights are read only to copy them, in pieces of `CHUNK` bytes. Each piece is checked for NaN on the way.
"""

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from attnres.utils.errors import about

CHUNK = 2**20  # bytes; a piece of this size stays in the processor's cache between reading, checking and writing
# Names of dtypes in safetensors files.
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
class StoredTensor:
    """One tensor in a file: its bytes are `file[start:end]`, and `dtype` is a name of safetensors such as `"BF16"`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Shard:
    """One safetensors file. `entries` are in the order of their bytes, and the first begins at `data_start`.

    If it was rewritten from another file in a scratch directory, `original` is that file, which messages name.
    """

    path: Path
    entries: tuple[StoredTensor, ...]
    data_start: int
    metadata: dict[str, str]
    original: Path | None = None

    @property
    def source(self) -> Path:
        """The file of the user that holds these tensors."""
        return self.original or self.path


def read_shard(path: Path) -> Shard:
    """Read the header of a safetensors file.

    Raises:
        OSError: The file is truncated or damaged.
    """
    # Opening checks the header against the limits of the format and the length of the file.
    try:
        with safe_open(path, framework="pt"):
            pass
    except SafetensorError as error:
        raise OSError(f"{path} is truncated or damaged ({error}). Copy it again.") from error
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    data_start = 8 + length
    metadata = header.pop("__metadata__", None) or {}
    entries = [
        StoredTensor(
            name, info["dtype"], tuple(info["shape"]), *(data_start + offset for offset in info["data_offsets"])
        )
        for name, info in header.items()
    ]
    return Shard(path, tuple(sorted(entries, key=lambda entry: (entry.start, entry.end))), data_start, metadata)


def copy_shard(
    shard: Shard,
    target: Path | None,
    *,
    dropped: Collection[str] = (),
    unused: Collection[str] = (),
    rename: Mapping[str, str] | None = None,
    on_bytes: Callable[[int], None] = lambda n: None,
    check: Callable[[torch.Tensor, StoredTensor, Path], None] | None = None,
) -> None:
    """Copy a shard byte for byte, and check its values on the way.

    Args:
        shard: The header of the file.
        target: The file to write; None to check the values only.
        dropped: The names of tensors to leave out.
        unused: The names of tensors that the model does not use. They may hold NaN.
        rename: The names that tensors get in the target, by name. By default they keep their names.
        on_bytes: A function that gets the number of bytes of each piece.
        check: A function that checks a piece of a tensor of integers: uint8, the tensor's entry, and the file that a
            message names.

    Raises:
        ValueError: A tensor holds NaN or infinite values, or `check` raises it.
        OSError: The shard ends early, or the target cannot be written.
    """
    kept = [entry for entry in shard.entries if entry.name not in dropped]
    names = [entry.name if rename is None else rename[entry.name] for entry in kept]
    keeps_header = names == [entry.name for entry in shard.entries]
    path = target or Path(os.devnull)
    with open(shard.path, "rb") as source, about(path, only=OSError), path.open("wb") as sink:
        sink.write(source.read(shard.data_start) if keeps_header else _make_header(kept, shard.metadata, names))
        for entry in kept:
            for chunk in read_pieces(source, entry, shard.source):
                if entry.name not in unused:
                    check_finite(chunk, entry, shard.source)
                    if check is not None and not _is_float(entry):
                        check(torch.frombuffer(chunk, dtype=torch.uint8), entry, shard.source)
                sink.write(chunk)
                on_bytes(len(chunk))


def write_shard(
    like: Shard,
    target: Path,
    tensors: Sequence[tuple[StoredTensor, Callable[[], Iterable[bytes | memoryview]]]],
    on_bytes: Callable[[int], None] = lambda n: None,
) -> Shard:
    """Write a safetensors file in place of another one, tensor by tensor.

    Args:
        like: The file that is replaced. If the tensors have its names, dtypes and shapes, the header has its bytes.
        target: The file to write.
        tensors: For each tensor its name, dtype, shape and size, and a function that gives its bytes.
        on_bytes: A function that gets the number of bytes of each piece.

    Returns:
        The header of the file that was written.

    Raises:
        OSError: The file cannot be written.
    """
    entries = [entry for entry, _ in tensors]
    is_like = [(e.name, e.dtype, e.shape) for e in entries] == [(e.name, e.dtype, e.shape) for e in like.entries]
    with open(like.path, "rb") as source, about(target, only=OSError), target.open("wb") as sink:
        header = _make_header(entries, like.metadata, [entry.name for entry in entries])
        sink.write(source.read(like.data_start) if is_like else header)
        for _, pieces in tensors:
            for piece in pieces():
                on_bytes(sink.write(piece))
    return replace(read_shard(target), original=like.source)


def read_pieces(source: BufferedReader, entry: StoredTensor, path: Path) -> Iterator[memoryview]:
    """Yield the bytes of a tensor piece by piece, each in the same buffer.

    Args:
        source: The open file.
        entry: The tensor.
        path: The file that a message names.

    Raises:
        OSError: The file ends within the tensor.
    """
    buffer = memoryview(bytearray(min(CHUNK, entry.end - entry.start)))
    source.seek(entry.start)
    left = entry.end - entry.start
    while left:
        chunk = buffer[: min(CHUNK, left)]
        if source.readinto(chunk) < len(chunk):
            raise OSError(f"{path} ends within `{entry.name}`. Copy it again.")
        left -= len(chunk)
        yield chunk


def _make_header(entries: list[StoredTensor], metadata: dict[str, str], names: list[str]) -> bytes:
    """Return the header of a safetensors file that holds tensors one after the other under new names."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for entry, name in zip(entries, names):
        size = entry.end - entry.start
        header[name] = {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the data of the format begins at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def _is_float(entry: StoredTensor) -> bool:
    dtype = DTYPES.get(entry.dtype)
    return dtype is not None and dtype.is_floating_point


def check_finite(chunk: memoryview, entry: StoredTensor, path: Path) -> None:
    """Raise ValueError if a piece of a tensor holds NaN or infinite values.

    Args:
        chunk: The bytes.
        entry: The tensor.
        path: The file that the message names.
    """
    if not _is_float(entry):
        return
    dtype = DTYPES[entry.dtype]
    values = torch.frombuffer(chunk, dtype=dtype)
    if dtype.itemsize == 1:  # `aminmax` does not support 8-bit floats
        values = values.float()
    # Both results are NaN if any value is. `aminmax` takes one pass over the values, `isfinite().all()` two.
    low, high = values.aminmax()
    if not (torch.isfinite(low) and torch.isfinite(high)):
        raise ValueError(f"`{entry.name}` in {path} holds NaN or infinite values. Use an earlier checkpoint.")


__all__ = [
    "DTYPES",
    "StoredTensor",
    "Shard",
    "check_finite",
    "copy_shard",
    "read_pieces",
    "read_shard",
    "write_shard",
]
