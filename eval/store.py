"""Store the results of one model in a file for each task, so that a run that was killed can continue.

A result carries a hash of its content, so that an edited file is not taken for a measurement.
"""

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lm_eval.utils import handle_non_serializable

from attnres.utils.files import atomic_write

SETUP, HASH = "setup.json", "sha256"


class ResultStore:
    """The folder of one model's results: `setup.json` with the settings, and `TASK.json` for each task.

    Args:
        folder: The folder; it is created.
        setup: All settings that decide the numbers. A folder with results of another setup is refused. A folder without
            results takes the new setup, so that a run that found no data can continue with another data folder.

    Raises:
        FileExistsError: The folder holds results of another setup.
        ValueError: The stored setup is damaged or lacks a setting.
    """

    def __init__(self, folder: Path, setup: Mapping[str, Any]) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        stored = self.setup if (folder / SETUP).exists() else None
        if stored is not None and any(path.name != SETUP for path in folder.glob("*.json")):
            _check_same(folder, stored, setup)
        elif stored != setup:
            atomic_write(folder / SETUP, to_json(setup, indent=2))

    def __contains__(self, task: str) -> bool:
        return self.path(task).exists()

    def read(self, task: str) -> dict[str, Any]:
        """Return the stored result of a task. Raise ValueError in one line if it is damaged or was edited."""
        path = self.path(task)
        remedy = "Remove it, and the same command computes it again."
        result = _read(path, remedy)
        if result.pop(HASH, None) != _hash(result):
            raise ValueError(f"{path} is not as it was written: its {HASH} does not fit. {remedy}")
        return result

    def write(self, task: str, result: Mapping[str, Any]) -> None:
        """Store the result of a task, as a whole or not at all.

        Args:
            task: The task's name.
            result: The result, without a key `sha256`.
        """
        # Hash the content as it will be read back, because JSON turns keys that are numbers into text.
        atomic_write(self.path(task), to_json({**result, HASH: _hash(json.loads(to_json(result)))}))

    @property
    def setup(self) -> dict[str, Any]:
        """The stored setup."""
        return _read(self.folder / SETUP, f"Choose another --out, or remove the folder {self.folder}.")

    def path(self, task: str) -> Path:
        """Return the file of a task's result, whatever characters the task's name has."""
        name = quote(task, safe="")
        # A task named `setup` must not replace the setup.
        return self.folder / ("%73etup.json" if f"{name}.json" == SETUP else f"{name}.json")


def _read(path: Path, remedy: str) -> dict[str, Any]:
    """Return the object in a JSON file. Raise ValueError, whose message ends in `remedy`, if the file holds none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}). {remedy}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged (it holds a {type(content).__name__}, not an object). {remedy}")
    return content


def _hash(result: Mapping[str, Any]) -> str:
    return sha256(json.dumps(result, sort_keys=True).encode()).hexdigest()


def to_json(content: Mapping[str, Any], indent: int | None = None) -> str:
    """Return JSON as the harness writes its results.

    Args:
        content: The content.
        indent: The number of spaces per level; by default, all is on one line.
    """
    return json.dumps(content, indent=indent, default=handle_non_serializable, ensure_ascii=False) + "\n"


def _check_same(folder: Path, stored: Mapping[str, Any], setup: Mapping[str, Any]) -> None:
    """Raise FileExistsError for the first setting in which two setups differ, or ValueError if a setting is missing."""
    for key, value in setup.items():
        if stored.get(key) == value:
            continue
        if key not in stored:  # the file was emptied, or another version wrote it
            raise ValueError(f"{folder / SETUP} lacks {key!r}. Choose another --out, or remove the folder.")
        # Sizes and times of files, or versions of packages, would make the message too long.
        difference = f"other {key!r}" if isinstance(value, dict) else f"{key} {stored.get(key)!r}, not {value!r}"
        raise FileExistsError(
            f"{folder} holds results whose {SETUP} has {difference}. Choose another --out, or remove the folder."
        )
