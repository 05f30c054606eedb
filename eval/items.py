"""Identify items by the hashes of their document, prompt and gold answer, to see whether two results have the same.

A prompt alone does not identify an item. If only the gold answers of a data set changed, every prompt is as before, but
the scores cannot be compared. The hashes are those that the harness puts into each sample that it returns.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from lm_eval.api.task import Task
from lm_eval.utils import handle_non_serializable, hash_string

# The harness's name of a hash -> the part of an item that it covers, as messages name it.
HASHES = {"doc_hash": "documents", "prompt_hash": "prompts", "target_hash": "gold answers"}

Items = dict[int, tuple[str, ...]]  # number of the item -> its hashes, in the order of `HASHES`


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


__all__ = ["HASHES", "Items", "current_items", "differing_parts", "drop_requests", "items_of"]
