"""Find the beginnings of prompts that are worth computing once.

The prompts of a benchmark share an instruction, its examples, a passage or a question. Sorted, they form a tree. Each
node is a beginning that several rows have in common. Since each forward pass has a fixed cost, a beginning becomes a
node only if that saves at least `PASS_TOKENS` tokens.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile

# The number of tokens that one more forward pass must save. A pass over fewer than about this many tokens takes as long
# as a pass over one token: reading the weights (accelerators) or the overhead of operations (CPU) bounds its time.
PASS_TOKENS = 128


def pays(num_saved: int) -> bool:
    """Return whether saving this many tokens is worth one more forward pass."""
    return num_saved >= PASS_TOKENS


@dataclass
class PromptRow:
    """One sequence of tokens to compute, with all the continuations that it answers.

    The model's output at position `first + i` predicts token `i` of each continuation.

    Attributes:
        tokens: The sequence.
        first: The first position whose output is needed.
        continuations: Pairs of the index of a request and the tokens of its continuation.
    """

    tokens: list[int]
    first: int
    continuations: list[tuple[int, list[int]]]

    @property
    def context(self) -> list[int]:
        """The tokens before the first position whose output is needed, which another row may share."""
        return self.tokens[: self.first]


@dataclass
class Node:
    """A beginning that several rows share.

    Attributes:
        prefix: The tokens of the beginning.
        rows: The rows that begin with it and belong to no child.
        children: Nodes whose prefix continues this one.
    """

    prefix: list[int]
    rows: list[PromptRow] = field(default_factory=list)
    children: list["Node"] = field(default_factory=list)


def make_rows(pairs: Sequence[tuple[list[int], list[int]]]) -> list[PromptRow]:
    """Return the rows that answer all requests.

    The model reads `context + continuation` without the last token. Two choices of one context become one row if the
    tokens of the one begin with the tokens of the other.

    Args:
        pairs: The context and the continuation of each request.

    Returns:
        The rows, sorted by their context.
    """
    rows = []
    for index, (context, continuation) in enumerate(pairs):
        tokens = (context + continuation)[:-1]
        rows.append(PromptRow(tokens, len(context) - 1, [(index, continuation)]))
    # Bytes compare much faster than lists, and sort common beginnings together just as well.
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
    """Return the tree of rows that all begin with `prefix`.

    Rows of one context stay together, in the deepest node that they belong to.

    Args:
        rows: The rows, sorted by their context.
        prefix: The beginning that they share.
    """
    node = Node(list(prefix))
    pending = [rows] if rows else []
    while pending:
        group = pending.pop()
        first, last = group[0].context, group[-1].context
        if first == last:
            node.rows += group
            continue
        # Rows are sorted, so all of them share the beginning that the first and the last share.
        shared = [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last))]
        if pays((len(group) - 1) * (len(shared) - len(prefix))):
            node.children.append(make_tree(group, shared))
        else:
            # This beginning is not worth a node. Divide the rows by their next token, and search each part.
            depth = len(shared)
            branches = groupby(group, key=lambda row: row.tokens[depth : min(depth + 1, row.first)])
            pending += [list(members) for _, members in branches]
    return node
