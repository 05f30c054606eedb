"""Results on disk: one JSON file for each experiment, with one line for each run.

Curves and depth attention are long, so a line holds them compressed; nothing of them is rounded or left out.
"""

import base64
import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from attnres.utils.files import atomic_write

from .declared import SELECTION_SEED, HealingExperiment, ScratchExperiment

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "experiments"
PACKED = ("curve", "depth_attention")


def results_file(name: str) -> Path:
    """Return where the runs of the experiment `name` are stored."""
    return FOLDER / "results" / f"{name}.json"


class RunStore:
    """The runs of an experiment, in a JSON file that is rewritten after each run.

    Args:
        experiment: a `ScratchExperiment` or a `HealingExperiment`.
        path: the file; it need not exist.

    Attributes:
        setting: what all runs of the file share, such as the model and the text.
        runs: the stored runs, in the order in which they ended.
        costs: what a training step costs (`ratios`), and the machine that measured it (`made_by`); may be empty.

    Raises:
        ValueError: the file is damaged or holds runs of another setting.
    """

    def __init__(self, experiment: ScratchExperiment | HealingExperiment, path: Path) -> None:
        self.path, self.setting, self.required = path, experiment.setting(), experiment.REQUIRED
        self.runs: list[dict[str, Any]] = []
        self.costs: dict[str, Any] = {}
        self.read()

    def read(self) -> None:
        """Read the file again: another process may have added runs.

        Raises:
            ValueError: the file is damaged or holds runs of another setting.
        """
        if not self.path.exists():
            return
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            setting, costs = dict(content["setting"]), dict(content.get("costs", {}))
            runs = [_unpacked(run) for run in content["runs"]]
            for number, run in enumerate(runs, 1):
                self._check(run, runs[: number - 1], number)
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError, zlib.error) as error:
            raise ValueError(f"{self.path} is damaged ({type(error).__name__}: {error}): move it away.") from error
        if setting != self.setting:
            changed = sorted(k for k in setting.keys() | self.setting if setting.get(k) != self.setting.get(k))
            values = "; ".join(f"{name}: {setting.get(name)}, not {self.setting.get(name)}" for name in changed)
            raise ValueError(
                f"{self.path} holds runs of another setting ({values}). Move it away, and the figure beside it, or "
                "choose another --results."
            )
        self.runs, self.costs = runs, costs

    def _check(self, run: Mapping[str, Any], earlier: list[dict[str, Any]], number: int) -> None:
        if missing := [key for key in ("recipe", "seed", "after", *self.required) if key not in run]:
            raise ValueError(f"run {number} lacks {', '.join(missing)}")
        if type(run["after"]) not in (int, float) or type(run["seed"]) is not int:
            raise ValueError(f"run {number}: after must be a number, and seed a whole number")
        if any((other["recipe"], other["seed"]) == (run["recipe"], run["seed"]) for other in earlier):
            raise ValueError(f"run {number} is there twice")

    def find(self, recipe: "DataclassInstance", seed: int) -> dict[str, Any] | None:
        """Return the run of this recipe and seed; None if it is not stored."""
        fields = asdict(recipe)
        return next((run for run in self.runs if (run["recipe"], run["seed"]) == (fields, seed)), None)

    def select(self, selecting: bool) -> list[dict[str, Any]]:
        """Return the runs that choose settings (`selecting`), or those that are reported."""
        return [run for run in self.runs if (run["seed"] == SELECTION_SEED) == selecting]

    def other_texts(self, fingerprint: str) -> list[str]:
        """Return the fingerprints of other texts that stored runs were trained on; the oldest runs have none."""
        return sorted({run["text"] for run in self.runs if "text" in run} - {fingerprint})

    def held(self) -> FileLock:
        """Return a lock for a `with` statement: one process at a time writes the file and what lies beside it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return FileLock(self.path.with_suffix(".lock"))

    def add(self, run: dict[str, Any]) -> None:
        """Add a run to the file, unless another process has added the same run."""
        with self.held():
            self.read()
            if not any((other["recipe"], other["seed"]) == (run["recipe"], run["seed"]) for other in self.runs):
                self.runs.append(run)
                self._write()

    def set_costs(self, costs: dict[str, Any]) -> None:
        """Replace the stored costs of a training step."""
        with self.held():
            self.read()
            self.costs = costs
            self._write()

    def _write(self) -> None:
        head = f'{{"setting": {json.dumps(self.setting)},\n'
        head += f'"costs": {json.dumps(self.costs)},\n' if self.costs else ""
        lines = ",\n".join(json.dumps(_packed(run)) for run in self.runs)
        atomic_write(self.path, f'{head}"runs": [\n{lines}\n]}}\n')


def _packed(run: Mapping[str, Any]) -> dict[str, Any]:
    # The alphabet of base 85 has no quotation mark and no backslash: in JSON it needs no escapes.
    return {
        key: base64.b85encode(zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 9)).decode()
        if key in PACKED
        else value
        for key, value in run.items()
    }


def _unpacked(run: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: json.loads(zlib.decompress(base64.b85decode(value))) if key in PACKED and isinstance(value, str) else value
        for key, value in run.items()
    }
