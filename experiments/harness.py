"""What experiments share: runs that a plan names are made where the store lacks them; numbers for their tables."""

import ctypes
import hashlib
import json
import math
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

import torch
import yaml
from filelock import FileLock
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from attnres.analysis.tables import check_tables
from attnres.utils.files import atomic_write, locked
from attnres.utils.progress import ProgressBar
from attnres.utils.yaml_files import load_yaml

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

TINY = "tiny"  # the size that tries the whole path, and is never reported
SELECTION_SEED = 10  # of the runs that settings are chosen by, on text that is not reported
ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "experiments"  # of the pages, and of stored runs in `results`


def is_number(value: object) -> bool:
    return type(value) in (int, float)


def is_rate(value: object) -> bool:
    """Whether it can be a learning rate."""
    return is_number(value) and 0 < value < math.inf


def is_seed(value: object) -> bool:
    """Whether it can be the seed of a reported run."""
    return type(value) is int and 0 <= value < 2**32 and value != SELECTION_SEED


Check = Callable[[dict[str, Any]], object]


class Store:
    """The runs in a JSON file, rewritten at once after each.

    Args:
        setting: what all runs have in common.
        check: raises KeyError, TypeError or ValueError where a stored run lacks what its experiment needs.

    Raises:
        ValueError: the file holds runs of another setting, or is none of runs.
    """

    def __init__(self, path: Path, setting: dict[str, Any], check: Check = lambda run: None):
        self.path, self.setting, self.check = path, setting, check
        self.content: dict[str, Any] = {"setting": setting, "runs": []}
        self.read()

    def read(self) -> None:
        """What the file holds by now: other processes may have added to it."""
        if self.path.exists():
            content = read_stored(self.path, {"setting", "runs"})
            self._check(content["runs"])
            other, own = content["setting"], self.setting
            if not isinstance(other, dict):
                raise ValueError(f"{self.path} is damaged (setting: {other!r}): move it away.")
            if other != own:
                changed = [name for name in other.keys() | own.keys() if other.get(name) != own.get(name)]
                values = "; ".join(f"{name}: {other.get(name)}, not {own.get(name)}" for name in sorted(changed))
                raise ValueError(
                    f"{self.path} holds runs of another setting ({values}). Move it away, and the figure beside it, or "
                    "choose another --results."
                )
            self.content = content

    def _check(self, runs: object) -> None:
        seen = []
        for number, run in enumerate(runs if isinstance(runs, list) else [runs], 1):
            try:
                if not is_number(run["after"]) or not (is_seed(run["seed"]) or run["seed"] == SELECTION_SEED):
                    raise TypeError("after must be a number, and seed a whole one")
                if not isinstance(run.get("text", ""), str):
                    raise TypeError("text must be a fingerprint")
                if (own := (dict(run["recipe"]), run["seed"])) in seen:
                    raise ValueError("there twice")
                self.check(run)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
                raise ValueError(f"{self.path} is damaged (run {number}: {problem}): move it away.") from error
            seen.append(own)

    def find(self, recipe: "DataclassInstance", seed: int) -> dict[str, Any] | None:
        return self._find(asdict(recipe), seed)

    def _find(self, recipe: dict[str, Any], seed: int) -> dict[str, Any] | None:
        return next((run for run in self.content["runs"] if (run["recipe"], run["seed"]) == (recipe, seed)), None)

    def runs(self, selecting: bool) -> list[dict[str, Any]]:
        """Those that settings are chosen by, or those that are reported."""
        return [run for run in self.content["runs"] if (run["seed"] == SELECTION_SEED) == selecting]

    def held(self) -> FileLock:
        """For a `with`: one process at a time writes the file and what goes beside it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return FileLock(self.path.with_suffix(".lock"))

    def other_texts(self, fingerprint: str) -> list[str]:
        """The fingerprints of texts that its runs are on, beside this one; the oldest runs name none."""
        return sorted({run["text"] for run in self.content["runs"] if "text" in run} - {fingerprint})

    def add(self, run: dict[str, Any]) -> None:
        """Add a run to what the file holds by now."""
        with self.held():
            self.read()
            if self._find(run["recipe"], run["seed"]):
                return  # another process, with other folders for checkpoints, has made it meanwhile
            self.content["runs"].append(run)
            lines = ",\n".join(json.dumps(run) for run in self.content["runs"])  # a line for each
            atomic_write(self.path, f'{{"setting": {json.dumps(self.setting)}, "runs": [\n{lines}\n]}}\n')


def read_stored(path: Path, keys: set[str]) -> dict[str, Any]:
    """The object of a JSON file that experiments wrote. Raises ValueError: it is none, or lacks one of these keys."""
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is one too
        raise ValueError(f"{path} is damaged ({error}): move it away.") from error
    if not isinstance(content, dict) or not keys <= content.keys():
        raise ValueError(f"{path} is no file of experiments: move it away.")
    return content


def read_declaration(path: Path, readers: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The fields of a YAML file; what it lacks is taken from the file beside it that it is `like`, if it names one.

    Args:
        readers: files that are like this one.

    Raises:
        ValueError: it is none of fields, or like one that is not there or is like itself.
    """
    try:
        fields = load_yaml(path.read_text())
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} holds no fields of a declaration.")
    like = fields.pop("like", None)
    if like is None:
        return fields
    other = path.parent / f"{like}.yaml"
    if path in readers or not other.exists():
        raise ValueError(f"{path} is like {like!r}, which is no other declaration beside it.")
    return read_declaration(other, (*readers, path)) | fields


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


@contextmanager
def _alone(folder: Path | None) -> Iterator[None]:
    """Checkpoints of one run in `folder`: they are this process's while the run is made, and go when it is stored.

    Raises:
        FileExistsError: another process makes that run.
    """
    if folder is None:
        yield
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(f"{folder.name}.lock"), folder):
        yield
        shutil.rmtree(folder, ignore_errors=True)


def results_file(name: str) -> Path:
    """Where the runs of an experiment are stored."""
    return FOLDER / "results" / f"{name}.json"


def page_of(experiment: str) -> Path:
    return FOLDER / f"{experiment}.md"


def tables_file(given: Path | None, experiment: str, size: str, results: Path, is_trial: bool) -> Path:
    """Where tables go: the file given, or the page of the experiment if it has places for them, or beside the runs.

    Raises:
        ValueError: it is damaged, so that nothing could be written there after training.
    """
    page, places = page_of(experiment), f"{size}: "
    has_places = page.exists() and f"<!-- {places}" in page.read_text(encoding="utf-8", errors="replace")
    chosen = given or (page if has_places and not is_trial else results.with_suffix(".md"))
    check_tables(chosen, places)
    return chosen


Measure = Callable[[Planned, Callable[[], None], Path | None], dict[str, Any]]


def make_runs(
    store: Store,
    plan: Iterable[Planned],
    measure: Measure,
    device: str = "cpu",
    folder: Callable[[Planned], Path | None] = lambda run: None,
    on_stored: Callable[[], None] = lambda: None,
) -> None:
    """Make what the store lacks of a plan, and store each run as it ends.

    Args:
        measure: makes a run: calls its second argument after each step, keeps checkpoints in its third, and returns
            what is to be stored beside recipe and seed, `after` (the held-out loss) and `seconds` among it.
        folder: where the checkpoints of a run are, until it is stored.
        on_stored: called after each run, and where none is missing.

    Raises:
        FileExistsError: another process makes one of these runs.
        OSError: nothing could be stored.
    """
    with store.held():
        store.read()
    plan = list({(run.recipe, run.seed): run for run in plan}.values())
    missing = [run for run in plan if store.find(run.recipe, run.seed) is None]
    console = Console()
    console.print(f"Runs stored: {len(plan) - len(missing)} of {len(plan)}.{_to_make(missing)}", highlight=False)
    if not missing:
        on_stored()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("left:"))
    with ProgressBar(*columns, TimeRemainingColumn(), console=console, unit="steps") as progress:
        bar = progress.add_task("", total=sum(run.steps for run in missing))
        for run in missing:
            progress.update(bar, description=str(run))
            origin = made_by(device)
            with _alone(own := folder(run)):
                store.read()
                if store.find(run.recipe, run.seed):  # another process has made it meanwhile
                    progress.advance(bar, run.steps)
                else:
                    result = measure(run, lambda: progress.advance(bar), own)
                    store.add({"recipe": asdict(run.recipe), "seed": run.seed, **result, "made_by": origin})
                    console.print(f"{run}: {result['after']:.4f}, {result['seconds']:.0f} s", highlight=False)
            on_stored()


def _to_make(missing: Sequence[Planned], named: int = 4) -> str:
    """Which runs come, so that a person sees what a call has begun."""
    if not missing:
        return ""
    others = f"; and {len(missing) - named} more" if len(missing) > named else ""
    return f" To make: {'; '.join(map(str, missing[:named]))}{others}."


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
    deviation = deviation_of(values)
    return f"{mean(values):{sign}z.4f}" + ("" if deviation is None else f" ± {deviation:.4f}")


def deviation_of(values: Sequence[float]) -> float | None:
    """Their standard deviation; None of a single one, and where a run diverged."""
    return stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None


def markdown(rows: Sequence[Sequence[str]], texts: int = 1) -> str:
    """A table with a head; the first `texts` columns hold text, the others numbers."""
    head, *rest = rows
    rule = ["---"] * texts + ["---:"] * (len(head) - texts)
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rest)]
    return "\n".join([lines[0], f"|{'|'.join(rule)}|", *lines[1:]])


def distance_of_means(rows: Iterable[Sequence[float]]) -> float:
    """`1/2 sum_i |a_i - 1/n|` of weights that are means over tokens: its mean over the readers with several sources."""
    return mean(sum(abs(weight - 1 / len(row)) for weight in row) / 2 for row in rows if len(row) > 1)
