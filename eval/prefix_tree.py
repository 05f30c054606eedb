"""Sequences that begin alike, and which of their beginnings are worth computing once.

The prompts of a benchmark share an instruction, its examples, a passage or a question. Sorted, they form a tree. A node
is a beginning that several rows have in common; a model computes it once and goes on from there. Since a forward pass
has a cost of its own, a beginning is a node only if that saves `PASS` tokens.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile

# What one more forward pass must save, in tokens. Over fewer than about this a pass costs the same: it is bound by the
# reading of the weights (accelerators) or by the overhead of its operations (CPU).
PASS = 128


def pays(saved: int) -> bool:
    """Is one more forward pass worth `saved` tokens?"""
    return saved >= PASS


@dataclass
class PromptRow:
    """One sequence to compute.

    The continuations are what follows at `tokens[first + 1]`: the model's output at the position `first + i` predicts
    token `i` of each. `continuations` has the index of the request beside each of them.
    """

    tokens: list[int]
    first: int
    continuations: list[tuple[int, list[int]]]

    @property
    def context(self) -> list[int]:
        """The tokens before the first position whose output is needed: what can be computed elsewhere."""
        return self.tokens[: self.first]


@dataclass
class Node:
    """The rows that begin with `prefix`, and further nodes whose prefix is a longer one."""

    prefix: list[int]
    rows: list[PromptRow] = field(default_factory=list)
    children: list["Node"] = field(default_factory=list)


def make_rows(pairs: Sequence[tuple[list[int], list[int]]], max_length: int) -> list[PromptRow]:
    """The rows that answer all (context, continuation) `pairs`, sorted by their context.

    The model reads `context + continuation` without the last token, and of that the last `max_length` tokens. Of the
    choices of one context, one that reads what another reads, and no more, is part of the other's row.
    """
    rows = []
    for index, (context, continuation) in enumerate(pairs):
        tokens = (context + continuation)[-(max_length + 1) :][:-1]
        rows.append(PromptRow(tokens, len(tokens) - len(continuation), [(index, continuation)]))
    # Bytes compare much faster than lists do, and keep alike beginnings together just as well.
    rows.sort(key=lambda row: (array("I", row.context).tobytes(), array("I", row.tokens[row.first :]).tobytes()))
    distinct = rows[:1]
    for row in rows[1:]:
        last = distinct[-1]
        if row.first == last.first and row.tokens[: len(last.tokens)] == last.tokens:
            row.continuations += last.continuations
            distinct[-1] = row
        else:
            distinct.append(row)
    return distinct


def make_tree(rows: list[PromptRow], prefix: Sequence[int] = ()) -> Node:
    """The tree of `rows`, sorted by their context, that all begin with `prefix`.

    Rows of one context stay together, in the deepest node that they belong to.
    """
    node = Node(list(prefix))
    pending = [rows] if rows else []
    while pending:
        group = pending.pop()
        first, last = group[0].context, group[-1].context
        if first == last:
            node.rows += group
            continue
        shared = [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last))]
        if pays((len(group) - 1) * (len(shared) - len(prefix))):
            node.children.append(make_tree(group, shared))
        else:
            depth = len(shared)
            branches = groupby(group, key=lambda row: row.tokens[depth : min(depth + 1, row.first)])
            pending += [list(members) for _, members in branches]
    return node
