"""Documents in a row, cut into blocks of equal length: `block[b] = stream[b * length : (b + 1) * length]`."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

IGNORED = -100  # the label that the loss leaves out


class Place(NamedTuple):
    """Where a document comes from: lines or rows `first` to `last` of `source`."""

    source: str
    first: int
    last: int


@dataclass(frozen=True)
class Tokens:
    """Documents, joined: their tokens and labels `[tokens]`, their lengths `[documents]`, and their places.

    `labels` is `None` where they are the tokens themselves.
    """

    ids: np.ndarray
    labels: np.ndarray | None
    lengths: np.ndarray
    places: list[Place]

    def __add__(self, other: "Tokens") -> "Tokens":
        labels = None if other.labels is None else np.concatenate([self.labels, other.labels])
        return Tokens(
            np.concatenate([self.ids, other.ids]),
            labels,
            np.concatenate([self.lengths, other.lengths]),
            self.places + other.places,
        )

    def after(self, start: int) -> "Tokens":
        """What follows the first `start` tokens."""
        ends = self.lengths.cumsum()
        first = int(np.searchsorted(ends, start, side="right"))
        lengths = self.lengths[first:].copy()
        lengths[:1] = ends[first : first + 1] - start  # the document that is cut, if any
        labels = None if self.labels is None else self.labels[start:]
        return Tokens(self.ids[start:], labels, lengths, self.places[first:])


class Blocks(NamedTuple):
    """Tokens and labels `[blocks, length]` (`None` as in [`Tokens`]), and the places of each block's documents.

    `positions` `[blocks, length]` count the tokens of each document within a block from 0, where documents are kept
    apart.
    """

    ids: np.ndarray
    labels: np.ndarray | None
    documents: list[str]
    positions: np.ndarray | None = None


def pack(batches: Iterable[Tokens], length: int, separate: bool = False) -> Iterator[Blocks]:
    """Cut the stream of all documents into blocks; the last, incomplete block is dropped.

    So is a block without a label that can be learned: a batch of such blocks alone would have no loss.

    A document may begin in one block and end in another, and attention sees across documents within a block, unless
    they are kept apart.

    Args:
        batches: The documents, in order.
        length: Tokens in a block.
        separate: Keep documents apart: give their positions, and leave the label of a document's first token out, as
            nothing before it tells of it.
    """
    rest = None
    for batch in batches:
        stream = batch if rest is None else rest + batch
        count = len(stream.ids) // length
        if count:
            yield _cut(stream, length, count, separate)
        rest = stream.after(count * length)


def in_blocks(stream: np.ndarray, length: int) -> np.ndarray:
    """The blocks `[blocks, length]` of a stream `[tokens]`, without its incomplete end."""
    count = len(stream) // length
    return stream[: count * length].reshape(count, length)


def _cut(stream: Tokens, length: int, count: int, separate: bool) -> Blocks:
    labels = None if stream.labels is None else in_blocks(stream.labels, length)
    starts = np.arange(count) * length
    ends = stream.lengths.cumsum()
    firsts = np.searchsorted(ends, starts, side="right")  # the document that a block's first token belongs to
    lasts = np.searchsorted(ends, starts + length - 1, side="right")
    documents = [describe(stream.places[first : last + 1]) for first, last in zip(firsts, lasts)]
    ids, positions = in_blocks(stream.ids, length), None
    if separate:
        # A document begins anew where a block cuts it: what came before is not seen.
        begins = np.repeat(ends - stream.lengths, stream.lengths)[: ids.size].reshape(ids.shape)
        positions = np.arange(ids.size, dtype=np.int64).reshape(ids.shape) - np.maximum(begins, starts[:, None])
        positions = positions.astype(np.int32)
        labels = np.where(positions == 0, IGNORED, ids if labels is None else labels).astype(np.int32)
    if labels is None:
        return Blocks(ids, None, documents)
    learned = (labels[:, 1:] != IGNORED).any(axis=1)  # models shift labels: nothing comes before the first
    kept = [name for name, is_learned in zip(documents, learned) if is_learned]
    return Blocks(ids[learned], labels[learned], kept, None if positions is None else positions[learned])


def describe(places: Iterable[Place]) -> str:
    """Places in one line: `train.jsonl:17-19,40 other.jsonl:3`; what follows each other is joined.

    ```python
    >>> describe([Place("a.jsonl", 1, 1), Place("a.jsonl", 2, 2), Place("a.jsonl", 7, 7)])
    'a.jsonl:1-2,7'
    ```
    """
    parts = []
    for source, group in groupby(places, key=lambda place: place.source):
        ranges: list[list[int]] = []
        for place in group:
            if ranges and place.first == ranges[-1][1] + 1:
                ranges[-1][1] = place.last
            else:
                ranges.append([place.first, place.last])
        parts.append(f"{source}:" + ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in ranges))
    return " ".join(parts)
