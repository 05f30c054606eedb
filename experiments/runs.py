"""Making runs: each run that a plan names and the store lacks is trained, and stored as it ends."""

import ctypes
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from attnres.utils.files import locked
from attnres.utils.progress import ProgressBar

from .declared import SELECTION_SEED
from .store import ROOT, RunStore


@dataclass(frozen=True)
class PlannedRun:
    """A run that a table needs.

    Attributes:
        label: The name of the run on the screen.
        recipe: What identifies the run in the store, beside the seed.
        seed: The seed of the initial weights and of the order of the text.
        steps: Optimizer steps.
    """

    label: str
    recipe: dict[str, Any]
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
        """The name of the run as the name of a folder."""
        return re.sub(r"[^\w.=-]+", "_", str(self))


def make_runs(
    store: RunStore,
    plan: list[PlannedRun],
    measure: Callable[[PlannedRun, Callable[[], None], Path], dict[str, Any]],
    work: Path,
    identity: dict[str, Any],
    device: str = "cpu",
) -> None:
    """Train the runs of a plan that the store lacks, and store each as it ends.

    Args:
        store: The store.
        plan: The runs.
        measure: Trains a run. It calls its second argument after each step, and keeps checkpoints in its third. It
            returns what is stored beside recipe and seed: `after` (held-out loss, nats/token), `seconds`, ...
        work: The folder for checkpoints.
        identity: What a run depends on beside its recipe and seed. A run resumes from checkpoints of the same identity.
        device: `cpu` or `cuda`; stored with the run.

    Raises:
        FileExistsError: Another process is making one of these runs.
        OSError: The file of the store cannot be written.
    """
    missing = [run for run in plan if store.find(run.recipe, run.seed) is None]
    print(f"Runs stored: {len(plan) - len(missing)} of {len(plan)}.")
    if missing:
        with store.update():  # a file that cannot be written is found now, and not after hours of training
            pass
    work.mkdir(parents=True, exist_ok=True)
    console, columns = Console(), (TextColumn("{task.description}"), BarColumn(), TextColumn("left:"))
    with ProgressBar(*columns, TimeRemainingColumn(), console=console, unit="steps") as progress:
        bar = progress.add_task("", total=sum(run.steps for run in missing))
        for run in missing:
            progress.update(bar, description=str(run))
            key = json.dumps([identity, run.recipe, run.seed], sort_keys=True)
            folder = work / f"{run.folder}-{hashlib.sha256(key.encode()).hexdigest()[:10]}"
            with locked(folder.with_name(f"{folder.name}.lock"), folder):
                store.read()
                if store.find(run.recipe, run.seed):  # another process has made it in the meantime
                    progress.advance(bar, run.steps)
                    continue
                origin = made_by(device)  # before the training, during which the code may change
                result = measure(run, lambda: progress.advance(bar), folder)
                with store.update():
                    store.runs.append({"recipe": run.recipe, "seed": run.seed, **result, "made_by": origin})
                shutil.rmtree(folder, ignore_errors=True)
            console.print(f"{run}: {result['after']:.4f}, {result['seconds']:.0f} s", highlight=False)


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
    name = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    forced = os.name == "posix" and hasattr(ctypes.CDLL(None), "mkl_serv_intel_cpu_true")
    return origin | {"device": name[1] if name else platform.machine()} | ({"forced_avx512": True} if forced else {})


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "*.py", "*.yaml")
        return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
