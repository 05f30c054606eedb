"""Store the results of one model in a file for each task, and check that a stored result still fits its task.

A run that was killed continues from its files. A result carries a hash of its content, so that an edited file is not
taken for a measurement. Between two runs a task's form, scoring code or data may change too. Without the checks, one
report would silently mix the answers to different questions.

A prompt alone does not identify an item. If only the gold answers of a data set changed, every prompt is as before, but
the scores cannot be compared. So items are compared by the hashes of document, prompt and gold answer that the harness
puts into each sample.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from textwrap import shorten
from types import FunctionType
from typing import Any
from urllib.parse import quote

from lm_eval.api.task import Task
from lm_eval.utils import handle_non_serializable, hash_string

from attnres.utils.errors import about
from attnres.utils.files import atomic_write

from .answer_length import answer_tokens, with_answer_tokens
from .paper import Benchmark

SETUP, HASH = "setup.json", "sha256"
# The parts of the harness's results that are stored for each task, beside the samples.
PARTS = ("results", "configs", "versions", "n-shot", "higher_is_better", "n-samples")

# Keys of a task's configuration that may differ between runs that ask the same questions. The data may lie elsewhere,
# and the run itself sets the others. `check_same_task` compares the last two by rules of their own.
_MAY_DIFFER = {"dataset_path", "dataset_kwargs", "metadata", "generation_kwargs", "num_fewshot"}
# A function prints with its address, which differs from process to process.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# The harness's name of a hash -> the part of an item that it covers, as messages name it.
HASHES = {"doc_hash": "documents", "prompt_hash": "prompts", "target_hash": "gold answers"}

Items = dict[int, tuple[str, ...]]  # number of the item -> its hashes, in the order of `HASHES`


# --- Storing ----------------------------------------------------------------------------------------------------------


class ResultStore:
    """The folder of one model's results: `setup.json` with the settings, and `TASK.json` for each task.

    Args:
        folder: The folder; it is created.
        setup: All settings that decide the numbers. A folder with results of another setup is refused. A folder without
            results takes the new setup, so that a run that found no data can continue with another data folder.

    Raises:
        FileExistsError: The folder holds results of another setup.
        ValueError: The stored setup lacks a setting.
    """

    def __init__(self, folder: Path, setup: Mapping[str, Any]) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        stored = self.setup if (folder / SETUP).exists() else None
        if stored is not None and any(path.name != SETUP for path in folder.glob("*.json")):
            _check_same_setup(folder, stored, setup)
        elif stored != setup:
            atomic_write(folder / SETUP, to_json(setup, indent=2))

    def __contains__(self, task: str) -> bool:
        return self.path(task).exists()

    def read(self, task: str) -> dict[str, Any]:
        """Return the stored result of a task. If it is damaged or was edited, an error has a note with the remedy."""
        path = self.path(task)
        with about(path, "Remove it, and the same command computes it again."):
            result = json.loads(path.read_text(encoding="utf-8"))
            if result.pop(HASH, None) != _hash(result):
                raise ValueError(f"{path} is not as it was written: its {HASH} does not fit.")
        return result

    def write(self, task: str, result: Mapping[str, Any]) -> None:
        """Store the result of a task, as a whole or not at all.

        Args:
            task: The task's name.
            result: The result, without a key `sha256`.
        """
        # Hash the content as it will be read back, because JSON turns keys that are numbers into text.
        atomic_write(self.path(task), to_json({**result, HASH: _hash(json.loads(to_json(result)))}))

    @property
    def setup(self) -> dict[str, Any]:
        """The stored setup. If it is damaged, an error has a note with the remedy."""
        path = self.folder / SETUP
        with about(path, f"Choose another --out, or remove the folder {self.folder}."):
            return dict(json.loads(path.read_text(encoding="utf-8")))

    def path(self, task: str) -> Path:
        """Return the file of a task's result, whatever characters the task's name has."""
        name = quote(task, safe="")
        # A task named `setup` must not replace the setup.
        return self.folder / ("%73etup.json" if f"{name}.json" == SETUP else f"{name}.json")


def _hash(result: Mapping[str, Any]) -> str:
    return sha256(json.dumps(result, sort_keys=True).encode()).hexdigest()


def to_json(content: Mapping[str, Any], indent: int | None = None) -> str:
    """Return JSON as the harness writes its results.

    Args:
        content: The content.
        indent: The number of spaces per level; by default, all is on one line.
    """
    return json.dumps(content, indent=indent, default=handle_non_serializable, ensure_ascii=False) + "\n"


def _check_same_setup(folder: Path, stored: Mapping[str, Any], setup: Mapping[str, Any]) -> None:
    """Raise FileExistsError for the first setting in which two setups differ, or ValueError if a setting is missing."""
    for key, value in setup.items():
        if stored.get(key) == value:
            continue
        if key not in stored:  # the file was emptied, or another version wrote it
            raise ValueError(f"{folder / SETUP} lacks {key!r}. Choose another --out, or remove the folder.")
        # Sizes and times of files, or versions of packages, would make the message too long.
        difference = f"other {key!r}" if isinstance(value, dict) else f"{key} {stored.get(key)!r}, not {value!r}"
        raise FileExistsError(
            f"{folder} holds results whose {SETUP} has {difference}. Choose another --out, or remove the folder."
        )


# --- Checking ---------------------------------------------------------------------------------------------------------


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
    """Return a hash of the Python code that makes a task's choices, or extracts and scores its answers.

    The configuration holds at most these functions alone, without those that they call. The hash covers the files of
    the functions that the task file names, and the files in the same folder from which they import functions.
    """
    config = task.config
    filters = config.filter_list if isinstance(config.filter_list, list) else []
    steps = [step for entry in filters for step in entry["filter"]]
    metrics = [value for entry in config.metric_list or [] for value in entry.values()]
    files: set[Path] = set()
    functions = [config.doc_to_choice, config.process_results, *metrics]
    for function in [*functions, *(value for step in steps for value in step.values())]:
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


# --- Items ------------------------------------------------------------------------------------------------------------


def items_of(samples: Iterable[Mapping[str, Any]]) -> Items:
    """Return the items that the samples of one task answer, by number."""
    return {sample["doc_id"]: tuple(sample[name] for name in HASHES) for sample in samples}


def current_items(task: Task, limit: int | None) -> Items:
    """Return the items that a run of a task would ask. No model runs: ten thousand items take seconds.

    Args:
        task: The task, with its seed and its number of shots set. Its requests are built and dropped again.
        limit: How many items are asked, from the first; `None` for all.
    """
    task.build_all_requests(limit=limit)
    items: Items = {}
    # An item of several choices has one request for each; the harness hashes the prompt of the first.
    for request in sorted(task.instances, key=lambda request: request.idx):
        if request.doc_id is not None and request.doc_id not in items:
            doc = json.dumps(request.doc, indent=2, default=handle_non_serializable, ensure_ascii=False)
            texts = doc, request.arguments[0], str(task.doc_to_target(request.doc))
            items[request.doc_id] = tuple(map(hash_string, texts))
    drop_requests(task)
    return items


def drop_requests(task: Task) -> None:
    """Release the prompts of a task, because thousands of items take much memory."""
    # The public `instances` cannot be set.
    task._instances = None


def differing_parts(first: Items, second: Items) -> str:
    """Return the parts in which items differ, such as `documents and gold answers`; empty if all are the same.

    Args:
        first: The items of one result.
        second: The items of another result of the same task.
    """
    if first.keys() != second.keys():
        return f"items ({len(first):,} and {len(second):,})"
    pairs = [(first[number], second[number]) for number in first]
    parts = [part for i, part in enumerate(HASHES.values()) if any(a[i] != b[i] for a, b in pairs)]
    return " and ".join(parts)


__all__ = [
    "PARTS",
    "Items",
    "ResultStore",
    "check_same_items",
    "check_same_task",
    "check_scores",
    "differing_parts",
    "drop_requests",
    "items_of",
    "scoring_digest",
    "to_json",
]
