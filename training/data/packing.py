"""Pack documents: join them to a stream, and cut it into blocks: `block[b] = stream[b * length : (b + 1) * length]`."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

IGNORED = -100  # the label that the loss leaves out, as in PyTorch


class Place(NamedTuple):
    """Where a document comes from: lines or rows `first` to `last` of the file or data set `source`."""

    source: str
    first: int
    last: int


@dataclass(frozen=True)
class Tokens:
    """The joined tokens of some documents.

    Attributes:
        ids: Token ids `[tokens]`.
        labels: Labels `[tokens]`; `None` if they are the token ids.
        lengths: The number of tokens of each document, `[documents]`.
        places: Where each document comes from.
    """

    ids: np.ndarray
    labels: np.ndarray | None
    lengths: np.ndarray
    places: list[Place]

    def __add__(self, other: "Tokens") -> "Tokens":
        labels = [part.labels for part in (self, other) if part.labels is not None]
        if len(labels) == 1:  # they would no longer lie at their tokens
            raise ValueError("both parts must have labels, or neither.")
        return Tokens(
            np.concatenate([self.ids, other.ids]),
            np.concatenate(labels) if labels else None,
            np.concatenate([self.lengths, other.lengths]),
            self.places + other.places,
        )

    def after(self, start: int) -> "Tokens":
        """Return the tokens after the first `start` tokens; the first document may be cut."""
        ends = self.lengths.cumsum()
        first = int(np.searchsorted(ends, start, side="right"))
        lengths = self.lengths[first:].copy()
        lengths[:1] = ends[first : first + 1] - start  # slices, since there may be no document after `start`
        labels = None if self.labels is None else self.labels[start:]
        return Tokens(self.ids[start:], labels, lengths, self.places[first:])


class Blocks(NamedTuple):
    """Blocks of equal length.

    Attributes:
        ids: Token ids `[blocks, length]`.
        labels: Labels `[blocks, length]`; `None` if they are the token ids.
        documents: The places of each block's documents, as in [`describe_places`].
        positions: The position `[blocks, length]` of each token in its document, counted within the block from 0;
            `None` if documents are not kept apart.
    """

    ids: np.ndarray
    labels: np.ndarray | None
    documents: list[str]
    positions: np.ndarray | None = None


def pack(batches: Iterable[Tokens], length: int, separate: bool = False) -> Iterator[Blocks]:
    """Cut the stream of all documents into blocks.

    A document may begin in one block and end in another. Attention sees across the documents of a block, unless they
    are kept apart. The incomplete block at the end is dropped, and so are blocks without a label to learn: a batch of
    them alone would have no loss.

    Args:
        batches: The documents, in order.
        length: Tokens in a block.
        separate: Keep documents apart: give positions, and ignore the label of each document's first token, since no
            earlier token of its document predicts it.

    Yields:
        The blocks that each batch completes.
    """
    rest = None
    for batch in batches:
        stream = batch if rest is None else rest + batch
        count = len(stream.ids) // length
        if count:
            yield _cut(stream, length, count, separate)
        rest = stream.after(count * length)


def in_blocks(stream: np.ndarray, length: int) -> np.ndarray:
    """Cut a stream into blocks, without its incomplete end.

    Args:
        stream: The tokens, `[tokens]`.
        length: Tokens in a block.

    Returns:
        The blocks, `[blocks, length]`, a view of the stream.
    """
    count = len(stream) // length
    return stream[: count * length].reshape(count, length)


def _cut(stream: Tokens, length: int, count: int, separate: bool) -> Blocks:
    """Return the first `count` blocks of a stream, without those that have no label to learn."""
    labels = None if stream.labels is None else in_blocks(stream.labels, length)
    starts = np.arange(count) * length
    ends = stream.lengths.cumsum()
    firsts = np.searchsorted(ends, starts, side="right")  # the document that a block's first token belongs to
    lasts = np.searchsorted(ends, starts + length - 1, side="right")
    documents = [describe_places(stream.places[first : last + 1]) for first, last in zip(firsts, lasts)]
    ids, positions = in_blocks(stream.ids, length), None
    if separate:
        # Positions restart at 0 where a block cuts a document, since its earlier part is in another block.
        begins = np.repeat(ends - stream.lengths, stream.lengths)[: ids.size].reshape(ids.shape)
        positions = np.arange(ids.size, dtype=np.int64).reshape(ids.shape) - np.maximum(begins, starts[:, None])
        positions = positions.astype(np.int32)
        labels = np.where(positions == 0, IGNORED, ids if labels is None else labels).astype(np.int32)
    if labels is None:
        return Blocks(ids, None, documents)
    # Models shift labels, so the first label of a block is never learned.
    learned = (labels[:, 1:] != IGNORED).any(axis=1)  # [blocks]
    kept = [name for name, is_learned in zip(documents, learned) if is_learned]
    return Blocks(ids[learned], labels[learned], kept, None if positions is None else positions[learned])


def describe_places(places: Iterable[Place]) -> str:
    """Return places as one line, with consecutive places joined: `train.jsonl:17-19,40 other.jsonl:3`.

    ```python
    >>> describe_places([Place("a.jsonl", 1, 1), Place("a.jsonl", 2, 2), Place("a.jsonl", 7, 7)])
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
