"""A folder that one process builds once: whole, unharmed, or not there."""

import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

MANIFEST = "manifest.json"


def built_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """`folder` as `build` fills it, now or in an earlier run.

    It is built under a temporary name beside its own, so that a run that is killed leaves none, and under a lock, so
    that of several processes one builds and the others wait. Its manifest holds the size and checksum of every file: a
    folder that does not agree with it is built again.

    Raises:
        OSError: nothing can be written there.
        Exception: what `build` raises; nothing is left of the folder then. Its own `OSError`s have no `errno`.
    """
    if _is_whole(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f"{folder.name}.lock")):
            if not _is_whole(folder):
                _build(folder, build)
    except OSError as error:
        if error.errno is None:  # of what is read, not of what is written
            raise
        raise OSError(f"The cache {folder.parent} cannot be written: {os.strerror(error.errno)}.") from error
    return folder


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    partial = folder.with_name(f"{folder.name}.partial")
    for left_over in (folder, partial):
        if left_over.exists():
            shutil.rmtree(left_over)
    partial.mkdir()
    try:
        build(partial)
        manifest = {path.name: _checksum(path) for path in sorted(partial.iterdir())}
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _is_whole(folder: Path) -> bool:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return all(_checksum(folder / name) == checksum for name, checksum in manifest.items())
    except (OSError, ValueError, AttributeError):
        return False


def _checksum(path: Path) -> list[int]:
    """Size and CRC-32 of a file: as fast as it can be read, and enough against accidents."""
    checksum = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            checksum = zlib.crc32(chunk, checksum)
    return [os.path.getsize(path), checksum]
