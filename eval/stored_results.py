"""Check that a stored result still fits its task, before it is reported without running a model again.

Between two runs a file may be damaged or edited, and a task's form, scoring code or data may change. One report would
then silently mix the answers to different questions.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from textwrap import shorten
from types import FunctionType
from typing import Any

from lm_eval.api.task import Task

from .answer_length import answer_tokens, with_answer_tokens
from .items import current_items, differing_parts, items_of
from .paper import Benchmark
from .store import to_json

# The parts of the harness's results that are stored for each task, beside the samples.
PARTS = ("results", "configs", "versions", "n-shot", "higher_is_better", "n-samples")

# Keys of a task's configuration that may differ between runs that ask the same questions. The data may lie elsewhere,
# and the run itself sets the others. `check_same_task` compares the last two by rules of their own.
_MAY_DIFFER = {"dataset_path", "dataset_kwargs", "metadata", "generation_kwargs", "num_fewshot"}
# A function prints with its address, which differs from process to process.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def check_same_task(task: Task, stored: Mapping[str, Any], path: Path) -> None:
    """Raise ValueError if the task's configuration or scoring code changed since its result was stored.

    Args:
        task: The task as it is now.
        stored: The result.
        path: The file of the result, for the message.
    """
    if stored["scoring"] != scoring_digest(task):
        raise ValueError(
            f"{path} was scored by other code than the task {task.task_name} has now. "
            "Choose another --out, or remove the file to compute it again."
        )
    config_before = stored["configs"][task.task_name]
    config_now = json.loads(to_json(task.dump_config()))
    # Without a number, a task has no shots. The run sets 0 before it stores the configuration.
    before: dict[str, Any] = {**config_before, "num_fewshot": config_before.get("num_fewshot") or 0}
    now: dict[str, Any] = {**config_now, "num_fewshot": config_now.get("num_fewshot") or 0}
    if stored.get("answer_tokens") is not None:
        # A model with a short context may have had fewer tokens for an answer than the task reserves.
        for config, number in ((before, stored["answer_tokens"]), (now, answer_tokens(now.get("generation_kwargs")))):
            config["generation_kwargs"] = with_answer_tokens(config.get("generation_kwargs"), number)
    for key in [*sorted(now.keys() - _MAY_DIFFER), "num_fewshot", "generation_kwargs"]:
        values = [_ADDRESS.sub("", to_json({key: config.get(key)})) for config in (before, now)]
        if values[0] != values[1]:
            raise ValueError(
                f"{path} was computed with another {key} of the task {task.task_name}. "
                "Choose another --out, or remove the file to compute it again."
            )


def check_same_items(task: Task, stored: Mapping[str, Any], path: Path, limit: int | None) -> None:
    """Raise ValueError if the documents, prompts or gold answers of a task changed since its result was stored.

    Args:
        task: The task as it is now, with its seed and its number of shots set.
        stored: The result.
        path: The file of the result, for the message.
        limit: How many items of the task are asked, from the first; `None` for all.
    """
    if parts := differing_parts(items_of(stored["samples"]), current_items(task, limit)):
        raise ValueError(
            f"{path} was computed on other {parts} than the task {task.task_name} has now: its data changed. "
            "Choose another --out, or remove the file to compute it again."
        )


def check_scores(samples: Sequence[Mapping[str, Any]], benchmark: Benchmark) -> None:
    """Raise ValueError in one line if an item of a task has no score that can be reported.

    Args:
        samples: The samples of the task, as the harness returns them.
        benchmark: The benchmark that holds the task.
    """
    metric_of = _metric_by_filter(benchmark)
    for sample in samples:
        metric = metric_of.get(sample["filter"])
        if metric is not None and not _is_score(score := sample.get(metric)):
            raise ValueError(
                f"item {sample['doc_id']} has the {metric} {shorten(repr(score), 60)}: a score must be a finite "
                "number. Mend the scorer or the metric of the task."
            )


def scoring_digest(task: Task) -> str:
    """Return a hash of the Python code that extracts and scores a task's answers.

    The configuration holds only the names of these functions. The hash covers the files of the functions that the task
    file names, and the files in the same folder from which they import functions.
    """
    config = task.config
    filters = config.filter_list if isinstance(config.filter_list, list) else []
    steps = [step for entry in filters for step in entry["filter"]]
    metrics = [value for entry in config.metric_list or [] for value in entry.values()]
    files: set[Path] = set()
    for function in [config.process_results, *metrics, *(value for step in steps for value in step.values())]:
        if isinstance(function, FunctionType):
            folder = Path(function.__code__.co_filename).parent
            imported = [value for value in function.__globals__.values() if isinstance(value, FunctionType)]
            paths = {Path(used.__code__.co_filename) for used in (function, *imported)}
            files |= {path for path in paths if path.parent == folder and path.is_file()}
    # Contents only, so that an installation in another place gives the same hash.
    return sha256("".join(sorted(sha256(path.read_bytes()).hexdigest() for path in files)).encode()).hexdigest()


def _metric_by_filter(benchmark: Benchmark) -> dict[str, str]:
    """Return the metric of each filter whose scores a benchmark reports."""
    keys = [key.split(",") for key in (benchmark.metric, benchmark.second) if key]
    return {filter_name: metric for metric, filter_name in keys}


def _is_score(value: Any) -> bool:
    """Return whether an item's score is a finite number. The harness writes some NumPy numbers as text."""
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


__all__ = ["PARTS", "check_same_items", "check_same_task", "check_scores", "scoring_digest"]
