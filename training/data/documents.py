"""Find the documents that a recipe's data sets hold, in order, and encode them as tokens.

A data set is a local file, a folder, a glob pattern or a Hub id. `bad_rows` of the recipe decides whether a row or file
that cannot be used ends the run or is counted.
"""

import glob
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from huggingface_hub import metadata_load
from transformers import PreTrainedTokenizerBase
from yaml import YAMLError

from attnres.checkpoints.tokenizers import is_plain_fast
from attnres.utils.extras import require_extra

from ..recipe import BAD_ROWS
from .loaders import LOADERS, ROWS_AT_ONCE, TEXT_COLUMN, Document, check_column, describe_missing_column, kind_of
from .paths import DataFolder, HubData, check_suffix, describe_empty, find_data

with require_extra("train"):
    from datasets import Dataset, IterableDataset, load_dataset, load_dataset_builder
    from datasets.data_files import DataFilesDict, get_data_patterns
    from datasets.fingerprint import Hasher
    from pyarrow import ArrowException  # `datasets` brings pyarrow


# A function that returns the `input_ids` and `labels` of a row, and raises ValueError for a row that it cannot use.
Encode = Callable[[dict[str, Any]], dict[str, Any]]

_CHARACTERS_AT_ONCE, _DOCUMENTS_AT_ONCE = 1 << 20, 1024


@dataclass(frozen=True)
class DataSpec:
    """A specification of the documents to read.

    Args:
        paths: Hub data set ids (`org/name` or `org/name:config`); `.jsonl`, `.json`, `.parquet` and `.txt` files; glob
            patterns of files; folders of files, or folders laid out as on the Hub (with a README that names `configs`).
            They are read in the order given.
        split: The split of Hub data sets and of folders. `datasets` derives the split of a folder's file from its name.
        column: The column of the text, or of the messages of chat data. A `.txt` file has the column `text`.
        streaming: Read the data during training, without a tokenised copy on disk.
        bad_rows: `"error"` to raise at a row or file that cannot be used; `"skip"` to leave it out and count it.
        limit: The most documents to read. By default all.

    Raises:
        ValueError: A field has a value that is not allowed.
    """

    paths: tuple[str, ...]
    split: str = "train"
    column: str = TEXT_COLUMN
    streaming: bool = False
    bad_rows: str = "error"
    limit: int | None = None

    def __post_init__(self) -> None:
        paths = (self.paths,) if isinstance(self.paths, str | Path) else self.paths
        object.__setattr__(self, "paths", tuple(map(str, paths)))
        if not self.paths:
            raise ValueError("`paths` is empty: name at least one data set or file.")
        if self.bad_rows not in BAD_ROWS:
            raise ValueError(f"`bad_rows` is {self.bad_rows!r}, but must be 'error' or 'skip'.")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"`limit` is {self.limit}, but must be at least 1.")


@dataclass
class Skipped:
    """A count of the rows and files that were left out, and the reason for the first of them."""

    rows: int = 0
    sources: int = 0
    reason: str = ""

    def __bool__(self) -> bool:
        return bool(self.reason)

    def __str__(self) -> str:
        counts = [f"{n} {word}{'s' * (n > 1)}" for n, word in ((self.rows, "row"), (self.sources, "file")) if n]
        return f"Skipped {' and '.join(counts)}, the first because: {self.reason}" if self else "Skipped nothing."


@dataclass(frozen=True)
class FileSource:
    """A local file."""

    name: str

    def identity(self) -> tuple:
        """Return the name, path, size and time of change of the file."""
        try:
            status = os.stat(self.name)
        except OSError as error:
            raise type(error)(f"{self.name} cannot be read: {error.strerror}.") from error
        return self.name, str(Path(self.name).resolve()), status.st_size, status.st_mtime_ns

    def read(self, column: str, whole_rows: bool) -> Iterator[Document | ValueError]:
        """Yield a document for each row, or a ValueError that explains what is wrong with the row.

        Args:
            column: The column that a document needs.
            whole_rows: Whether to give all columns, or only `column`.

        Raises:
            OSError, ValueError: The file as a whole cannot be read.
        """
        return LOADERS[Path(self.name).suffix.lower()](self.name, column, whole_rows)


@dataclass(frozen=True)
class DatasetSource:
    """A data set of the Hub, as `datasets` has loaded it."""

    name: str
    data: Dataset | IterableDataset

    def identity(self) -> tuple:
        """Return the name and the fingerprint of the data set."""
        # A private attribute: `datasets` has no public value that changes with the content. A stream has none.
        return self.name, vars(self.data)["_fingerprint"]

    def read(self, column: str, whole_rows: bool) -> Iterator[Document | ValueError]:
        """Yield the rows of the data set, read `ROWS_AT_ONCE` at a time, as [`FileSource.read`] does."""
        data: Any = self.data
        if data.column_names is not None:  # a stream may not know its columns
            check_column(self.name, column, data.column_names)
            data = data if whole_rows else data.select_columns([column])
        rows = (dict(zip(batch, values)) for batch in data.iter(ROWS_AT_ONCE) for values in zip(*batch.values()))
        for number, row in enumerate(rows, 1):
            yield Document(row, self.name, number, number)


DocumentSource = FileSource | DatasetSource  # one file or data set of a [`DataSpec`], `name` as the user wrote it


@dataclass
class Documents(Iterable[Document]):
    """The documents of a [`DataSpec`], in order. Each iteration reads the files again.

    Args:
        spec: The specification.
        whole_rows: Whether to give all columns, for an encoder of rows. If not, only the text is given, and documents
            without a visible character are left out.
        skipped: The count of rows and files left out. Each iteration counts anew.

    Raises:
        OSError: A file is absent or cannot be read, now or in an iteration.
        ValueError: A data set, file or row cannot be used, now or in an iteration. With `bad_rows="skip"` both errors
            are counted in `skipped` instead.
    """

    spec: DataSpec
    whole_rows: bool = False
    skipped: Skipped = field(default_factory=Skipped)

    def __post_init__(self) -> None:
        self.sources: list[DocumentSource] = []
        for path in self.spec.paths:
            try:
                self.sources += find_sources(path, self.spec)
            except (OSError, ValueError) as error:
                self._skip_source(path, error)
        self._absent = self.skipped  # the sources that were not found; each iteration begins with this count

    def __iter__(self) -> Iterator[Document]:
        self.skipped = replace(self._absent)
        return itertools.islice(itertools.chain.from_iterable(map(self._read, self.sources)), self.spec.limit)

    def identities(self) -> list[tuple]:
        """Return values that change when the content of a source changes."""
        return [source.identity() for source in self.sources]

    def skip_row(self, problem: ValueError) -> None:
        """Raise `problem`, or count it if `bad_rows` is `"skip"`."""
        if self.spec.bad_rows == "error":
            raise problem
        self.skipped.rows += 1
        self.skipped.reason = self.skipped.reason or str(problem)

    def _read(self, source: DocumentSource) -> Iterator[Document]:
        """Yield the usable documents of a source."""
        is_empty = True
        try:
            for item in source.read(self.spec.column, self.whole_rows):
                is_empty = False
                if isinstance(item, ValueError):
                    self.skip_row(item)
                elif problem := self._problem(item):
                    self.skip_row(problem)
                elif self.whole_rows or item.row[self.spec.column].strip():
                    yield item
            if is_empty:
                raise ValueError(f"{source.name} holds no documents.")
        except (OSError, ValueError, ArrowException) as error:
            self._skip_source(source.name, error)

    def _skip_source(self, name: str, error: Exception) -> None:
        """Raise the error in one line that names the source, or count it if `bad_rows` is `"skip"`."""
        if isinstance(error, OSError) and error.strerror:
            error = type(error)(f"{name} cannot be read: {error.strerror}.")
        elif isinstance(error, ArrowException):
            error = ValueError(f"{name} cannot be read: {_one_line(error)}")
        if self.spec.bad_rows == "error":
            raise error
        self.skipped.sources += 1
        self.skipped.reason = self.skipped.reason or str(error)

    def _problem(self, document: Document) -> ValueError | None:
        """Return an error if the document lacks the column or its text is not a string, else `None`."""
        column = self.spec.column
        if column not in document.row:
            place = f"{document.source}:{document.first}"
            return ValueError(describe_missing_column(place, column, document.row))
        value = document.row[column]
        if self.whole_rows or isinstance(value, str):
            return None
        return ValueError(
            f"{document.source}:{document.first}: column `{column}` holds {kind_of(value)}, not a string."
        )


def file_identities(spec: DataSpec) -> list[tuple[str, int, int]]:
    """Return name, size and time of change of each local file of a [`DataSpec`], without data sets of the Hub.

    With `bad_rows="skip"`, files that cannot be found or read are left out too.
    """
    identities = []
    for path in spec.paths:
        try:
            data = find_data(path)
            for source in () if isinstance(data, HubData) else _local_sources(data, spec):
                status = os.stat(source.name)
                identities.append((source.name, status.st_size, status.st_mtime_ns))
        except (OSError, ValueError):
            if spec.bad_rows == "error":
                raise
    return identities


def find_sources(path: str, spec: DataSpec) -> Sequence[DocumentSource]:
    """Find the files or the data set that one of the paths of a [`DataSpec`] names.

    Args:
        path: A file, a folder, a glob pattern or a Hub id.
        spec: The specification, for its split.

    Returns:
        The sources, in order.

    Raises:
        FileNotFoundError: The path names nothing.
        ValueError: The kind of file is unknown, or the split or configuration does not exist.
    """
    data = find_data(path)
    if isinstance(data, HubData):
        options = {"split": spec.split, "streaming": spec.streaming}
        return [DatasetSource(path, _explained(path, load_dataset, *data, **options))]
    return _local_sources(data, spec)


def _local_sources(data: list[str] | DataFolder, spec: DataSpec) -> list[FileSource]:
    """Return the files that a path of a [`DataSpec`] names. Raise as [`find_sources`] does."""
    if isinstance(data, DataFolder):
        return _folder_sources(data.path, data.config, spec)
    return [FileSource(file) for file in data]


def _folder_sources(path: Path, config: str | None, spec: DataSpec) -> list[FileSource]:
    """Return the files of a folder that belong to the split, in the order of their names."""
    name = f"{path}:{config}" if config else str(path)
    if _names_configurations(path / "README.md"):
        # `datasets` only finds the files. Reading them through its cache would give old content after a change, since
        # the cache knows a folder by its name alone.
        files = _explained(name, load_dataset_builder, str(path), config).config.data_files
    elif config is None:
        files = _files_by_split(path)
    else:
        raise ValueError(f"{path} has no configuration {config!r}, since no README.md in it lists `configs`.")
    if not files:
        raise FileNotFoundError(describe_empty(path))
    if spec.split not in files:
        splits = ", ".join(repr(str(split)) for split in files)
        raise ValueError(f"{name} has no split {spec.split!r}; it has {splits}.")
    paths = (path / os.path.relpath(file, os.path.abspath(path)) for file in sorted(files[spec.split]))
    return [FileSource(check_suffix(file)) for file in paths]


def _files_by_split(path: Path) -> DataFilesDict:
    """Return the files of a folder by split, which `datasets` derives from their names."""
    base = glob.escape(str(path))  # since `datasets` takes it for a pattern
    try:
        return DataFilesDict.from_patterns(get_data_patterns(base), base_path=base, allowed_extensions=list(LOADERS))
    except FileNotFoundError:  # the folder holds no such files
        return DataFilesDict()


def _names_configurations(readme: Path) -> bool:
    """Return whether the README of a folder lists its files under `configs`, as on the Hub."""
    try:
        return readme.is_file() and "configs" in (metadata_load(readme) or {})
    except (ValueError, YAMLError) as error:
        raise ValueError(f"{readme} begins with metadata that cannot be read: {_one_line(error)}") from error


def _explained(name: str, load: Callable, *arguments: Any, **options: Any) -> Any:
    """Call `load(*arguments, **options)`, a function of `datasets`. Raise any error as a ValueError of one line."""
    try:
        return load(*arguments, **options)
    except Exception as error:  # there are many kinds: of the Hub, of the network, and of each format
        # `datasets` wraps the errors of a format in one that gives no reason.
        cause = error.__cause__ if "error occurred while generating" in str(error) and error.__cause__ else error
        raise ValueError(f"{name} cannot be loaded: {_one_line(cause)}") from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


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


@dataclass(frozen=True)
class Encoder:
    """An encoder of documents.

    Args:
        tokenizer: The tokenizer.
        encode: A function that encodes a row. Without it, text is tokenised with the tokenizer's own special tokens,
            and ends with its end-of-text token.

    Raises:
        ValueError: There is no `encode`, and the tokenizer has no end-of-text token.
    """

    tokenizer: PreTrainedTokenizerBase
    encode: Encode | None = None

    def __post_init__(self) -> None:
        if self.encode is None and self.tokenizer.eos_token_id is None:
            raise ValueError("The tokenizer has no end-of-text token: set its `eos_token`.")

    def key(self) -> str:
        """Return a digest for the name of a cache folder. It changes if the same documents may give other tokens."""
        if self.encode is not None:
            return Hasher.hash((self.tokenizer.chat_template, self.encode))
        if not is_plain_fast(self.tokenizer):
            return Hasher.hash(self.tokenizer)
        state = json.loads(self.tokenizer.backend_tokenizer.to_str())
        # Calls of the tokenizer leave their settings here. `_encode_texts` resets them.
        for setting in ("padding", "truncation"):
            state.pop(setting, None)
        return key_of(state, self.tokenizer.eos_token_id, self.tokenizer.split_special_tokens)

    def batches(self, documents: Documents) -> Iterator[Tokens]:
        """Yield the tokens of all documents. `bad_rows` of `documents` decides about rows that cannot be encoded."""
        for batch in _batched(documents, documents.spec.column):
            if self.encode is None:
                tokens = self._encode_texts(batch, documents.spec.column)
            else:
                tokens = _encode_rows(self.encode, batch, documents)
            if tokens.places:
                yield tokens

    def _encode_texts(self, batch: list[Document], column: str) -> Tokens:
        texts = [document.row[column] for document in batch]
        if is_plain_fast(self.tokenizer):
            # A call resets the padding and truncation that an earlier call may have left in the backend.
            self.tokenizer("")
            # This gives the tokens of a call in half the time, since it computes no offsets.
            ids = [encoding.ids for encoding in self.tokenizer.backend_tokenizer.encode_batch_fast(texts)]
        else:
            ids = self.tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]
        end = self.tokenizer.eos_token_id
        return _join([text if text[-1:] == [end] else [*text, end] for text in ids], None, batch)


def _encode_rows(encode: Encode, batch: list[Document], documents: Documents) -> Tokens:
    ids, labels, encoded = [], [], []
    for document in batch:
        try:
            row = encode(document.row)
            if len(row["input_ids"]) != len(row["labels"]):
                raise ValueError(f"{len(row['input_ids'])} tokens, but {len(row['labels'])} labels.")
        except ValueError as error:
            documents.skip_row(ValueError(f"{document.source}:{document.first}: {error}"))
            continue
        if len(row["input_ids"]):
            ids.append(row["input_ids"])
            labels.append(row["labels"])
            encoded.append(document)
    return _join(ids, labels, encoded)


def key_of(*parts: Any) -> str:
    """Return a name of 24 hexadecimal digits for values that JSON can hold, the same in every process."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _batched(documents: Iterable[Document], column: str) -> Iterator[list[Document]]:
    """Yield batches that are limited in documents and in characters, so that they fit into memory."""
    batch, characters = [], 0
    for document in documents:
        batch.append(document)
        value = document.row[column]
        characters += len(value) if isinstance(value, str) else 0
        if characters >= _CHARACTERS_AT_ONCE or len(batch) >= _DOCUMENTS_AT_ONCE:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _join(ids: list, labels: list | None, batch: list[Document]) -> Tokens:
    """Join the tokens `ids` and the `labels` of the documents of a batch, one list for each document."""
    lengths = np.array([len(document) for document in ids], dtype=np.int64)

    def flat(part: list) -> np.ndarray:
        return np.fromiter(itertools.chain.from_iterable(part), np.int32, lengths.sum())

    places = [Place(document.source, document.first, document.last) for document in batch]
    return Tokens(flat(ids), None if labels is None else flat(labels), lengths, places)
