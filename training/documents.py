"""Which documents a data set holds, in order, and what becomes of rows and files that cannot be used."""

import glob
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from datasets import Dataset, IterableDataset, load_dataset, load_dataset_builder
from datasets.data_files import DataFilesDict, get_data_patterns
from pyarrow import ArrowException
from yaml import YAMLError

from attnres.utils.yaml_files import load_card_metadata

from .loaders import LOADERS, ROWS_AT_ONCE, TEXT_COLUMN, Document, check_column, kind_of, no_column
from .recipe import BAD_ROWS

_HUB_ID = re.compile(r"(?P<id>\w[\w.-]*(/\w[\w.-]*)?)(:(?P<config>[^/:]+))?")
_SUFFIXES = ", ".join(list(LOADERS)[:-1]) + f" or {list(LOADERS)[-1]}"


@dataclass(frozen=True)
class DataSpec:
    """Which documents to read.

    Args:
        paths: Hub data set ids (`org/name` or `org/name:config`); `.jsonl`, `.json`, `.parquet` and `.txt` files; glob
            patterns of files; folders of files, or laid out as on the Hub (a README that names `configs`). They follow
            each other in the order given.
        split: of Hub data sets and of folders, whose files belong to splits by their names, as `datasets` has it.
        column: holds the text, or the messages of chat data. That of a `.txt` file is `text`.
        streaming: read while training, without a tokenised copy on disk.
        bad_rows: `"error"`, or `"skip"`: rows and files that cannot be used are left out, counted, and reported.
        limit: read only so many documents.

    Raises:
        ValueError: a field has a value that is not allowed.
    """

    paths: tuple[str, ...]
    split: str = "train"
    column: str = TEXT_COLUMN
    streaming: bool = False
    bad_rows: str = "error"
    limit: int | None = None

    def __post_init__(self) -> None:
        paths = (self.paths,) if isinstance(self.paths, str | Path) else self.paths
        object.__setattr__(self, "paths", tuple(str(path) for path in paths))
        if not self.paths:
            raise ValueError("`paths` is empty: name at least one data set or file.")
        if self.bad_rows not in BAD_ROWS:
            raise ValueError(f"`bad_rows` is {self.bad_rows!r}, but can be 'error' or 'skip'.")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"`limit` is {self.limit}, but must be at least 1.")


@dataclass
class Skipped:
    """What was left out, and why the first of it was."""

    rows: int = 0
    sources: int = 0
    reason: str = ""

    def __bool__(self) -> bool:
        return bool(self.reason)

    def __str__(self) -> str:
        counts = [f"{n} {word}{'s' * (n > 1)}" for n, word in ((self.rows, "row"), (self.sources, "file")) if n]
        return f"Skipped {' and '.join(counts)}, the first because: {self.reason}" if self else "Skipped nothing."


class DocumentSource(Protocol):
    name: str

    def identity(self) -> tuple:
        """Changes when the content does."""

    def read(self, column: str, whole_rows: bool) -> Iterator[Document | ValueError]:
        """A document for each row, or what is wrong with the row; raises what is wrong with all of it."""


@dataclass(frozen=True)
class FileSource:
    """A local file; `name` is its path as the user wrote it."""

    name: str

    def identity(self) -> tuple:
        try:
            status = os.stat(self.name)
        except OSError as error:
            raise type(error)(f"{self.name} cannot be read: {error.strerror}.") from error
        return self.name, str(Path(self.name).resolve()), status.st_size, status.st_mtime_ns

    def read(self, column: str, whole_rows: bool) -> Iterator[Document | ValueError]:
        return LOADERS[Path(self.name).suffix.lower()](self.name, column, whole_rows)


@dataclass(frozen=True)
class DatasetSource:
    """A data set of the Hub, as `datasets` has loaded it."""

    name: str
    data: Dataset | IterableDataset

    def identity(self) -> tuple:
        return self.name, self.data._fingerprint

    def read(self, column: str, whole_rows: bool) -> Iterator[Document | ValueError]:
        data = self.data
        if data.column_names is not None:  # a stream may not know them
            check_column(self.name, column, data.column_names)
            data = data if whole_rows else data.select_columns([column])
        rows = (dict(zip(batch, values)) for batch in data.iter(ROWS_AT_ONCE) for values in zip(*batch.values()))
        for number, row in enumerate(rows, 1):
            yield Document(row, self.name, number, number)


@dataclass
class Documents(Iterable[Document]):
    """The documents of a [`DataSpec`], in order; iterating anew reads them anew.

    Args:
        whole_rows: give all columns, for an encoder of rows; else only the text. Documents without a visible character
            are left out then.

    Raises (when made, or when read):
        OSError: a file is absent or cannot be read.
        ValueError: a data set, file or row cannot be used. With `bad_rows="skip"` both are counted in `skipped`.
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
        self._absent = self.skipped

    def __iter__(self) -> Iterator[Document]:
        self.skipped = replace(self._absent)
        return itertools.islice(itertools.chain.from_iterable(map(self._read, self.sources)), self.spec.limit)

    def identities(self) -> list[tuple]:
        """Changes when the documents may."""
        return [source.identity() for source in self.sources]

    def skip_row(self, problem: ValueError) -> None:
        """Raise `problem`, or count it if such rows are to be skipped."""
        if self.spec.bad_rows == "error":
            raise problem
        self.skipped.rows += 1
        self.skipped.reason = self.skipped.reason or str(problem)

    def _read(self, source: DocumentSource) -> Iterator[Document]:
        found = False
        try:
            for item in source.read(self.spec.column, self.whole_rows):
                found = True
                problem = item if isinstance(item, ValueError) else self._problem(item)
                if problem:
                    self.skip_row(problem)
                elif self.whole_rows or item.row[self.spec.column].strip():
                    yield item
            if not found:
                raise ValueError(f"{source.name} holds no documents.")
        except (OSError, ValueError, ArrowException) as error:
            self._skip_source(source.name, error)

    def _skip_source(self, name: str, error: Exception) -> None:
        if isinstance(error, OSError) and error.strerror:
            error = type(error)(f"{name} cannot be read: {error.strerror}.")
        elif isinstance(error, ArrowException):
            error = ValueError(f"{name} cannot be read: {_one_line(error)}")
        if self.spec.bad_rows == "error":
            raise error
        self.skipped.sources += 1
        self.skipped.reason = self.skipped.reason or str(error)

    def _problem(self, document: Document) -> ValueError | None:
        """Why the document is none: it lacks the column, or its text is not one."""
        column = self.spec.column
        if column not in document.row:
            return ValueError(no_column(f"{document.source}:{document.first}", column, document.row))
        value = document.row[column]
        if self.whole_rows or isinstance(value, str):
            return None
        return ValueError(
            f"{document.source}:{document.first}: column `{column}` holds {kind_of(value)}, not a string."
        )


def file_identities(spec: DataSpec) -> list[tuple[str, int, int]]:
    """Return name, size and time of change of each local file of a [`DataSpec`]; the Hub's data sets are left out."""
    identities = []
    for path in spec.paths:
        if _HUB_ID.fullmatch(path) and not os.path.exists(os.path.expanduser(path)):
            continue
        for source in find_sources(path, spec):
            status = os.stat(source.name)
            identities.append((source.name, status.st_size, status.st_mtime_ns))
    return identities


def find_sources(path: str, spec: DataSpec) -> list[DocumentSource]:
    """The files or the data set that `path` names.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is of no kind that can be read, or has not that split or configuration.
    """
    local = Path(os.path.expanduser(path))
    if local.is_dir():
        return _folder(local, None, spec)
    if local.exists():
        return [_file(local)]
    if glob.has_magic(path):
        files = sorted(glob.glob(str(local), recursive=True))
        if not files:
            raise FileNotFoundError(f"{path} matches no file.")
        return [_file(Path(file)) for file in files]
    folder, _, config = str(local).rpartition(":")
    if folder and Path(folder).is_dir():
        return _folder(Path(folder), config, spec)
    hub_id = _HUB_ID.fullmatch(path)
    if hub_id is None or local.suffix.lower() in LOADERS:
        raise FileNotFoundError(f"{path} does not exist.")
    return [_load(path, hub_id["id"], hub_id["config"], spec)]


def _file(path: Path) -> DocumentSource:
    if path.suffix.lower() not in LOADERS:
        raise ValueError(f"{path} is of no kind that can be read, which are {_SUFFIXES}.")
    return FileSource(str(path))


def _folder(path: Path, config: str | None, spec: DataSpec) -> list[DocumentSource]:
    name = f"{path}:{config}" if config else str(path)
    if _names_configurations(path / "README.md"):
        # Only the files' names are taken from `datasets`: its copies of their content are known by the folder's name
        # alone, and outlive a change of the content.
        files = _explained(name, load_dataset_builder, str(path), config).config.data_files
    elif config is None:
        files = _files_by_split(path)
    else:
        raise ValueError(f"{path} has no configuration {config!r}, as no README.md in it names `configs`.")
    if not files:
        raise FileNotFoundError(f"{path} holds no {_SUFFIXES} file.")
    if spec.split not in files:
        raise ValueError(f"{name} has no split {spec.split!r}, but {', '.join(repr(str(split)) for split in files)}.")
    return [_file(path / os.path.relpath(file, os.path.abspath(path))) for file in sorted(files[spec.split])]


def _files_by_split(path: Path) -> DataFilesDict:
    base = glob.escape(str(path))
    try:
        return DataFilesDict.from_patterns(get_data_patterns(base), base_path=base, allowed_extensions=list(LOADERS))
    except FileNotFoundError:  # none at all
        return DataFilesDict()


def _names_configurations(readme: Path) -> bool:
    try:
        return readme.is_file() and "configs" in (load_card_metadata(readme) or {})
    except (ValueError, YAMLError) as error:
        raise ValueError(f"{readme} begins with metadata that cannot be read: {_one_line(error)}") from error


def _load(name: str, path: str, config: str | None, spec: DataSpec) -> DocumentSource:
    return DatasetSource(name, _explained(name, load_dataset, path, config, split=spec.split, streaming=spec.streaming))


def _explained(name: str, load: Callable, *arguments: Any, **options: Any) -> Any:
    """`load(*arguments, **options)`; any error, of the Hub, the network, or one of its many formats, in one line."""
    try:
        return load(*arguments, **options)
    except Exception as error:
        cause = error.__cause__ if "error occurred while generating" in str(error) and error.__cause__ else error
        raise ValueError(f"{name} cannot be loaded: {_one_line(cause)}") from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
