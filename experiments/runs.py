"""Making runs: each run that a plan names and the store lacks is trained, and stored as it ends."""

import ctypes
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from attnres.utils.files import locked
from attnres.utils.progress import ProgressBar

from .declared import SELECTION_SEED
from .store import ROOT, RunStore

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

NAMED = 4  # runs that the first line of a call names; it counts the others


@dataclass(frozen=True)
class PlannedRun:
    """A run that a table needs.

    Attributes:
        label: its name on the screen.
        recipe: what identifies it in the store, beside the seed.
        seed: of the initial weights and of the order of the text.
        steps: optimiser steps.
    """

    label: str
    recipe: "DataclassInstance"
    seed: int
    steps: int

    def __str__(self) -> str:
        return f"{self.label}, seed {self.seed}"

    @property
    def selecting(self) -> bool:
        """Whether the run chooses settings, on text that is not reported."""
        return self.seed == SELECTION_SEED

    @property
    def folder(self) -> str:
        """The name of the run as that of a folder."""
        return re.sub(r"[^\w.=-]+", "_", str(self))


# Trains a run. It calls its second argument after each step, and keeps checkpoints in the folder that is its third.
# It returns what is stored beside recipe and seed: `after` (held-out loss, nats/token), `seconds`, ...
Measure = Callable[[PlannedRun, Callable[[], None], Path | None], dict[str, Any]]


def make_runs(
    store: RunStore,
    plan: Iterable[PlannedRun],
    measure: Measure,
    device: str = "cpu",
    checkpoints: Callable[[PlannedRun], Path | None] = lambda run: None,
    on_stored: Callable[[], None] = lambda: None,
) -> None:
    """Train the runs of a plan that the store lacks, and store each as it ends.

    Args:
        store: where the runs go.
        plan: the runs; one that is named twice is made once.
        measure: trains a run.
        device: `cpu` or `cuda`; stored with the run.
        checkpoints: the folder for the checkpoints of a run, removed when the run is stored.
        on_stored: called after each run, and once if none is missing.

    Raises:
        FileExistsError: another process makes one of these runs.
        OSError: nothing could be stored.
    """
    with store.held():  # also finds out before training that the file can be written
        store.read()
    plan = list({(run.recipe, run.seed): run for run in plan}.values())
    missing = [run for run in plan if store.find(run.recipe, run.seed) is None]
    names = "; ".join(map(str, missing[:NAMED]))
    others = f"; and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
    console = Console()
    to_make = f" To make: {names}{others}." if missing else ""
    console.print(f"Runs stored: {len(plan) - len(missing)} of {len(plan)}.{to_make}", highlight=False)
    if not missing:
        on_stored()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("left:"))
    with ProgressBar(*columns, TimeRemainingColumn(), console=console, unit="steps") as progress:
        bar = progress.add_task("", total=sum(run.steps for run in missing))
        for run in missing:
            progress.update(bar, description=str(run))
            origin = made_by(device)
            folder = checkpoints(run)
            with _only_process(folder):
                store.read()
                if store.find(run.recipe, run.seed):  # another process has made it in the meantime
                    progress.advance(bar, run.steps)
                else:
                    result = measure(run, lambda: progress.advance(bar), folder)
                    store.add({"recipe": asdict(run.recipe), "seed": run.seed, **result, "made_by": origin})
                    console.print(f"{run}: {result['after']:.4f}, {result['seconds']:.0f} s", highlight=False)
            on_stored()


def checkpoint_folder(work: Path | None, setting: Mapping[str, Any], run: PlannedRun) -> Path | None:
    """Return the folder in `work` for the checkpoints of a run, which no other setting, recipe or seed shares."""
    identity = json.dumps([setting, asdict(run.recipe), run.seed], sort_keys=True)
    return work and work / f"{run.folder}-{hashlib.sha256(identity.encode()).hexdigest()[:10]}"


@contextmanager
def _only_process(folder: Path | None) -> Iterator[None]:
    """Hold the checkpoints of a run while it is made, and remove them when it is stored."""
    if folder is None:
        yield
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(f"{folder.name}.lock"), folder):
        yield
        shutil.rmtree(folder, ignore_errors=True)


def made_by(device: str) -> dict[str, Any]:
    """Describe what makes a run: commit (with a + if code or declarations are changed), versions, processor.

    The environment variable `ATTNRES_COMMIT` names the commit of a copy without history. `forced_avx512` means that a
    preloaded library lets MKL use AVX-512 on an AMD processor.
    """
    versions = {name: version(name) for name in ("torch", "transformers")}
    origin = {"commit": os.environ.get("ATTNRES_COMMIT") or _commit(), "python": platform.python_version(), **versions}
    if device == "cuda":
        return origin | {"device": torch.cuda.get_device_name()}
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    forced = os.name == "posix" and hasattr(ctypes.CDLL(None), "mkl_serv_intel_cpu_true")
    return origin | {"device": next(names, platform.machine())} | ({"forced_avx512": True} if forced else {})


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "*.py", "*.yaml")
        return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
