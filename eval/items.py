"""What makes two answers answers to the same item: the document, the prompt and the target, each by its hash.

A prompt alone does not decide an item. Where only the gold answers of a data set changed, every prompt is as it was,
but the scores cannot be compared. The hashes are the harness's own, which stand in each sample that it returns.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from lm_eval.api.task import Task
from lm_eval.utils import handle_non_serializable, hash_string

# The harness's name of a hash -> what it is a hash of, for messages.
HASHES = {"doc_hash": "documents", "prompt_hash": "prompts", "target_hash": "gold answers"}

Items = dict[int, tuple[str, ...]]  # number of the item -> its hashes, in the order of `HASHES`


def items_of(samples: Iterable[Mapping[str, Any]]) -> Items:
    """Return the items that the samples of one task answer."""
    return {sample["doc_id"]: tuple(sample[name] for name in HASHES) for sample in samples}


def items_now(task: Task, limit: int | None) -> Items:
    """Return the items that a task would ask now, without a model: it takes seconds for ten thousand.

    Args:
        task: with its seed and its number of shots set; it keeps no requests.
        limit: the first so many items.
    """
    task.build_all_requests(limit=limit)
    items: Items = {}
    # An item of several choices has one request for each; the harness hashes the prompt of the first.
    for request in sorted(task.instances, key=lambda request: request.idx):
        if request.doc_id not in items:
            doc = json.dumps(request.doc, indent=2, default=handle_non_serializable, ensure_ascii=False)
            texts = doc, request.arguments[0], str(task.doc_to_target(request.doc))
            items[request.doc_id] = tuple(map(hash_string, texts))
    task._instances = None  # prompts of thousands of items
    return items


def changed(some: Items, other: Items) -> str:
    """Return which parts of the items differ, as `documents and gold answers`; nothing if none does."""
    if some.keys() != other.keys():
        return f"items ({len(some):,} and {len(other):,})"
    pairs = [(some[number], other[number]) for number in some]
    parts = [part for i, part in enumerate(HASHES.values()) if any(a[i] != b[i] for a, b in pairs)]
    return " and ".join(parts)


__all__ = ["HASHES", "Items", "changed", "items_now", "items_of"]
