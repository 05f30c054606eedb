"""The results of one model, a file for each task, so that a run that was killed goes on where it stood."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lm_eval.utils import handle_non_serializable

from attnres.cli_support import write_at_once

SETUP = "setup.json"


class Store:
    """The folder of one model's results: `setup.json`, which says how they come about, and `TASK.json` for each task.

    Args:
        setup: everything that decides the numbers. A folder that was written under another setup is refused.

    Raises:
        FileExistsError: the folder holds results of another setup.
    """

    def __init__(self, folder: Path, setup: Mapping[str, Any]) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / SETUP).exists():
            _check_same(folder, self.setup, setup)
        else:
            write_at_once(folder / SETUP, to_json(setup, indent=2))

    def __contains__(self, task: str) -> bool:
        return self._path(task).exists()

    def read(self, task: str) -> dict[str, Any]:
        return json.loads(self._path(task).read_text(encoding="utf-8"))

    def write(self, task: str, result: Mapping[str, Any]) -> None:
        write_at_once(self._path(task), to_json(result))

    @property
    def setup(self) -> dict[str, Any]:
        return json.loads((self.folder / SETUP).read_text(encoding="utf-8"))

    def _path(self, task: str) -> Path:
        return self.folder / f"{task}.json"


def to_json(content: Mapping[str, Any], indent: int | None = None) -> str:
    """As the harness writes its results."""
    return json.dumps(content, indent=indent, default=handle_non_serializable, ensure_ascii=False) + "\n"


def _check_same(folder: Path, stored: Mapping[str, Any], setup: Mapping[str, Any]) -> None:
    for key, value in setup.items():
        if stored.get(key) == value:
            continue
        what = f"other {key}" if isinstance(value, dict) else f"{key} {stored.get(key)!r}, not {value!r}"
        raise FileExistsError(f"{folder} holds results with {what}. Choose another --out, or remove the folder.")
