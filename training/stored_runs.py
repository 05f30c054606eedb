"""Runs of an experiment, stored as each ends, and the tables of a Markdown file that are made from them."""

import json
from dataclasses import asdict
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from attnres.cli_support import write_at_once

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class Store:
    """The runs in a JSON file, rewritten at once after each.

    Args:
        setting: what all runs have in common.

    Raises:
        ValueError: the file holds runs of another setting.
    """

    def __init__(self, path: Path, setting: dict[str, Any]):
        self.path, self.content = path, {"setting": setting, "runs": []}
        if path.exists():
            self.content = json.loads(path.read_text())
            if self.content["setting"] != setting:
                raise ValueError(
                    f"{path} holds runs of another setting, {self.content['setting']}; this one is {setting}. "
                    "Choose another --results."
                )

    def find(self, recipe: "DataclassInstance", seed: int) -> dict[str, Any] | None:
        wanted = asdict(recipe), seed
        return next((run for run in self.content["runs"] if (run["recipe"], run["seed"]) == wanted), None)

    def add(self, run: dict[str, Any]) -> None:
        self.content["runs"].append(run)
        lines = ",\n".join(json.dumps(run) for run in self.content["runs"])  # a line for each
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_at_once(self.path, f'{{"setting": {json.dumps(self.content["setting"])}, "runs": [\n{lines}\n]}}\n')


def spread(values: list[float], sign: str = "") -> str:
    deviation = f" ± {stdev(values):.4f}" if len(values) > 1 else ""
    return f"{mean(values):{sign}.4f}{deviation}"


def update_tables(path: Path, tables: dict[str, str]) -> None:
    """Write each table between the marks `<!-- NAME -->` and `<!-- end -->` of a Markdown file, or at its end.

    Raises:
        ValueError: a mark has no end, or another mark before it; the file is left as it is.
    """
    text = path.read_text() if path.exists() else ""
    for name, table in tables.items():
        begin, end = f"<!-- {name} -->", "<!-- end -->"
        if begin not in text:
            text += f"\n{begin}\n{end}\n"
        head, _, rest = text.partition(begin)
        old, found, tail = rest.partition(end)
        if not found or "<!--" in old:
            raise ValueError(f"{path}: the table of `{begin}` does not end with `{end}`.")
        text = f"{head}{begin}\n{table}\n{end}{tail}"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_at_once(path, text)
