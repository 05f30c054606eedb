"""Models through the benchmarks, with lm-evaluation-harness: task by task, each result stored as it ends."""

import contextlib
import importlib.metadata
import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import FunctionType, NoneType
from typing import Any

import lm_eval.api.task
from lm_eval.api.task import Task
from lm_eval.evaluator import evaluate
from lm_eval.tasks.manager import TaskDict
from tqdm import tqdm
from transformers import set_seed

from . import data_folder, sandbox
from .benchmarks import load
from .failures import DataMissing, Failures, Reason, TaskFailure, code_refused
from .items import HASHES, changed, items_now, items_of
from .paper import Benchmark
from .shared_prefix import SharedPrefixLM
from .store import ResultStore, to_json
from .templates import TemplateTooLong, bounded_templates

Loaded = dict[Benchmark, TaskDict]

# What the harness says of each task in its results, beside the samples.
PARTS = ("results", "configs", "versions", "n-shot", "higher_is_better", "n-samples")
# An answer of many tokens takes longer than a choice: in the time left, so many tokens count like one choice.
TOKENS_LIKE_A_CHOICE = 32
DEFAULT_GENERATED_TOKENS = 256  # the harness's


def load_all(
    chosen: Sequence[Benchmark], data: Path | None, allow_code_execution: bool, on_load: Callable[[Benchmark], None]
) -> tuple[Loaded, Failures]:
    """Load the data of every benchmark, before any model runs; `on_load` hears of each before it begins."""
    loaded, failures = {}, {}
    for benchmark in chosen:
        on_load(benchmark)
        if benchmark.runs_code and not allow_code_execution:
            failures[benchmark] = code_refused(benchmark)
            continue
        try:
            if benchmark.runs_code:
                sandbox.available()
            loaded[benchmark] = load(benchmark, data)
        except DataMissing as error:
            failures[benchmark] = TaskFailure(Reason.ABSENT if error.is_absent else Reason.OTHER, str(error))
        except RuntimeError as error:  # nothing here would contain the programs
            failures[benchmark] = TaskFailure(Reason.OTHER, f"{benchmark.title}: {error}")
    _check_distinct(loaded)
    return loaded, failures


def _check_distinct(loaded: Loaded) -> None:
    """Results are stored by the task's name: no two benchmarks may have one that they ask in their own ways."""
    first: dict[str, Benchmark] = {}
    for benchmark, found in loaded.items():
        for name in found["tasks"]:
            other = first.setdefault(name, benchmark)
            if other is not benchmark:
                raise ValueError(f"--tasks: {other.name} and {benchmark.name} both hold the task {name}. Choose one.")


def num_items(task: Task, limit: int | None) -> int:
    return min(len(task.task_docs), limit or len(task.task_docs))


def work(task: Task, limit: int | None) -> float:
    """What a task costs, in choices; only for the estimate of the time left."""
    if task.OUTPUT_TYPE != "generate_until":
        return num_items(task, limit)
    return num_items(task, limit) * (1 + _longest_answer(task) / TOKENS_LIKE_A_CHOICE)


def _longest_answer(task: Task) -> int:
    """The tokens that a benchmark reserves for an answer."""
    return (task.config.generation_kwargs or {}).get("max_gen_toks", DEFAULT_GENERATED_TOKENS)


@dataclass(frozen=True)
class Job:
    """A task to run on a model, and how much of all the [`work`] it is."""

    benchmark: Benchmark
    task: Task
    work: float


def unfinished(loaded: Loaded, store: ResultStore, limit: int | None, seed: int) -> list[Job]:
    """Return the tasks that the store has no result of, in order.

    What is stored is reported again without a model, so it must be the answer to what the tasks ask now.

    Raises:
        ValueError: a stored result is damaged, was edited, or answers something else than the task asks now: another
            form of the task, or other documents, prompts or gold answers. In one line.
    """
    jobs = []
    for benchmark, found in loaded.items():
        for name, task in found["tasks"].items():
            if name in store:
                stored = read_result(store, benchmark, name)
                _check_same_task(task, stored, store.path(name))
                _check_same_items(task, stored, store.path(name), limit, seed)
            else:
                jobs.append(Job(benchmark, task, work(task, limit)))
    return jobs


def read_result(store: ResultStore, benchmark: Benchmark, name: str) -> dict[str, Any]:
    """Return the stored result of a task.

    Args:
        benchmark: the one that asks the task; its items must be scored by its metric.
        name: of the task.

    Raises:
        ValueError: it is damaged, was edited, or lacks a part, as one of another version may. In one line.
    """
    stored = store.read(name)
    if wrong := _wrong_part(stored, benchmark, name):
        raise ValueError(
            f"{store.path(name)} is not a result that this version reads: its {wrong} is missing or of another form. "
            "Remove it, and the same command computes it again."
        )
    return stored


def _wrong_part(stored: Mapping[str, Any], benchmark: Benchmark, name: str) -> str | None:
    """Return the first part of a result that is not as `_evaluate` writes it, if there is one."""
    number = (int, float)
    keys = [key for key in (benchmark.metric, benchmark.second) if key]
    # Where a part lies, and of what type it must be.
    form: dict[tuple[str, ...], Any] = {
        **{(part,): dict for part in PARTS},
        ("results", name): dict,
        **{("results", name, key): number for key in keys},
        ("results", name, "sample_len"): int,
        ("configs", name): dict,
        ("n-shot", name): int,
        ("n-samples", name): dict,
        ("n-samples", name, "original"): int,
        ("n-samples", name, "effective"): int,
        ("cut",): number,
        ("scoring",): str,
        ("model",): dict,
        ("model", "model_num_parameters"): int,
        ("model", "model_dtype"): str,
        ("samples",): list,
        ("dataset_revision",): (str, NoneType),
        ("date",): (str, NoneType),
    }
    for place, kind in form.items():
        part: Any = stored
        for key in place:
            part = part.get(key)  # what holds it was checked before, as it stands above
        if not isinstance(part, kind):
            return " of ".join(reversed(place))
    if not isinstance(stored["configs"][name].get("metadata") or {}, dict):
        return f"metadata of {name} of configs"
    metrics = {scoring: metric for metric, scoring in (key.split(",") for key in keys)}
    for sample in stored["samples"]:
        kinds = {"doc_id": int, "filter": str, **dict.fromkeys(HASHES, str)}
        if not isinstance(sample, dict) or not all(isinstance(sample.get(key), kind) for key, kind in kinds.items()):
            return "samples"
        metric = metrics.get(sample["filter"])
        if metric is not None and not _is_score(sample.get(metric)):
            return f"{metric} of a sample"
    return None


def _is_score(value: object) -> bool:
    """Whether an item's score is a number; the harness writes those of some NumPy types as text."""
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


# What of a task's configuration may differ between runs that ask the same: where the data lies, and what `_evaluate`
# settles.
_MAY_DIFFER = {"dataset_path", "dataset_kwargs", "metadata", "generation_kwargs", "num_fewshot"}


def _check_same_task(task: Task, stored: Mapping[str, Any], path: Path) -> None:
    """Raise ValueError if the task's configuration changed since its result was stored."""
    if stored["scoring"] != _scoring_digest(task):
        raise ValueError(
            f"{path} is a result of other scoring code than the task {task.task_name} has now. "
            "Choose another --out, or remove the file to compute it again."
        )
    config = stored["configs"][task.task_name]
    now = json.loads(to_json(task.dump_config()))
    known = {**config, "num_fewshot": config.get("num_fewshot") or 0}
    asked = {**now, "num_fewshot": now.get("num_fewshot") or 0}
    for key in [*sorted(asked.keys() - _MAY_DIFFER), "num_fewshot"]:
        values = [_ADDRESS.sub("", to_json({key: config.get(key)})) for config in (known, asked)]
        if values[0] != values[1]:
            raise ValueError(
                f"{path} is a result with another {key} of the task {task.task_name}. "
                "Choose another --out, or remove the file to compute it again."
            )


def _scoring_digest(task: Task) -> str:
    """Return a hash of the Python code that takes the answers of a task from the texts and scores them.

    It covers the files of the functions that the task file names, and files beside them from which those take
    functions. The configuration says no more of them than their names.
    """
    config = task.config
    steps = [step for entry in config.filter_list or [] for step in entry["filter"]]
    metrics = [value for entry in config.metric_list or [] for value in entry.values()]
    files: set[Path] = set()
    for function in [config.process_results, *metrics, *(value for step in steps for value in step.values())]:
        if isinstance(function, FunctionType):
            folder = Path(function.__code__.co_filename).parent
            near = [value for value in function.__globals__.values() if isinstance(value, FunctionType)]
            paths = {Path(one.__code__.co_filename) for one in (function, *near)}
            files |= {path for path in paths if path.parent == folder and path.is_file()}
    # By content alone: where the package lies does not count.
    return sha256("".join(sorted(sha256(path.read_bytes()).hexdigest() for path in files)).encode()).hexdigest()


def _check_same_items(task: Task, stored: Mapping[str, Any], path: Path, limit: int | None, seed: int) -> None:
    """Raise ValueError if the data or the prompts of the task changed since: its number would be of other items."""
    _prepare(task, seed)
    try:
        with _quiet_and_quick():
            now = items_now(task, limit)
    except TemplateTooLong as error:
        raise ValueError(f"{task.task_name}: {error}") from error
    if parts := changed(items_of(stored["samples"]), now):
        raise ValueError(
            f"{path} is a result on other {parts} than the task {task.task_name} has now: its data changed. "
            "Choose another --out, or remove the file to compute it again."
        )


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def run_jobs(
    lm: SharedPrefixLM,
    jobs: Sequence[Job],
    store: ResultStore,
    *,
    limit: int | None,
    seed: int,
    on_work: Callable[[Benchmark, float], None],
) -> Failures:
    """Evaluate a model on tasks and store each result.

    Args:
        limit: the first so many items of each task.
        on_work: hears which benchmark is running, and how much work is done since the beginning.

    Returns:
        The benchmarks that ran out of memory even with one sequence at a time, and why; the others go on.
    """
    failures: Failures = {}
    before = 0.0
    for job in jobs:
        on_work(job.benchmark, before)
        lm.progress = lambda done, job=job, before=before: on_work(
            job.benchmark, before + job.work * done / len(job.task.instances)
        )
        if job.benchmark not in failures:
            try:
                store.write(job.task.task_name, _evaluate(lm, job.task, limit, seed))
            except RuntimeError as error:
                text = f"{job.benchmark.title}: {' '.join(str(error).split())}"
                failures[job.benchmark] = TaskFailure(Reason.OTHER, text)
        before += job.work
        on_work(job.benchmark, before)
    return failures


def _evaluate(lm: SharedPrefixLM, task: Task, limit: int | None, seed: int) -> dict[str, Any]:
    """One task: what the harness returns, with what its items add to a comparison, and without their texts."""
    _prepare(task, seed)
    _fit_generation(task, lm.max_length)
    cut_before = lm.cut_requests
    with _quiet_and_quick():
        outputs = evaluate(
            lm, {"tasks": {task.task_name: task}, "groups": {}}, limit=limit, confirm_run_unsafe_code=True
        )
    (samples,) = outputs["samples"].values()
    cut = (lm.cut_requests - cut_before) / len(task.instances)
    task._instances = None  # prompts of thousands of items, which the next tasks need not keep in memory
    dropped = ("doc", "arguments")
    return {
        **{part: outputs[part] for part in PARTS},
        "date": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "dataset_revision": data_folder.revision(task.DATASET_PATH, task.dataset),
        "cut": cut,
        "scoring": _scoring_digest(task),
        "samples": [{key: value for key, value in sample.items() if key not in dropped} for sample in samples],
        "model": lm.get_model_info() | ({"code_execution": sandbox.level()} if task.config.unsafe_code else {}),
    }


def _prepare(task: Task, seed: int) -> None:
    """Set all that decides which prompts a task makes."""
    set_seed(seed)
    task.set_fewshot_seed(seed)
    if task.config.num_fewshot is None:
        task.set_config("num_fewshot", 0)


def _fit_generation(task: Task, max_length: int) -> None:
    """Leave at least half of a short context to the prompt, where a benchmark reserves more for the answer."""
    if task.OUTPUT_TYPE == "generate_until" and _longest_answer(task) > max_length // 2:
        task.set_config("generation_kwargs", {"max_gen_toks": max_length // 2}, update=True)


@contextlib.contextmanager
def _quiet_and_quick() -> Iterator[None]:
    """Without the harness's own bars and notes for each task, and with its templates compiled once and bounded."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    lm_eval.api.task.tqdm = partial(tqdm, disable=True)
    try:
        with bounded_templates():
            yield
    finally:
        logger.setLevel(level)
        lm_eval.api.task.tqdm = tqdm


def collect(loaded: Loaded, store: ResultStore) -> dict[str, Any]:
    """The stored results of all benchmarks in the format of the harness's `results.json`."""
    setup = store.setup
    combined: dict[str, Any] = {part: {} for part in PARTS} | {"groups": {}, "group_subtasks": {}}
    model: dict[str, Any] = {}
    for benchmark, tasks in loaded.items():
        for name in tasks["tasks"]:
            stored = read_result(store, benchmark, name)
            model |= stored["model"]
            for part in PARTS:
                combined[part] |= stored[part]
            _leave_out_paths(combined["configs"][name], benchmark)
        for name, group in tasks["groups"].items():
            aggregated = group.aggregate(combined["results"])
            combined["results"][name] = aggregated
            combined["group_subtasks"][name] = group.child_names
            if group.has_aggregation:
                combined["groups"][name] = aggregated
    config = {"model": "hf", "model_args": {"pretrained": setup["model"], "dtype": "auto"}, **model}
    return combined | {
        "config": config | {"limit": setup["limit"], "random_seed": setup["seed"], "fewshot_seed": setup["seed"]},
        "date": time.time(),
        "software": setup["software"],
    }


def _leave_out_paths(config: dict[str, Any], benchmark: Benchmark) -> None:
    """Where this machine has the files does not belong in results to publish."""
    if benchmark.dataset is not None:
        config["dataset_path"] = benchmark.dataset
    config.pop("dataset_kwargs", None)
    (config.get("metadata") or {}).pop("config_source", None)


def software() -> dict[str, str]:
    """The versions that numbers may depend on."""
    return {name: importlib.metadata.version(name) for name in ("attnres", "lm_eval", "torch", "transformers")}
