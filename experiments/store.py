"""Stored runs: one JSON file for each experiment, with one line for each run.

Curves and depth attention are long, so a line holds them compressed: base 85 of zlib of JSON.
"""

import base64
import json
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

from attnres.utils.files import atomic_write

from .declared import SELECTION_SEED, HealingExperiment, ScratchExperiment

ROOT = Path(__file__).parents[1]
PACKED = ("curve", "depth_attention")


def results_file(name: str) -> Path:
    """Return where the runs of the experiment `name` are stored."""
    return ROOT / "experiments" / "results" / f"{name}.json"


class RunStore:
    """The runs of an experiment, in a JSON file that is rewritten after each run.

    Args:
        experiment: The declaration.
        path: The file, which need not exist.

    Attributes:
        setting: What all runs of the file share, such as the model and the text.
        runs: The stored runs, in the order in which they ended. Each has a `recipe`, a `seed` and measurements.
        costs: What a training step costs (`ratios`), and the machine that measured each way (`made_by`); may be empty.

    Raises:
        ValueError: The file holds runs of another setting.
    """

    def __init__(self, experiment: ScratchExperiment | HealingExperiment, path: Path) -> None:
        self.path, self.setting = path, experiment.setting()
        self.runs: list[dict[str, Any]] = []
        self.costs: dict[str, Any] = {}
        self.read()

    def read(self) -> None:
        """Read the file again, since another process may have added runs."""
        if not self.path.exists():
            return
        content = json.loads(self.path.read_text(encoding="utf-8"))
        if (stored := content["setting"]) != self.setting:
            changed = sorted(k for k in stored.keys() | self.setting if stored.get(k) != self.setting.get(k))
            raise ValueError(f"{self.path} holds runs with another {', '.join(changed)}: choose another --results.")
        self.runs = [{key: _unpacked(key, value) for key, value in run.items()} for run in content["runs"]]
        self.costs = content.get("costs", {})

    @contextmanager
    def update(self) -> Generator[None]:
        """Hold the file while the block changes `runs` or `costs`, then write it. One process at a time does so."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(self.path.with_suffix(".lock")):
            self.read()
            yield
            head = f'{{"setting": {json.dumps(self.setting)},\n'
            head += f'"costs": {json.dumps(self.costs)},\n' if self.costs else ""
            lines = (json.dumps({key: _packed(key, value) for key, value in run.items()}) for run in self.runs)
            runs = ",\n".join(lines)
            atomic_write(self.path, f'{head}"runs": [\n{runs}\n]}}\n')

    def find(self, recipe: dict[str, Any], seed: int) -> dict[str, Any] | None:
        """Return the run of this recipe and seed; `None` if it is not stored."""
        return next((run for run in self.runs if (run["recipe"], run["seed"]) == (recipe, seed)), None)

    def select(self, selecting: bool) -> list[dict[str, Any]]:
        """Return the runs that choose settings (`selecting`), or those that are reported."""
        return [run for run in self.runs if (run["seed"] == SELECTION_SEED) == selecting]

    def check_text(self, fingerprint: str) -> None:
        """Raise ValueError if a run was trained on another text. The oldest runs have no fingerprint."""
        if others := {run["text"] for run in self.runs if "text" in run} - {fingerprint}:
            raise ValueError(
                f"{self.path} holds runs on another text ({', '.join(sorted(others))}, not {fingerprint}): choose "
                "another --results."
            )


def _packed(key: str, value: Any) -> Any:
    # The alphabet of base 85 has no quotation mark and no backslash, so JSON needs no escapes.
    text = json.dumps(value, separators=(",", ":"))
    return base64.b85encode(zlib.compress(text.encode(), 9)).decode() if key in PACKED else value


def _unpacked(key: str, value: Any) -> Any:
    return json.loads(zlib.decompress(base64.b85decode(value))) if key in PACKED else value
