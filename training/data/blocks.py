"""Load data sets as blocks of tokens: tokenise, shuffle the documents, cut their stream into blocks, shuffle these.

Tokens and blocks are kept in a cache and memory-mapped from there. The name of a cache folder is a digest of everything
that its content depends on. One process builds a folder, and a folder that is incomplete or damaged is built again.
"""

import hashlib
import json
import logging
import os
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from attnres.utils.extras import require_extra
from attnres.utils.progress import Pace
from attnres.utils.wording import counted

from . import IGNORED
from .documents import DataSpec, Documents, Encode, Encoder, Place, Skipped, Tokens, key_of

with require_extra("train"):
    import datasets.config
    import pyarrow as pa
    import pyarrow.compute as pc
    from datasets import Dataset, IterableDataset, concatenate_datasets

SHUFFLE_BUFFER = 2048  # blocks in memory, among which a stream is shuffled

_VERSION = 4  # of the cache's content: raise it when the same data would give other tokens or blocks
DIGEST = "digest.txt"  # the name of the file with the digest of a data set, beside it
_TOKENS, _BLOCKS, _SKIPPED, _COUNTS = "tokens.arrow", "blocks.arrow", "skipped.json", "counts.json"
_MANIFEST = "manifest.json"  # of a cache folder: the size and checksum of each file
_TOKENS_AT_ONCE = 1 << 22

logger = logging.getLogger(__name__)


def load_blocks(
    spec: DataSpec,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    *,
    seed: int | None,
    encode: Encode | None = None,
    separate: bool = False,
    cache: Path | None = None,
) -> Dataset | IterableDataset:
    """Load the documents of a [`DataSpec`] as blocks of `length` tokens.

    Each document is tokenised with the tokenizer's own special tokens and ends with its end-of-text token. The
    documents are joined in a shuffled order, the stream is cut into blocks, and the blocks are shuffled. A block may
    hold parts of several documents, and attention sees across them unless `separate` is set. The incomplete block at
    the end is dropped, and so are blocks without a label to learn.

    The order depends on data and `seed` alone, not on the process or the number of processes or workers.

    A stream (`spec.streaming`) keeps the order of the documents, and shuffles each block among the next
    [`SHUFFLE_BUFFER`] blocks, with the same order in each epoch. One worker reads the whole stream. After skipped
    batches or `load_state_dict` it resumes exactly: it reads and tokenises everything up to that place again.

    Args:
        spec: The documents to read.
        tokenizer: The tokenizer.
        length: Tokens in a block.
        seed: The seed of the order; `None` keeps the order of the files.
        encode: A function that returns the `input_ids` and `labels` of a row, including the tokens that end it, and
            raises `ValueError` for a row that it cannot use. The cache identifies it by its code and its fields.
        separate: Keep the documents of a block apart, by `position_ids` `[length]` that restart with each document. The
            label of a document's first token is ignored.
        cache: A folder for tokens and blocks. By default a folder within the cache of `datasets`.

    Returns:
        Rows `{"input_ids": [length], "labels": [length], "documents": "train.jsonl:17-19"}`: two int64 tensors, and the
        lines or rows that the block was made from. Labels are the tokens (models shift them), unless `encode` gives
        others. `info.description` holds the number of documents and tokens; for a stream it is empty.

    Raises:
        OSError: A file is absent or cannot be read, or the cache cannot be written.
        ValueError: A data set, file or row cannot be used (see [`DataSpec`]), there are too few tokens for one block,
            or the tokenizer has no end-of-text token.
    """
    if length < 2:
        raise ValueError(f"`length` is {length}, but a sequence needs at least 2 tokens.")
    encoder = Encoder(tokenizer, encode)
    documents = Documents(spec, whole_rows=encode is not None)
    if spec.streaming:
        return _stream(documents, encoder, length, seed, separate)

    cache = Path(cache or Path(datasets.config.HF_DATASETS_CACHE) / "attnres")
    identities = documents.identities()
    key = key_of(_VERSION, identities, spec.column, spec.bad_rows, spec.limit, encoder.key())

    def build_tokens(folder: Path) -> None:
        _write_tokens(documents, encoder, folder)
        if documents.identities() != identities:
            raise ValueError(f"{' '.join(spec.paths)} changed while it was read. Start again.")

    def build_blocks(folder: Path) -> None:
        token_folder = build_once(cache / f"tokens-{key}", build_tokens)
        _write_blocks(token_folder, length, seed, folder, name=" ".join(spec.paths), separate=separate)

    # The key has `separate` only if it is set, so that caches from before this argument stay valid.
    blocks_key = key_of(key, length, seed, *(["separate"] if separate else []))
    folder = build_once(cache / f"blocks-{blocks_key}", build_blocks)
    skipped = _read_skipped(folder)
    if skipped:
        logger.warning("%s", skipped)
    return _open_blocks(folder, seed)


def _stream(documents: Documents, encoder: Encoder, length: int, seed: int | None, separate: bool) -> IterableDataset:
    # Reading one document shows errors of the whole data now, not when training begins.
    if next(iter(documents), None) is None:
        raise ValueError(_describe_no_block(" ".join(documents.spec.paths), 0, 0, length, documents.skipped))
    arguments = {"documents": documents, "encoder": encoder, "length": length, "seed": seed, "separate": separate}
    # No `features` and no format: with either, `datasets` converts each token to a Python number, 50 times slower. No
    # list among the arguments: `datasets` would shard it among workers, which changes the order.
    return IterableDataset.from_generator(_generate, gen_kwargs=arguments)


def _generate(
    documents: Documents, encoder: Encoder, length: int, seed: int | None, separate: bool
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a stream. Raise ValueError at its end if it gave no block."""
    counts, num_blocks = {"documents": 0, "tokens": 0}, 0

    def count() -> Iterator[Tokens]:
        for tokens in encoder.batches(documents):
            counts["documents"] += len(tokens.places)
            counts["tokens"] += len(tokens.ids)
            yield tokens

    def rows() -> Iterator[dict[str, Any]]:
        nonlocal num_blocks
        for blocks in pack(count(), length, separate):
            num_blocks += len(blocks.documents)
            labels = blocks.ids if blocks.labels is None else blocks.labels
            columns: dict[str, Any] = {"input_ids": blocks.ids, "labels": labels}
            if separate:
                columns["position_ids"] = blocks.positions
            for i, sources in enumerate(blocks.documents):
                tensors = {name: torch.from_numpy(part[i].astype(np.int64)) for name, part in columns.items()}
                yield tensors | {"documents": sources}

    yield from rows() if seed is None else _shuffled(rows(), seed)
    if not num_blocks:
        name = " ".join(documents.spec.paths)
        raise ValueError(_describe_no_block(name, **counts, length=length, skipped=documents.skipped))
    if documents.skipped:
        logger.warning("%s", documents.skipped)


def _shuffled(rows: Iterator[dict[str, Any]], seed: int) -> Iterator[dict[str, Any]]:
    """Yield rows in a shuffled order.

    `IterableDataset.shuffle` changes its order in a worker and after a resume. This order stays the same.
    """
    generator = np.random.default_rng(seed)
    buffer = []
    for row in rows:
        if len(buffer) < SHUFFLE_BUFFER:
            buffer.append(row)
        else:
            index = generator.integers(SHUFFLE_BUFFER)
            yield buffer[index]
            buffer[index] = row
    yield from (buffer[index] for index in generator.permutation(len(buffer)))


def _write_tokens(documents: Documents, encoder: Encoder, folder: Path) -> None:
    """Write `tokens.arrow`, a row for each document in the order of the files, and the count of skipped rows."""
    token_list = pa.list_(pa.int32())
    columns = {"input_ids": token_list} | ({"labels": token_list} if encoder.encode else {})
    schema = pa.schema(columns | {"source": pa.string(), "first": pa.int64(), "last": pa.int64()})
    # `disable=None` draws no bar if the error output is not a terminal. `pace` prints lines instead.
    bar = datasets.utils.tqdm(desc="Tokenising", unit=" tokens", unit_scale=True, leave=False, disable=None)
    pace, count = Pace(None, unit="tokens"), 0
    with pa.ipc.new_stream(str(folder / _TOKENS), schema) as file, bar:
        for batch in encoder.batches(documents):
            offsets = np.concatenate([[0], batch.lengths.cumsum()]).astype(np.int32)
            parts = [part for part in (batch.ids, batch.labels) if part is not None]
            lists = [pa.ListArray.from_arrays(offsets, part) for part in parts]
            places = [pa.array(values) for values in zip(*batch.places)]
            file.write_batch(pa.record_batch([*lists, *places], schema=schema))
            bar.update(len(batch.ids))
            count += len(batch.ids)
            if (line := pace.line(count)) and bar.disable:
                print(f"{time.strftime('%H:%M:%S')} Tokenising: {line}", file=sys.stderr, flush=True)
    (folder / _SKIPPED).write_text(json.dumps(vars(documents.skipped)))


def _write_blocks(token_folder: Path, length: int, seed: int | None, folder: Path, name: str, separate: bool) -> None:
    """Write `blocks.arrow`, cut from the documents in the order of `seed`, with its digest and counts."""
    documents = Dataset.from_file(str(token_folder / _TOKENS))
    skipped = _read_skipped(token_folder)
    if seed is not None:
        documents = select_rows(documents, _order(seed, 0, len(documents)))
    block = pa.list_(pa.int32(), length)
    labels = {"labels": block} if separate or "labels" in documents.column_names else {}
    positions = {"position_ids": block} if separate else {}
    schema = pa.schema({"input_ids": block} | labels | positions | {"documents": pa.string()})
    # One digest for each column: a common one would depend on how many documents are read at once.
    count, digests = 0, [hashlib.blake2b(digest_size=16) for _ in ("input_ids", *labels, *positions)]
    with pa.ipc.new_stream(str(folder / _BLOCKS), schema) as file:
        for blocks in pack(_read_tokens(documents), length, separate):
            columns = (blocks.ids, blocks.labels, blocks.positions)
            parts = [part.ravel() for part in columns if part is not None]
            for digest, part in zip(digests, parts):
                digest.update(np.ascontiguousarray(part).data)
            lists = [pa.FixedSizeListArray.from_arrays(part, length) for part in parts]
            file.write_batch(pa.record_batch([*lists, pa.array(blocks.documents)], schema=schema))
            count += len(blocks.documents)
    # pyrefly: ignore[missing-attribute]  # pyarrow makes these functions when it is imported
    total = pc.sum(pc.list_value_length(documents.data.column("input_ids"))).as_py() or 0
    if not count:
        raise ValueError(_describe_no_block(name, len(documents), total, length, skipped))
    (folder / _SKIPPED).write_text(json.dumps(vars(skipped)))
    (folder / DIGEST).write_text(" ".join(digest.hexdigest() for digest in digests))
    (folder / _COUNTS).write_text(json.dumps({"document": len(documents), "token": total}))


def _read_tokens(documents: Dataset) -> Iterator[Tokens]:
    """Yield the documents in batches of about [`_TOKENS_AT_ONCE`] tokens."""
    average = documents.data.nbytes / 4 / max(1, documents.data.num_rows)  # tokens of a document, 4 bytes each
    at_once = int(min(max(1, _TOKENS_AT_ONCE / max(1, average)), 4096))
    tables: Iterator[Any] = documents.with_format("arrow").iter(at_once)
    for table in tables:
        lists = table["input_ids"].combine_chunks()
        labels = table["labels"].combine_chunks().flatten().to_numpy() if "labels" in table.column_names else None
        places = zip(*(table[column].to_pylist() for column in Place._fields))
        lengths = lists.value_lengths().to_numpy().astype(np.int64)
        yield Tokens(lists.flatten().to_numpy(), labels, lengths, [Place(*place) for place in places])


def _open_blocks(folder: Path, seed: int | None) -> Dataset:
    """Open the blocks of a cache folder, shuffled by `seed`."""
    blocks = Dataset.from_file(str(folder / _BLOCKS))
    if "labels" not in blocks.column_names:  # the labels are the tokens: map the same file twice
        labels: Any = blocks.select_columns("input_ids").rename_column("input_ids", "labels")
        blocks = concatenate_datasets([blocks, labels], axis=1)
    if seed is not None:
        blocks = select_rows(blocks, _order(seed, 1, len(blocks)))
    counts = json.loads((folder / _COUNTS).read_text())
    blocks.info.description = ", ".join(counted(number, noun) for noun, number in counts.items())
    return blocks.with_format("torch")


def select_rows(rows: Dataset, numbers: Iterable[int]) -> Dataset:
    """Return rows of a data set by their numbers."""
    selected: Any = rows.select(numbers)  # its decorator declares other types too
    return selected


def digest_of(blocks: Dataset) -> str:
    """Return a digest of the tokens and labels of a data set from [`load_blocks`], or of a selection from it.

    The digest does not depend on the names and dates of files. A selection has the digest of the whole data set.
    """
    return Path(blocks.cache_files[0]["filename"]).with_name(DIGEST).read_text()


def _order(seed: int, stage: int, count: int) -> np.ndarray:
    """Return the shuffled order of documents (stage 0) or blocks (stage 1), `[count]`."""
    return np.random.default_rng([seed, stage]).permutation(count)


def _read_skipped(folder: Path) -> Skipped:
    return Skipped(**json.loads((folder / _SKIPPED).read_text()))


def _describe_no_block(name: str, documents: int, tokens: int, length: int, skipped: Skipped) -> str:
    """Return the error message for data that gives no block."""
    verb = "is" if documents == 1 else "are"
    problem = (
        f"{name}: {counted(documents, 'document')} with {counted(tokens, 'token')} {verb} too few for one sequence of "
        f"{length}."
    )
    if tokens >= length:
        problem = (
            f"{name}: no sequence of {length} tokens holds a token of the assistant's part. Give a larger `length`."
        )
    return f"{problem} {skipped}" if skipped else problem


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


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Build a cache folder, unless an earlier call has built it.

    The folder is filled under a temporary name, so that a killed run leaves no incomplete one. A lock lets one process
    build while the others wait. A manifest holds the size and checksum of every file, and a folder that does not match
    its manifest is built again.

    Args:
        folder: The folder.
        build: A function that writes the files into the empty folder that it is called with. If it raises an `OSError`
            about data that it reads, the error must have no `errno`: one with an `errno` counts as an error of writing.

    Returns:
        The folder.

    Raises:
        OSError: The folder cannot be written.
        Exception: Any error of `build`. The folder is removed then.
    """
    if _is_whole(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f"{folder.name}.lock")):
            if not _is_whole(folder):
                _build(folder, build)
    except OSError as error:
        if error.errno is None:  # from `build`, about data that it reads
            raise
        raise OSError(f"The cache {folder.parent} cannot be written: {os.strerror(error.errno)}.") from error
    return folder


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    partial = folder.with_name(f"{folder.name}.partial")
    # `folder` may be damaged, and a killed run may have left `partial`.
    for left_over in (folder, partial):
        if left_over.exists():
            shutil.rmtree(left_over)
    partial.mkdir()
    try:
        build(partial)
        manifest = {path.name: _checksum(path) for path in sorted(partial.iterdir())}
        (partial / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _is_whole(folder: Path) -> bool:
    """Return whether the files of a folder match its manifest."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        return all(_checksum(folder / name) == checksum for name, checksum in manifest.items())
    except (OSError, ValueError, AttributeError):
        return False


def _checksum(path: Path) -> list[int]:
    """Return the size and the CRC-32 of a file. CRC-32 finds accidental damage and is as fast as the disk."""
    checksum = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            checksum = zlib.crc32(chunk, checksum)
    return [os.path.getsize(path), checksum]
