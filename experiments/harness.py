"""What experiments share: runs that a plan names are made where the store lacks them; numbers for their tables."""

import argparse
import ctypes
import hashlib
import json
import math
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from filelock import FileLock
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from attnres.files import atomic_write

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

TINY = "tiny"  # the size that tries the whole path, and is never reported
SELECTION_SEED = 10  # of the runs that settings are chosen by, on text that is not reported
ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "experiments"  # of the pages, and of stored runs in `results`
PAGES = "Markdown file to update; default the page of the experiment, for a trial one beside --results"


class Store:
    """The runs in a JSON file, rewritten at once after each.

    Args:
        setting: what all runs have in common.

    Raises:
        ValueError: the file holds runs of another setting, or is none of runs.
    """

    def __init__(self, path: Path, setting: dict[str, Any]):
        self.path, self.setting = path, setting
        self.content: dict[str, Any] = {"setting": setting, "runs": []}
        self._read()

    def _read(self) -> None:
        if self.path.exists():
            content = read_stored(self.path, {"setting", "runs"})
            other, own = content["setting"], self.setting
            if other != own:
                changed = [name for name in other.keys() | own.keys() if other.get(name) != own.get(name)]
                values = "; ".join(f"{name}: {other.get(name)}, not {own.get(name)}" for name in sorted(changed))
                raise ValueError(f"{self.path} holds runs of another setting ({values}). Choose another --results.")
            self.content = content

    def find(self, recipe: "DataclassInstance", seed: int) -> dict[str, Any] | None:
        return self._find(asdict(recipe), seed)

    def _find(self, recipe: dict[str, Any], seed: int) -> dict[str, Any] | None:
        return next((run for run in self.content["runs"] if (run["recipe"], run["seed"]) == (recipe, seed)), None)

    def runs(self, selecting: bool) -> list[dict[str, Any]]:
        """Those that settings are chosen by, or those that are reported."""
        return [run for run in self.content["runs"] if (run["seed"] == SELECTION_SEED) == selecting]

    def add(self, run: dict[str, Any]) -> None:
        """Add a run to what the file holds by now: others may have added theirs."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(self.path.with_suffix(".lock")):
            self._read()
            if self._find(run["recipe"], run["seed"]):
                return  # another process has made it meanwhile
            self.content["runs"].append(run)
            lines = ",\n".join(json.dumps(run) for run in self.content["runs"])  # a line for each
            atomic_write(self.path, f'{{"setting": {json.dumps(self.setting)}, "runs": [\n{lines}\n]}}\n')


def read_stored(path: Path, keys: set[str]) -> dict[str, Any]:
    """The object of a JSON file that experiments wrote. Raises ValueError: it is none, or lacks one of these keys."""
    try:
        content = json.loads(path.read_text())
    except ValueError as error:  # UnicodeDecodeError is one too
        raise ValueError(f"{path} is damaged ({error}): move it away, or choose another --results.") from error
    if not isinstance(content, dict) or not keys <= content.keys():
        raise ValueError(f"{path} is no file of experiments: move it away, or choose another --results.")
    return content


@dataclass(frozen=True)
class Planned:
    """A run that a table needs: what it is called, what identifies it in the store, and how long it is."""

    label: str
    recipe: "DataclassInstance"
    seed: int
    steps: int

    def __str__(self) -> str:
        return f"{self.label}, seed {self.seed}"

    @property
    def selecting(self) -> bool:
        """Settings are chosen by it, on text that is not reported."""
        return self.seed == SELECTION_SEED

    @property
    def folder(self) -> str:
        """Its name as one of a folder."""
        return re.sub(r"[^\w.=-]+", "_", str(self))


def checkpoints(work: Path | None, setting: Mapping[str, Any], run: Planned) -> Path | None:
    """The folder in `work` for the checkpoints of a run: no other setting or recipe has the same."""
    identity = json.dumps([setting, asdict(run.recipe), run.seed], sort_keys=True)
    return work and work / f"{run.folder}-{hashlib.sha256(identity.encode()).hexdigest()[:10]}"


def forget_checkpoints(work: Path | None, setting: Mapping[str, Any], run: Planned) -> None:
    """Remove those of a run that is stored."""
    if folder := checkpoints(work, setting, run):
        shutil.rmtree(folder, ignore_errors=True)


Number = TypeVar("Number", int, float)


def _number(kind: type[Number], text: str, example: str) -> Number:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number such as {example}") from None


def a_rate(text: str) -> float:
    """A learning rate of the command line."""
    if not 0 < (rate := _number(float, text, "0.004")) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no learning rate: it is above 0, such as 0.004")
    return rate


def a_count(text: str) -> int:
    """A number of tokens of the command line."""
    if (count := _number(int, text, "2097152")) < 1:
        raise argparse.ArgumentTypeError(f"{text} is too few: at least 1")
    return count


def a_seed(text: str) -> int:
    """A seed of reported runs."""
    if not 0 <= (seed := _number(int, text, "0")) < 2**32 or seed == SELECTION_SEED:
        raise argparse.ArgumentTypeError(
            f"a seed is a number from 0 to 2**32 - 1, and {SELECTION_SEED} is the one that settings are chosen by; "
            f"{text} is none"
        )
    return seed


def a_results_file(text: str) -> Path:
    """A file for stored runs."""
    path = Path(text)
    if path.suffix != ".json" or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no .json file, which runs are stored in")
    a_folder(str(path.parent))
    return path


def a_folder(text: str) -> Path:
    """A folder that is there, or can be made."""
    if not text:
        raise argparse.ArgumentTypeError("a folder has a name; for this one, write .")
    path = Path(text)
    nearest = next(place for place in (path, *path.absolute().parents) if os.path.lexists(place))
    if not nearest.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no place for a folder: {nearest} is no folder")
    if not os.access(nearest, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} is no place for a folder: {nearest} cannot be written")
    return path


def add_work(parser: argparse.ArgumentParser) -> None:
    work = Path(tempfile.gettempdir()) / "attnres-experiments"
    parser.add_argument("--work", type=a_folder, default=work, help=f"folder for checkpoints; default {work}")


def results_file(name: str) -> Path:
    """Where the runs of an experiment are stored."""
    return FOLDER / "results" / f"{name}.json"


def page_of(experiment: str) -> Path:
    return FOLDER / f"{experiment}.md"


def tables_file(experiment: str, size: str, results: Path, is_trial: bool) -> Path:
    """Where the tables of a command go: the page of the experiment that has places for them, or beside the runs."""
    page = page_of(experiment)
    has_places = page.exists() and f"<!-- {size}: " in page.read_text()
    return page if has_places and not is_trial else results.with_suffix(".md")


def chosen(option: str, names: Iterable[str] | None, among: Iterable[str]) -> list[str]:
    """The names that an option gives, or else all. Raises ValueError: there is no such name."""
    among = list(among)
    if unknown := set(names or ()) - set(among):
        raise ValueError(f"{option}: {', '.join(sorted(unknown))} is none of {', '.join(among)}.")
    return list(names or among)


Measure = Callable[[Planned, Callable[[], None]], dict[str, Any]]


def make_runs(
    store: Store,
    plan: Iterable[Planned],
    measure: Measure,
    device: str = "cpu",
    stored: Callable[[Planned], None] = lambda run: None,
) -> None:
    """Make what the store lacks of a plan, and store each run as it ends.

    Args:
        measure: makes a run: calls its second argument after each step, and returns what is to be stored beside recipe
            and seed, `after` (the held-out loss) and `seconds` among it.
        stored: called with each run that is stored.
    """
    plan = list({(run.recipe, run.seed): run for run in plan}.values())
    missing = [run for run in plan if store.find(run.recipe, run.seed) is None]
    console = Console()
    console.print(f"Runs stored: {len(plan) - len(missing)} of {len(plan)}.", highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("left:"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("", total=sum(run.steps for run in missing))
        for run in missing:
            progress.update(bar, description=str(run))
            origin = made_by(device)
            result = measure(run, _steps_of(run, lambda: progress.advance(bar), console))
            store.add({"recipe": asdict(run.recipe), "seed": run.seed, **result, "made_by": origin})
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


def made_by(device: str) -> dict[str, Any]:
    """The commit, with a + if code or declarations of it are changed, the versions and the processor of this process.

    The environment variable `ATTNRES_COMMIT` names the commit where files were copied without their history.
    `forced_avx512`: a preloaded library lets MKL use AVX-512 on an AMD processor.
    """
    versions = {name: version(name) for name in ("torch", "transformers")}
    origin = {"commit": _commit(), "python": platform.python_version(), **versions}
    if device == "cuda":
        return origin | {"device": torch.cuda.get_device_name()}
    forced = os.name == "posix" and hasattr(ctypes.CDLL(None), "mkl_serv_intel_cpu_true")
    return origin | {"device": _processor()} | ({"forced_avx512": True} if forced else {})


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
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "*.py", "*.yaml")
        return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def spread(values: Sequence[float], sign: str = "") -> str:
    """Mean ± standard deviation, such as `3.9932 ± 0.0189`."""
    deviation = f" ± {stdev(values):.4f}" if len(values) > 1 else ""
    return f"{mean(values):{sign}z.4f}{deviation}"


def markdown(rows: Sequence[Sequence[str]], texts: int = 1) -> str:
    """A table with a head; the first `texts` columns hold text, the others numbers."""
    head, *rest = rows
    rule = ["---"] * texts + ["---:"] * (len(head) - texts)
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rest)]
    return "\n".join([lines[0], f"|{'|'.join(rule)}|", *lines[1:]])


def distance_of_means(rows: Iterable[Sequence[float]]) -> float:
    """`1/2 sum_i |a_i - 1/n|` of weights that are means over tokens: its mean over the readers with several sources."""
    return mean(sum(abs(weight - 1 / len(row)) for weight in row) / 2 for row in rows if len(row) > 1)
