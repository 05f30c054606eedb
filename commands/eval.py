"""`attnres eval`: load all data, run the models task by task, and report what they score."""

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from attnres.conversion.checkpoint import find
from attnres.conversion.tokenizers import load_tokenizer
from attnres.eval import sandbox
from attnres.eval.benchmarks import Benchmark
from attnres.eval.failures import Failures, failure_lines
from attnres.eval.hub_results import FOLDER, HubResults, make_results, write_results
from attnres.eval.report import make_row, markdown, plot, screen, tell_cut, tell_revisions
from attnres.eval.shared_prefix import SharedPrefixLM
from attnres.eval.start import BASELINE_RESULTS, CHART, REPORT, RESULTS, find_lost
from attnres.eval.store import ResultStore, to_json
from attnres.eval.suite import Loaded, collect, load_all, run_jobs, software, unfinished
from attnres.utils.files import atomic_write, locked
from attnres.utils.progress import ProgressBar, status
from attnres.utils.quiet import quiet_transformers

from .left_out import no_result, tell

WIDE = 160  # characters of a table that goes to a file


@dataclass(frozen=True)
class EvaluatedModel:
    """A model under evaluation: its name as given, its directory, and the store of its results."""

    name: str
    folder: Path
    store: ResultStore


def run_eval(
    model: str,
    out: Path,
    *,
    baseline: str | None = None,
    benchmarks: Sequence[Benchmark],
    data: Path | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    allow_code_execution: bool = False,
    seed: int = 0,
) -> None:
    """Evaluate the directory or Hub repository `model`, and `baseline` on the same prompts, and report in `out`.

    What `out` holds already is not computed again: results are stored task by task, under the settings that decide
    them. Names and folders are as [`attnres.eval.start.check_run`] wants them.

    Args:
        benchmarks: as from [`attnres.eval.benchmarks.pick`].
        data: a folder that holds the data sets as `ORG/NAME`, read instead of the Hub.
        limit: the first so many items of each task.

    Raises:
        FileExistsError: `out` holds results of another setup, or of a benchmark that cannot be loaded now.
        OSError, ValueError: a model is not there or has no tokenizer, a stored result is damaged, or it was not asked
            what is asked now.
        RuntimeError: some benchmarks have no result; the others are reported.
    """
    console = Console(soft_wrap=True, highlight=False)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RuntimeError("attnres eval runs as one process. Over several, use accelerate launch -m lm_eval.")
    folders = {name: find(name) for name in filter(None, (model, baseline))}
    for folder in folders.values():
        load_tokenizer(folder)  # refuses a model without one before any data is loaded
    with _only_run(out), quiet_transformers():
        subjects = [
            EvaluatedModel(name, folders[name], ResultStore(out / role, _setup(name, folders[name], data, limit, seed)))
            for role, name in (("baseline", baseline), ("model", model))
            if name
        ]
        with status(console, "Loading the data ...") as show:

            def on_load(benchmark: Benchmark) -> None:
                show(f"Loading the data of {benchmark.title} ...")

            loaded, failures = load_all(benchmarks, data, allow_code_execution, on_load)
        tell(console, failures, data)
        if lost := find_lost(out, loaded):
            raise FileExistsError(
                f"{out / REPORT} shows {', '.join(lost)}, and would lose that. Let this run have it too, or choose "
                "another --out."
            )
        if any(benchmark.runs_code for benchmark in loaded):
            console.print(f"Generated programs run with: {sandbox.level()}.")
        if loaded:
            try:
                failed = _run_all(console, subjects, loaded, limit, batch_size, seed)
            except (KeyboardInterrupt, SystemExit):
                console.print("Stopped. The same command goes on from the tasks that are finished.")
                raise
            tell(console, failed, data)
            failures |= failed
            for benchmark in failed:
                loaded.pop(benchmark)
        if loaded:
            _report(console, out, subjects, loaded, failure_lines(failures, data))
    if failures:
        raise no_result(len(failures), len(benchmarks))


@contextlib.contextmanager
def _only_run(out: Path) -> Iterator[None]:
    """Hold the directory `out`, which is new, empty, or an earlier run's.

    Raises:
        FileExistsError: another run is in it.
    """
    out.mkdir(parents=True, exist_ok=True)
    with locked(out / ".lock", out):
        yield


def _setup(name: str, folder: Path, data: Path | None, limit: int | None, seed: int) -> dict:
    """What decides the numbers of a model; of its files, what tells that they were not replaced."""
    files = {
        path.name: [path.stat().st_size, path.stat().st_mtime_ns]
        for path in sorted(folder.iterdir())
        if path.suffix in {".json", ".safetensors", ".bin", ".model"}
    }
    where = str(data) if data else "the Hub"
    return {"model": name, "data": where, "limit": limit, "seed": seed, "software": software(), "files": files}


def _run_all(
    console: Console, subjects: Sequence[EvaluatedModel], loaded: Loaded, limit: int | None, batch_size: int, seed: int
) -> Failures:
    failures: Failures = {}
    with console.status("Comparing what is stored with what is asked now ..."):
        todo = {subject.name: unfinished(loaded, subject.store, limit, seed) for subject in subjects}
    total = sum(job.work for jobs in todo.values() for job in jobs)
    order = {benchmark: number for number, benchmark in enumerate(loaded, 1)}
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with ProgressBar(*columns, TextColumn("left:"), TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("loading", total=total)
        before = 0.0
        for subject in subjects:
            jobs = todo[subject.name]
            if not jobs:
                continue

            def on_work(benchmark: Benchmark, done: float, name: str = subject.name, before: float = before) -> None:
                what = f"{name}: {benchmark.title} ({order[benchmark]} of {len(order)})"
                progress.update(bar, description=what, completed=before + done)

            progress.update(bar, description=f"loading {subject.name}")
            lm = _load_model(subject.folder, batch_size)
            failures |= run_jobs(lm, jobs, subject.store, limit=limit, seed=seed, on_work=on_work)
            before += sum(job.work for job in jobs)
            del lm
            torch.cuda.empty_cache()
    return failures


def _load_model(folder: Path, batch_size: int) -> SharedPrefixLM:
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    several = torch.cuda.device_count() > 1
    return SharedPrefixLM(str(folder), device=device, parallelize=several, batch_size=batch_size)


def _report(
    console: Console, out: Path, subjects: Sequence[EvaluatedModel], loaded: Loaded, failures: list[str]
) -> None:
    results = [collect(loaded, subject.store) for subject in subjects]
    model, baseline = subjects[-1], subjects[0] if len(subjects) > 1 else None
    other = (results[0], baseline.store) if baseline else None
    rows = [make_row(benchmark, tasks, results[-1], model.store, other) for benchmark, tasks in loaded.items()]
    names = model.name, baseline.name if baseline else None
    report = markdown(rows, failures, *names, results=results[-1])
    # Whatever can be refused was refused above: from here on files are replaced.
    for file, combined in zip((RESULTS, BASELINE_RESULTS), reversed(results)):
        atomic_write(out / file, to_json(combined, indent=2))
    atomic_write(out / REPORT, report)
    plot(rows, out / CHART, *names)
    console.print(screen(rows, *names), width=None if console.is_terminal else WIDE)
    if cut := tell_cut(rows, model.name):
        console.print(f"Note: {escape(cut)}")
    if revisions := tell_revisions(rows):
        console.print(f"Note: {escape(revisions)}")
    console.print(f"Written to [bold]{escape(str(out))}[/]: {REPORT}, {CHART}, {RESULTS}.")
    _write_for_hub(console, out, make_results(rows, results[-1], names[1]))


def _write_for_hub(console: Console, out: Path, found: HubResults) -> None:
    if written := write_results(out, found):
        files = ", ".join(path.name for path in written)
        console.print(f"For the Hub, in {FOLDER} there: {escape(files)}. attnres push --results publishes them.")
    for line in found.left_out:
        console.print(f"Not for the Hub: {escape(line)}")
