"""Files of a source, which may be anything: none is opened before it is known to be a file of the model's directory."""

import json
from pathlib import Path
from typing import Any

# An index of a million tensors, or a vocabulary of a million tokens with its merges, has fewer bytes.
_MAX_TEXT = 100 * 10**6


def check_file(folder: Path, path: Path) -> None:
    """Check that a path in a model's directory is a file that lies in it, where links lead to as well.

    The files of a snapshot in the Hub's cache are links to the blobs of the same repository.

    Raises:
        OSError: it is no file: to open a pipe may take for ever, and so may reading a device.
        ValueError: it leads elsewhere.
    """
    found, root = path.resolve(), folder.resolve()
    roots = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    if not any(found.is_relative_to(allowed) for allowed in roots):
        raise ValueError(f"{path} is a link to {found}, outside the model's directory. Put the file itself there.")
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there.")
    if not path.is_file():
        raise OSError(f"{path} is not a file. Put one there, or remove it.")


def check_text(folder: Path, path: Path) -> None:
    """The same of a file that is read as a whole.

    Raises:
        OSError, ValueError: as there; or it is too large to be what its name says.
    """
    check_file(folder, path)
    size = path.stat().st_size
    if size > _MAX_TEXT:
        raise OSError(f"{path} has {size:,} bytes, but may have {_MAX_TEXT:,} at most. Copy it again, or remove it.")


def read_json(path: Path) -> Any:
    """What a JSON file holds; it must have passed `check_text`.

    Raises:
        OSError: it is damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise OSError(f"{path} is damaged (it is nested too deeply). Copy it again.") from error
    except ValueError as error:
        raise OSError(f"{path} is damaged ({error}). Copy it again.") from error


def read_object(path: Path) -> dict:
    """The JSON object that a file holds; it must have passed `check_text`.

    Raises:
        OSError: it is damaged, or holds something else.
    """
    fields = read_json(path)
    if not isinstance(fields, dict):
        raise OSError(f"{path} is damaged (it holds no object). Copy it again.")
    return fields


__all__ = ["check_file", "check_text", "read_json", "read_object"]
