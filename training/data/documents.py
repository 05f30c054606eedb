"""Find the documents that a recipe's data sets hold, in order, and handle rows and files that cannot be used.

A data set is a local file, a folder, a glob pattern or a Hub id. `bad_rows` of the recipe decides whether a bad row or
file ends the run or is counted.
"""

import glob
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from yaml import YAMLError

from attnres.utils.extras import require_extra
from attnres.utils.yaml_files import load_card_metadata

from ..recipe import BAD_ROWS
from .loaders import LOADERS, ROWS_AT_ONCE, TEXT_COLUMN, Document, check_column, describe_missing_column, kind_of
from .paths import DataFolder, HubData, check_suffix, describe_empty, find_data

with require_extra("train"):
    from datasets import Dataset, IterableDataset, load_dataset, load_dataset_builder
    from datasets.data_files import DataFilesDict, get_data_patterns
    from pyarrow import ArrowException  # `datasets` brings pyarrow


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
        return readme.is_file() and "configs" in (load_card_metadata(readme) or {})
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
