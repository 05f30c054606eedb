"""The options of an evaluation, and the checks of paths and data before it, without importing lm_eval or PyTorch.

The command line runs these checks first, so that a mistake costs no time.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from attnres.checkpoints.source import ModelSource
from attnres.utils.errors import about
from attnres.utils.files import check_writable
from attnres.utils.hub import describe_adapter, is_adapter, is_dataset_cached, is_offline, use_cache_alone

from .failures import Failures, Reason, TaskFailure, code_refused, data_missing
from .hub_results import FOLDER
from .paper import Benchmark, benchmarks

# The files of `--out`.
RESULTS, BASELINE_RESULTS, REPORT, CHART = "results.json", "baseline.json", "report.md", "scores.png"
_REMEDY = "Remove it: it is written again."


@dataclass(frozen=True)
class EvalOptions:
    """The options of an evaluation, as the command line gives them.

    Attributes:
        model: The directory or Hub id of the model.
        out: The folder for results. A stopped run with the same `out` resumes there.
        benchmarks: The benchmarks, from [`attnres.eval.benchmarks.pick`].
        baseline: The directory or Hub id of a second model, which is compared with the first item by item.
        data: A folder that holds the data sets as `ORG/NAME`, read instead of the Hub.
        limit: How many items of each task are asked, from the first; `None` for all.
        batch_size: The number of sequences at a time. It is halved when memory runs out.
        allow_code_execution: Whether programs that the model writes may run, in a sandbox.
        seed: The seed of the prompts.
        trust_remote_code: Whether code that comes with a tokenizer may run. Code of a model never does.
    """

    model: str
    out: Path
    benchmarks: Sequence[Benchmark]
    baseline: str | None = None
    data: Path | None = None
    limit: int | None = None
    batch_size: int = 8
    allow_code_execution: bool = False
    seed: int = 0
    trust_remote_code: bool = False


def check_run(options: EvalOptions) -> None:
    """Check the names of models and folders, and that a new report in `out` shows all that an earlier one shows.

    Raises:
        FileExistsError: `out` holds other files than those of an evaluation, or a report with more benchmarks or
            models.
        FileNotFoundError: A model or the data folder does not exist.
        ValueError: Both models are the same, or one is an adapter.
    """
    if options.baseline == options.model:
        raise ValueError(f"MODEL and --baseline are both {options.model}. Compare two models, or leave out --baseline.")
    if options.data is not None and not options.data.is_dir():
        raise FileNotFoundError(f"--data {options.data} is not a directory.")
    for name in filter(None, (options.model, options.baseline)):
        if is_adapter(name):
            raise ValueError(
                f"{describe_adapter(name)} Or evaluate it on its base, by the harness alone: lm_eval run --model hf "
                f"--model_args pretrained=BASE,peft={name},trust_remote_code=True --tasks ..."
            )
        ModelSource(name).check(needs_weights=True)
    out = options.out
    written = {RESULTS, BASELINE_RESULTS, REPORT, CHART}
    # `atomic_write` leaves `.NAME.partial` behind when it is killed.
    known = {"model", "baseline", FOLDER, ".lock", *written, *(f".{name}.partial" for name in written)}
    if out.exists() and (not out.is_dir() or {path.name for path in out.iterdir()} - known):
        raise FileExistsError(f"{out} holds other files than those of this command. Choose another --out.")
    check_writable(out, f"--out {out}")
    if lost := find_lost(out, options.benchmarks):
        tasks = ",".join([*(benchmark.name for benchmark in options.benchmarks), *lost])
        raise FileExistsError(
            f"{out / REPORT} also shows {', '.join(lost)}, which a new report would lose. Give --tasks {tasks} "
            "(finished tasks are not computed again), or choose another --out."
        )
    if options.baseline is None and (out / BASELINE_RESULTS).exists():
        with about(out / BASELINE_RESULTS, _REMEDY):
            results = json.loads((out / BASELINE_RESULTS).read_text(encoding="utf-8"))
            name = results["config"]["model_args"]["pretrained"]
        raise FileExistsError(
            f"{out / REPORT} compares with {name}, which a new report would lose. Give --baseline {name}, or "
            "choose another --out."
        )


def find_lost(out: Path, kept: Collection[Benchmark]) -> list[str]:
    """Return the names of the benchmarks that the report in `out` shows and a new report would lose.

    Args:
        out: The folder of an evaluation; it need not exist.
        kept: The benchmarks of the new report.

    If the results of the earlier run are damaged, an error of any kind has a note that names the file.
    """
    if not (out / RESULTS).exists():
        return []
    with about(out / RESULTS, _REMEDY):
        results = json.loads((out / RESULTS).read_text(encoding="utf-8"))
        # The results list groups and their members alike. Only the outermost are benchmarks.
        members = {child for children in results["group_subtasks"].values() for child in children}
        groups = results["results"].keys() - members - {benchmark.group for benchmark in kept}
    names = {benchmark.group: benchmark.name for benchmark in benchmarks().values()}
    return sorted(names.get(group, group) for group in groups)


def find_missing(benchmarks: Sequence[Benchmark], data: Path | None, allow_code_execution: bool) -> Failures:
    """Return the failures that are certain before any data is loaded.

    If the Hub cannot be reached, this process uses the data sets in the Hub's cache and sends no further requests.

    Args:
        benchmarks: The benchmarks to evaluate.
        data: The folder of data sets; `None` for the Hub.
        allow_code_execution: Whether generated programs may run.
    """
    failures: Failures = {}
    # One request for all data sets, because a slow Hub takes seconds to answer.
    hub_is_offline = cache(is_offline)
    for benchmark in benchmarks:
        if benchmark.runs_code and not allow_code_execution:
            failures[benchmark] = code_refused(benchmark)
        elif benchmark.dataset is not None and data is not None:
            if not (folder := data / benchmark.dataset).is_dir():
                error = data_missing(benchmark, data, f"there is no folder {folder}")
                failures[benchmark] = TaskFailure(Reason.ABSENT, str(error))
        elif benchmark.dataset is not None and not is_dataset_cached(benchmark.dataset) and hub_is_offline():
            use_cache_alone()
            error = data_missing(benchmark, None, "the Hub cannot be reached, and its cache does not have it")
            failures[benchmark] = TaskFailure(Reason.ABSENT, str(error))
    return failures


__all__ = ["BASELINE_RESULTS", "CHART", "REPORT", "RESULTS", "EvalOptions", "check_run", "find_lost", "find_missing"]
