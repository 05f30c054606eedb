"""Find a folder for code that is compiled once per machine."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path


def usual_parents(file: str) -> list[Path]:
    """Return where compiled code goes: the user's cache, or else beside the file that it is compiled from."""
    parents = [Path(file).parent / "__pycache__"]
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError:  # the user has no home directory
        return parents
    return [cache / "attnres", *parents]


def writable_folder(name: str, parents: Sequence[Path]) -> Path:
    """Make a folder in the first of these parents that can be written to, and return it.

    Raises:
        OSError: no folder can be written to.
    """
    for parent in parents:
        path = parent / name
        try:
            path.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path).close()
        except OSError:
            continue
        return path
    raise OSError(f"none of {', '.join(map(str, parents))} can be written to")


__all__ = ["usual_parents", "writable_folder"]
