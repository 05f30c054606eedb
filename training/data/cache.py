"""Cache folders: each is built once, by one process, and is either complete and undamaged or built again."""

import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

MANIFEST = "manifest.json"


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Build a cache folder, unless an earlier call has built it.

    The folder is filled under a temporary name, so that a killed run leaves no incomplete one. A lock lets one process
    build while the others wait. A manifest holds the size and checksum of every file, and a folder that does not match
    its manifest is built again.

    Args:
        folder: The folder.
        build: A function that writes the files into the empty folder that it is called with. If it raises an `OSError`
            about data that it reads, the error must have no `errno`: one with an `errno` counts as an error of writing.

    Returns:
        The folder.

    Raises:
        OSError: The folder cannot be written.
        Exception: Any error of `build`. The folder is removed then.
    """
    if _is_whole(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f"{folder.name}.lock")):
            if not _is_whole(folder):
                _build(folder, build)
    except OSError as error:
        if error.errno is None:  # from `build`, about data that it reads
            raise
        raise OSError(f"The cache {folder.parent} cannot be written: {os.strerror(error.errno)}.") from error
    return folder


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    partial = folder.with_name(f"{folder.name}.partial")
    # `folder` may be damaged, and a killed run may have left `partial`.
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
    """Return whether the files of a folder match its manifest."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return all(_checksum(folder / name) == checksum for name, checksum in manifest.items())
    except (OSError, ValueError, AttributeError):
        return False


def _checksum(path: Path) -> list[int]:
    """Return the size and the CRC-32 of a file. CRC-32 finds accidental damage and is as fast as the disk."""
    checksum = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            checksum = zlib.crc32(chunk, checksum)
    return [os.path.getsize(path), checksum]
