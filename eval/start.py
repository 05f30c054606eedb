"""What can be told of an evaluation before lm_eval and PyTorch are imported: wrong paths, data that is not there."""

import json
import os
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path

from huggingface_hub import constants

from attnres.utils.hub import check_source, is_cached, is_offline

from .benchmarks import Benchmark, benchmarks, data_missing
from .failures import Failure, Failures, Reason
from .hub_results import FOLDER

RESULTS, BASELINE_RESULTS, REPORT, CHART = "results.json", "baseline.json", "report.md", "scores.png"


def check_run(
    model: str, out: Path, asked: Collection[Benchmark], baseline: str | None = None, data: Path | None = None
) -> None:
    """Check the names of models and folders, and that the report in `out` will show what it shows.

    Raises:
        FileExistsError: `out` holds other files than those of an evaluation, or more than is asked for.
        FileNotFoundError: a model or the data folder is not there.
        ValueError: both models are the same.
    """
    if baseline == model:
        raise ValueError(f"MODEL and --baseline are both {model}. Compare two models, or leave out --baseline.")
    if data is not None and not data.is_dir():
        raise FileNotFoundError(f"--data {data} is not a directory.")
    for name in filter(None, (model, baseline)):
        check_source(name)
    written = {RESULTS, BASELINE_RESULTS, REPORT, CHART}
    known = {"model", "baseline", FOLDER, ".lock", *written, *(f".{name}.partial" for name in written)}
    if out.exists() and (not out.is_dir() or {path.name for path in out.iterdir()} - known):
        raise FileExistsError(f"{out} holds other files than those of this command. Choose another --out.")
    if lost := find_lost(out, asked):
        tasks = ",".join([*(benchmark.name for benchmark in asked), *lost])
        raise FileExistsError(
            f"{out / REPORT} shows {', '.join(lost)} too, and would lose that. Give --tasks {tasks}, where what is "
            "finished is not computed again, or choose another --out."
        )
    if baseline is None and (out / BASELINE_RESULTS).exists():
        name = _read(out / BASELINE_RESULTS)["config"]["model_args"]["pretrained"]
        raise FileExistsError(
            f"{out / REPORT} compares with {name}, and would lose that. Give --baseline {name}, or choose "
            "another --out."
        )


def find_lost(out: Path, kept: Collection[Benchmark]) -> list[str]:
    """The names of the benchmarks that the report in `out` shows, and that are not among those `kept`."""
    if not (out / RESULTS).exists():
        return []
    results = _read(out / RESULTS)
    parts = {child for children in results["group_subtasks"].values() for child in children}
    names = {benchmark.group: benchmark.name for benchmark in benchmarks().values()}
    groups = results["results"].keys() - parts - {benchmark.group for benchmark in kept}
    return sorted(names.get(group, group) for group in groups)


def _read(path: Path) -> dict:
    """What an earlier run told of a model."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        content["results"].keys(), content["config"]["model_args"]["pretrained"]
        {child for children in content["group_subtasks"].values() for child in children}
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error!r}). Remove it: it is written again.") from error
    return content


def find_missing(benchmarks: Sequence[Benchmark], data: Path | None, allow_code_execution: bool) -> Failures:
    """The benchmarks that cannot run, as far as that shows without loading anything.

    Where the Hub cannot be reached, what is in its cache is used without asking it again.
    """
    failures: Failures = {}
    cannot_ask = cache(is_offline)  # of one Hub, once, whatever is asked for: where it is slow the answer takes seconds
    for benchmark in benchmarks:
        if benchmark.runs_code and not allow_code_execution:
            failures[benchmark] = code_refused(benchmark)
        elif benchmark.dataset is not None and data is not None:
            if not (folder := data / benchmark.dataset).is_dir():
                error = data_missing(benchmark, data, f"there is no folder {folder}")
                failures[benchmark] = Failure(Reason.ABSENT, str(error))
        elif benchmark.dataset is not None and not _is_cached(benchmark.dataset) and cannot_ask():
            constants.HF_HUB_OFFLINE = True
            error = data_missing(benchmark, None, "the Hub cannot be reached, and its cache does not have it")
            failures[benchmark] = Failure(Reason.ABSENT, str(error))
    return failures


def code_refused(benchmark: Benchmark) -> Failure:
    """Of a benchmark that runs programs, where that is not allowed."""
    text = f"{benchmark.title} runs programs that the model writes; --allow-code-execution allows it."
    return Failure(Reason.RUNS_CODE, text)


def _is_cached(dataset: str) -> bool:
    """Whether the Hub's cache, or that of `datasets`, has anything of a data set."""
    read = Path(os.environ.get("HF_DATASETS_CACHE", Path(constants.HF_HOME) / "datasets"))
    # `datasets` writes `TIGER-Lab/MMLU-Pro` as `TIGER-Lab___mmlu-pro`.
    folder = dataset.replace("/", "___").lower()
    return is_cached("datasets", dataset) or any(path.name.lower() == folder for path in read.glob("*___*"))


__all__ = ["BASELINE_RESULTS", "CHART", "REPORT", "RESULTS", "check_run", "code_refused", "find_lost", "find_missing"]
