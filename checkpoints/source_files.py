"""Check and read files of a source, which other people wrote.

No file is opened before it is known to lie within the model's directory.
"""

import json
from pathlib import Path
from typing import Any

AUTO_MAP = "auto_map"
PIPELINES = "custom_pipelines"
# Fields that name code, in any JSON file of a model.
CODE_FIELDS = (AUTO_MAP, PIPELINES, "custom_generate")


def check_file(folder: Path, path: Path) -> None:
    """Raise unless a path in a model's directory exists within it, after links are followed.

    Args:
        folder: The model's directory.
        path: The path.

    Raises:
        FileNotFoundError: It is not there.
        OSError: It is a named pipe or a device.
        ValueError: It is a link out of the directory.
    """
    target, root = path.resolve(), folder.resolve()
    # In the Hub's cache, the files of a snapshot are links to the blobs of the same repository.
    roots = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    if not any(target.is_relative_to(allowed) for allowed in roots):
        raise ValueError(f"{path} is a link to {target}, outside the model's directory. Put the file itself there.")
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there.")
    check_no_pipe(path)


def check_no_pipe(path: Path) -> None:
    """Raise OSError if a path is a named pipe or a device, since reading it might never end, even by Ctrl-C."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(f"{path} is not a file. Put one there, or remove it.")


def read_json(path: Path) -> Any:
    """Return the content of a JSON file that has passed [`check_file`].

    Raises:
        OSError: It is damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise OSError(f"{path} is damaged ({error}). Copy it again.") from error


def json_text(value: Any) -> str:
    """Return a JSON value as the text of a file, indented, with characters beyond ASCII as they are."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can express
        return json.dumps(value, indent=2) + "\n"
    return text


def write_json(path: Path, value: Any) -> None:
    """Write a JSON value to a file, as [`json_text`] does."""
    path.write_text(json_text(value), encoding="utf-8")


def read_object(path: Path) -> dict:
    """Return the JSON object in a file that has passed [`check_file`].

    Raises:
        OSError: It is damaged, or holds another JSON value.
    """
    fields = read_json(path)
    if not isinstance(fields, dict):
        raise OSError(f"{path} is damaged (it holds no object). Copy it again.")
    return fields


__all__ = [
    "AUTO_MAP",
    "CODE_FIELDS",
    "PIPELINES",
    "check_file",
    "check_no_pipe",
    "json_text",
    "read_json",
    "read_object",
    "write_json",
]
