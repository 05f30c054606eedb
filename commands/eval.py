"""`attnres eval`: load all data, run the models task by task, and report their scores."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import PreTrainedTokenizerBase

from attnres.checkpoints.checkpoint import Checkpoint
from attnres.checkpoints.source import ModelSource
from attnres.eval import sandbox
from attnres.eval.failures import Failures, failure_lines
from attnres.eval.hub_results import FOLDER, HubResults, make_results, write_results
from attnres.eval.paper import Benchmark
from attnres.eval.prompt_encoder import check_special_tokens
from attnres.eval.report import make_notes, plot, to_markdown, to_table
from attnres.eval.rows import make_row
from attnres.eval.shared_prefix import SharedPrefixLM
from attnres.eval.start import BASELINE_RESULTS, CHART, REPORT, RESULTS, EvalOptions, find_lost
from attnres.eval.stored_results import ResultStore, to_json
from attnres.eval.suite import Loaded, collect, find_unfinished, load_all, run_jobs
from attnres.utils.files import atomic_write, locked
from attnres.utils.model_files import TOKENIZER_PATTERNS
from attnres.utils.progress import ProgressBar, status
from attnres.utils.quiet import quiet_transformers

from .missing_results import failure_count_error, print_failures

WIDE = 160  # the width in characters of a table that is not printed on a terminal


@dataclass(frozen=True)
class EvaluatedModel:
    """A model under evaluation.

    Attributes:
        name: The name as the user gave it.
        source: The model, whose checkpoint is opened.
        tokenizer: The tokenizer of the model.
        store: The stored results of the model.
    """

    name: str
    source: ModelSource
    tokenizer: PreTrainedTokenizerBase
    store: ResultStore


def run_eval(options: EvalOptions) -> None:
    """Evaluate one model, or two on the same prompts, and write the report to `options.out`.

    Results are stored task by task, under the settings that decide them. A stored result is not computed again.

    Args:
        options: What to evaluate. Its names and folders must have passed [`attnres.eval.start.check_run`].

    Raises:
        FileExistsError: Another run has locked `out`; or it holds results of other settings, or of a benchmark that
            cannot be loaded now.
        OSError: A model does not exist.
        ValueError: A model has a wrong configuration or no tokenizer, or its tokenizer lacks a special token; or a
            stored result is damaged or belongs to other prompts than the task has now.
        RuntimeError: The command runs in several processes, or some benchmarks have no result. The others are reported.
    """
    console = Console(soft_wrap=True, highlight=False)
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise RuntimeError("attnres eval runs in one process. For several, use accelerate launch -m lm_eval.")
    sources = {name: ModelSource(name) for name in filter(None, (options.model, options.baseline))}
    checkpoints = {name: source.checkpoint for name, source in sources.items()}
    tokenizers = {}
    for name, source in sources.items():
        # A model with a wrong configuration or without a tokenizer must fail before any data is loaded.
        source.check_files()
        tokenizers[name] = source.tokenizer(trust_remote_code=options.trust_remote_code)
        check_special_tokens(tokenizers[name], name)
    options.out.mkdir(parents=True, exist_ok=True)
    with locked(options.out / ".lock", options.out), quiet_transformers():
        models = [
            EvaluatedModel(
                name,
                sources[name],
                tokenizers[name],
                ResultStore(options.out / role, _setup(name, checkpoints[name], options)),
            )
            for role, name in (("baseline", options.baseline), ("model", options.model))
            if name
        ]
        with status(console, "Loading the data ...") as show:

            def on_load(benchmark: Benchmark) -> None:
                show(f"Loading the data of {benchmark.title} ...")

            loaded, failures = load_all(options.benchmarks, options.data, options.allow_code_execution, on_load)
        print_failures(console, failures, options.data)
        tasks = [task for by_name in loaded.values() for task in by_name["tasks"].values()]
        for name, tokenizer in tokenizers.items():
            check_special_tokens(tokenizer, name, any(task.OUTPUT_TYPE == "generate_until" for task in tasks))
        if lost := find_lost(options.out, loaded):
            raise FileExistsError(
                f"{options.out / REPORT} shows {', '.join(lost)}, and would lose that. Make its data load in this "
                "run too, or choose another --out."
            )
        if any(benchmark.runs_code for benchmark in loaded):
            console.print(f"Generated programs run with: {sandbox.level()}.")
        if loaded:
            try:
                failures_of_runs = _run_all(console, models, loaded, options)
            except (KeyboardInterrupt, SystemExit):
                console.print("Stopped. The same command goes on from the tasks that are finished.")
                raise
            print_failures(console, failures_of_runs, options.data)
            failures |= failures_of_runs
            for benchmark in failures_of_runs:
                loaded.pop(benchmark)
        if loaded:
            _report(console, options.out, models, loaded, failure_lines(failures, options.data))
    if failures:
        raise failure_count_error(len(failures), len(options.benchmarks))


def _setup(name: str, checkpoint: Checkpoint, options: EvalOptions) -> dict:
    """Return the settings that decide a model's numbers, with file sizes and times that reveal a replaced file."""
    folder, code = checkpoint.folder, ("**/*.py",) if options.trust_remote_code else ()
    patterns = ("*.json", "*.safetensors", "*.bin", *TOKENIZER_PATTERNS, *code)
    # An index may name weights in other folders.
    paths = {path for pattern in patterns for path in folder.glob(pattern)} | {
        folder / file for file in checkpoint.weight_files
    }
    files = {
        Path(os.path.relpath(path, folder)).as_posix(): [path.stat().st_size, path.stat().st_mtime_ns]
        for path in sorted(paths)
        if path.is_file()
    }
    return {
        "model": name,
        "data": str(options.data) if options.data else "the Hub",
        "limit": options.limit,
        "seed": options.seed,
        # Numbers may depend on the versions of these packages.
        "software": {package: version(package) for package in ("attnres", "lm_eval", "torch", "transformers")},
        "files": files,
    }


def _run_all(console: Console, models: Sequence[EvaluatedModel], loaded: Loaded, options: EvalOptions) -> Failures:
    """Evaluate each model on its unfinished tasks, with one progress bar for all of them."""
    failures: Failures = {}
    with status(console, "Comparing stored results with the tasks ..."):
        jobs_of = {model.name: find_unfinished(loaded, model.store, options.limit, options.seed) for model in models}
    total = sum(job.work for jobs in jobs_of.values() for job in jobs)
    order = {benchmark: number for number, benchmark in enumerate(loaded, 1)}
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with ProgressBar(*columns, TextColumn("left:"), TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("loading", total=total)
        done_before = 0.0
        for model in models:
            jobs = jobs_of[model.name]
            if not jobs:
                continue

            def on_work(
                benchmark: Benchmark, done: float, name: str = model.name, done_before: float = done_before
            ) -> None:
                description = f"{name}: {benchmark.title} ({order[benchmark]} of {len(order)})"
                progress.update(bar, description=description, completed=done_before + done)

            progress.update(bar, description=f"loading {model.name}")
            lm = _load_model(model, options.batch_size)
            failures |= run_jobs(lm, jobs, model.store, limit=options.limit, seed=options.seed, on_work=on_work)
            done_before += sum(job.work for job in jobs)
            # Free the memory for the next model.
            del lm
            torch.cuda.empty_cache()
    return failures


def _load_model(model: EvaluatedModel, batch_size: int) -> SharedPrefixLM:
    """Load a model for `lm_eval` on the GPUs that are there, else on the CPU."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    has_several_devices = torch.cuda.device_count() > 1
    return SharedPrefixLM(
        str(model.source.checkpoint.folder),
        tokenizer=model.tokenizer,
        device=device,
        parallelize=has_several_devices,
        batch_size=batch_size,
        **model.source.as_packed,
    )


def _report(
    console: Console, out: Path, models: Sequence[EvaluatedModel], loaded: Loaded, failures: Sequence[str]
) -> None:
    """Write results, report and chart to `out`, and print the table."""
    results = [collect(loaded, model.store) for model in models]
    model, baseline = models[-1], models[0] if len(models) > 1 else None
    baseline_pair = (results[0], baseline.store) if baseline else None
    rows = [make_row(benchmark, tasks, results[-1], model.store, baseline_pair) for benchmark, tasks in loaded.items()]
    names = model.name, baseline.name if baseline else None
    by_model = results[-1], results[0] if baseline else None
    report = to_markdown(rows, failures, *names, *by_model)
    # All checks are above, since files are replaced from here on.
    for file, combined in zip((RESULTS, BASELINE_RESULTS), reversed(results)):
        atomic_write(out / file, to_json(combined, indent=2))
    atomic_write(out / REPORT, report)
    plot(rows, out / CHART, *names)
    console.print(to_table(rows, *names), width=None if console.is_terminal else WIDE)
    for note in make_notes(rows, *names, *by_model):
        console.print(f"Note: {escape(note)}")
    console.print(f"Written to [bold]{escape(str(out))}[/]: {REPORT}, {CHART}, {RESULTS}.")
    _write_for_hub(console, out, make_results(rows, results[-1], names[1]))


def _write_for_hub(console: Console, out: Path, hub_results: HubResults) -> None:
    """Write the entries for the Hub, and print which benchmarks have no entry and why."""
    if written := write_results(out, hub_results):
        files = ", ".join(path.name for path in written)
        console.print(f"For the Hub, in {FOLDER} there: {escape(files)}. attnres push --results publishes them.")
    for line in hub_results.left_out:
        console.print(f"Not for the Hub: {escape(line)}")
