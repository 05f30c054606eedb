"""What experiments share: runs stored as each ends, made by whatever plan lacks them, and numbers for their tables."""

import argparse
import json
import math
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from attnres.files import atomic_write

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SELECTION_SEED = 10  # of the runs that settings are chosen by, on text that is not reported
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results"  # where runs are stored


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
        atomic_write(self.path, f'{{"setting": {json.dumps(self.content["setting"])}, "runs": [\n{lines}\n]}}\n')


@dataclass(frozen=True)
class Planned:
    """A run that a table needs: what it is called, what identifies it in the store, and how long it is."""

    label: str
    recipe: "DataclassInstance"
    seed: int
    steps: int

    def __str__(self) -> str:
        return f"{self.label}, seed {self.seed}"


def checkpoints(work: Path | None, experiment: str, run: Planned) -> Path | None:
    """The folder in `work` for the checkpoints of a run."""
    return work and work / f"{experiment}, {run}".replace(" ", "_").replace("/", "_")


def forget_checkpoints(work: Path | None, experiment: str, run: Planned) -> None:
    """Remove those of a run that is stored."""
    if folder := checkpoints(work, experiment, run):
        shutil.rmtree(folder, ignore_errors=True)


def add_work(parser: argparse.ArgumentParser) -> None:
    work = Path(tempfile.gettempdir()) / "attnres-experiments"
    parser.add_argument("--work", type=Path, default=work, help=f"folder for checkpoints; default {work}")


def chosen(option: str, names: Iterable[str] | None, among: Iterable[str]) -> list[str]:
    """The names that an option gives, or else all. Raises ValueError: there is no such name."""
    among = list(among)
    if unknown := set(names or ()) - set(among):
        raise ValueError(f"{option}: {', '.join(sorted(unknown))} is none of {', '.join(among)}.")
    return list(names or among)


Measure = Callable[[Planned, Callable[[], None]], dict[str, Any]]


def make_runs(
    store: Store, plan: Iterable[Planned], measure: Measure, stored: Callable[[Planned], None] = lambda run: None
) -> None:
    """Make what the store lacks of a plan, and store each run as it ends.

    Args:
        measure: makes a run: calls its second argument after each step, and returns what is to be stored beside recipe
            and seed, `after` (the held-out loss) and `seconds` among it.
        stored: called with each run that is stored.
    """
    plan = list(dict.fromkeys(plan))
    missing = [run for run in plan if store.find(run.recipe, run.seed) is None]
    console = Console()
    console.print(f"Runs stored: {len(plan) - len(missing)} of {len(plan)}.", highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("left:"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("", total=sum(run.steps for run in missing))
        for run in missing:
            progress.update(bar, description=str(run))
            result = measure(run, _steps_of(run, lambda: progress.advance(bar), console))
            store.add({"recipe": asdict(run.recipe), "seed": run.seed, **result, "made_by": made_by()})
            stored(run)
            console.print(f"{run}: {result['after']:.4f}, {result['seconds']:.0f} s", highlight=False)


def _steps_of(run: Planned, advance: Callable[[], None], console: Console) -> Callable[[], None]:
    """`advance`, which moves a bar on a terminal; in a file there is a line for each twentieth of the run."""
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        advance()
        if not console.is_terminal and done % math.ceil(run.steps / 20) == 0:
            print(f"{time.strftime('%H:%M:%S')} {run}: step {done} of {run.steps}", flush=True)

    return step


def made_by() -> dict[str, str]:
    """The commit, with a + if files of it are changed, the versions and the processor that a run is made with.

    The environment variable `ATTNRES_COMMIT` names it where files were copied without their history.
    """
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()
    versions = {name: version(name) for name in ("torch", "transformers")}
    return {"commit": _commit(), "python": platform.python_version(), **versions, "device": device}


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    if "ATTNRES_COMMIT" in os.environ:
        return os.environ["ATTNRES_COMMIT"]
    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "*.py")
        return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def spread(values: list[float], sign: str = "") -> str:
    """Mean ± standard deviation, such as `3.9932 ± 0.0189`."""
    deviation = f" ± {stdev(values):.4f}" if len(values) > 1 else ""
    return f"{mean(values):{sign}.4f}{deviation}"
