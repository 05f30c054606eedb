"""Run models on benchmarks by lm-evaluation-harness, one task after the other, and store each result as it ends.

The steps of a run, in order: `load_all` reads the data of every benchmark, `find_unfinished` checks stored results and
lists the tasks without one, `run_jobs` evaluates a model on these, and `collect` combines the stored results.
"""

import logging
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import lm_eval.api.task
from lm_eval.api.task import Task
from lm_eval.evaluator import evaluate
from lm_eval.tasks.manager import TaskDict
from tqdm import tqdm
from transformers import set_seed

from . import data_folder, sandbox
from .answer_length import answer_tokens, limited_answers
from .benchmarks import compile_templates_once, load
from .failures import DataMissing, Failures, Reason, TaskFailure, code_refused, describe_error
from .paper import Benchmark
from .shared_prefix import SharedPrefixLM
from .stored_results import (
    PARTS,
    ResultStore,
    check_same_items,
    check_same_task,
    check_scores,
    drop_requests,
    scoring_digest,
)

Loaded = dict[Benchmark, TaskDict]

# For the estimate of the time left: generating this many tokens takes about as long as scoring one choice.
TOKENS_LIKE_A_CHOICE = 32


def load_all(
    chosen: Sequence[Benchmark], data: Path | None, allow_code_execution: bool, on_load: Callable[[Benchmark], None]
) -> tuple[Loaded, Failures]:
    """Load the data of every benchmark, before any model runs.

    Args:
        chosen: The benchmarks.
        data: The folder of data sets; `None` for the Hub.
        allow_code_execution: Whether generated programs may run.
        on_load: Called with each benchmark before it is loaded.

    Returns:
        The tasks of the benchmarks that can run, and the failures of the others.

    Raises:
        ValueError: Two benchmarks hold a task of the same name.
    """
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
        except RuntimeError as error:  # this machine has no sandbox
            failures[benchmark] = TaskFailure(Reason.OTHER, f"{benchmark.title}: {error}")
    # Results are stored by the task's name, and two benchmarks may ask one task in different ways.
    benchmark_of: dict[str, Benchmark] = {}
    for benchmark, tasks in loaded.items():
        for name in tasks["tasks"]:
            first = benchmark_of.setdefault(name, benchmark)
            if first is not benchmark:
                raise ValueError(f"--tasks: {first.name} and {benchmark.name} both hold the task {name}. Choose one.")
    return loaded, failures


@dataclass(frozen=True)
class EvalJob:
    """A task to run on a model.

    Attributes:
        benchmark: The benchmark that holds the task.
        task: The task with its data.
        work: An estimate of its cost, for the progress bar. The unit is the cost of scoring one choice.
    """

    benchmark: Benchmark
    task: Task
    work: float


def find_unfinished(loaded: Loaded, store: ResultStore, limit: int | None, seed: int) -> list[EvalJob]:
    """Return the tasks that have no stored result, in order.

    A stored result is reported without running a model again, so its task must not have changed since.

    Args:
        loaded: The tasks, as [`load_all`] returns them.
        store: The results of one model.
        limit: How many items of each task are asked, from the first; `None` for all.
        seed: The seed of the prompts.

    Raises:
        ValueError: A stored result is damaged or was edited; or the task's configuration, scoring code, documents,
            prompts or gold answers changed since. The message is one line.
    """
    jobs = []
    for benchmark, tasks in loaded.items():
        for name, task in tasks["tasks"].items():
            if name not in store:
                jobs.append(EvalJob(benchmark, task, _work(task, limit)))
                continue
            stored = store.read(name)
            check_same_task(task, stored, store.path(name))
            prepare(task, seed)
            with _quiet_harness(), compile_templates_once():
                check_same_items(task, stored, store.path(name), limit)
    return jobs


def _work(task: Task, limit: int | None) -> float:
    """Estimate the cost of a task, in the unit of `EvalJob.work`."""
    whole = len(task.task_docs)  # pyrefly: ignore[missing-attribute]  # every task of a file has it
    num_items = min(whole, limit or whole) * task.config.repeats
    if task.OUTPUT_TYPE != "generate_until":
        return num_items
    return num_items * (1 + answer_tokens(task.config.generation_kwargs) / TOKENS_LIKE_A_CHOICE)


def run_jobs(
    lm: SharedPrefixLM,
    jobs: Sequence[EvalJob],
    store: ResultStore,
    *,
    limit: int | None,
    seed: int,
    on_work: Callable[[Benchmark, float], None],
) -> Failures:
    """Evaluate a model on tasks and store each result as it ends.

    Args:
        lm: The model.
        jobs: The tasks, as [`find_unfinished`] returns them.
        store: Where the results go.
        limit: How many items of each task are asked, from the first; `None` for all.
        seed: The seed of the prompts.
        on_work: Called with the benchmark that runs and the work done so far, in the unit of `EvalJob.work`.

    Returns:
        The failures, for example because a single sequence does not fit in memory or a task's own code raises an error.
        The other benchmarks go on.
    """
    failures: Failures = {}
    done_before = 0.0
    for job in jobs:
        on_work(job.benchmark, done_before)
        lm.progress = lambda done, job=job, before=done_before: on_work(
            job.benchmark, before + job.work * done / _count_requests(job.task)
        )
        if job.benchmark not in failures:
            try:
                result = _evaluate(lm, job, limit, seed)
            except MemoryError:  # the machine has no memory left for the other tasks either
                raise
            except Exception as error:  # a task's own code may raise anything
                failures[job.benchmark] = TaskFailure(Reason.OTHER, f"{job.benchmark.title}: {describe_error(error)}")
            else:
                # Outside of `try`, because a full disk stops the other tasks too.
                store.write(job.task.task_name, result)
        done_before += job.work
        on_work(job.benchmark, done_before)
    return failures


def _evaluate(lm: SharedPrefixLM, job: EvalJob, limit: int | None, seed: int) -> dict[str, Any]:
    """Evaluate one task.

    Returns:
        The parts `PARTS` of the harness's result, its samples without the texts of the items, and further facts for the
        report.

    Raises:
        ValueError: A score is not a finite number. A task's own code may raise anything else.
    """
    task = job.task
    prepare(task, seed)
    generates = task.OUTPUT_TYPE == "generate_until"
    cut_before = lm.cut_requests
    with limited_answers(task, lm.max_length), _quiet_harness(), compile_templates_once():
        outputs = evaluate(
            lm, {"tasks": {task.task_name: task}, "groups": {}}, limit=limit, confirm_run_unsafe_code=True
        )
    (samples,) = outputs["samples"].values()
    check_scores(samples, job.benchmark)
    cut = (lm.cut_requests - cut_before) / _count_requests(task)
    drop_requests(task)
    texts = ("doc", "arguments")
    return {
        **{part: outputs[part] for part in PARTS},
        "date": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "dataset_revision": data_folder.revision(task.DATASET_PATH, task.dataset),
        "cut": cut,
        # The stored configuration holds the number that this model had.
        "answer_tokens": answer_tokens(task.config.generation_kwargs) if generates else None,
        "scoring": scoring_digest(task),
        "samples": [{key: value for key, value in sample.items() if key not in texts} for sample in samples],
        "model": lm.get_model_info()
        | ({"code_execution": sandbox.level()} if task.config.unsafe_code else {})
        | ({"ignored_settings": lm.ignored_settings} if generates else {}),
    }


def _count_requests(task: Task) -> int:
    """Return the number of requests that the model receives for a task. The harness clones one for each repeat."""
    return sum(request.repeats or 1 for request in task.instances)


def prepare(task: Task, seed: int) -> None:
    """Set the seed and the number of shots of a task, which decide its prompts.

    Args:
        task: The task. Without a number of shots, it has none.
        seed: The seed.
    """
    set_seed(seed)
    task.set_fewshot_seed(seed)
    if task.config.num_fewshot is None:
        task.set_config("num_fewshot", 0)


@contextmanager
def _quiet_harness() -> Generator[None]:
    """Suppress the harness's log lines and its bar for each task. The command draws one bar for the whole run."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    # `Task.build_all_requests` always draws a bar: it has no argument against that, and tqdm reads the environment
    # variable TQDM_DISABLE only at import.
    # pyrefly: ignore[bad-assignment]  # the harness only calls it
    lm_eval.api.task.tqdm = partial(tqdm, disable=True)
    try:
        yield
    finally:
        logger.setLevel(level)
        lm_eval.api.task.tqdm = tqdm


def collect(loaded: Loaded, store: ResultStore) -> dict[str, Any]:
    """Return the stored results of all benchmarks in the format of the harness's `results.json`.

    Args:
        loaded: The tasks, as [`load_all`] returns them.
        store: The results of one model. It must hold all tasks.

    Raises:
        ValueError: A stored result is damaged or was edited.
    """
    setup = store.setup
    combined: dict[str, Any] = {part: {} for part in PARTS} | {"groups": {}, "group_subtasks": {}}
    model: dict[str, Any] = {}
    for benchmark, tasks in loaded.items():
        for name in tasks["tasks"]:
            stored = store.read(name)
            model |= stored["model"]
            for part in PARTS:
                combined[part] |= stored[part]
            _remove_paths(combined["configs"][name], benchmark)
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


def _remove_paths(config: dict[str, Any], benchmark: Benchmark) -> None:
    """Remove the paths of this machine from a task's configuration, because results get published."""
    if benchmark.dataset is not None:
        config["dataset_path"] = benchmark.dataset
    config.pop("dataset_kwargs", None)
    (config.get("metadata") or {}).pop("config_source", None)


__all__ = ["EvalJob", "Loaded", "collect", "find_unfinished", "load_all", "prepare", "run_jobs"]
