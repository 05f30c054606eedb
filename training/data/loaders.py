"""Loaders of local training files: each yields rows with their line numbers, so that an error can name file and line.

`datasets` reads these formats too. But it does not report which line a row comes from or which line is broken. It takes
each line of a text file as a row or holds the whole file in memory. And it copies the data.
"""

import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pyarrow as pa

END_OF_TEXT = "<|endoftext|>"
ROWS_AT_ONCE = 512
TEXT_COLUMN = "text"  # the one column of a text file
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_KINDS = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}


class Document(NamedTuple):
    """A row of a data set, and where it comes from.

    Attributes:
        row: Column -> value.
        source: The file or data set, as the user named it.
        first: The first line of the document in a text file; else the number of its line or row. The first is 1.
        last: The last line; the same as `first` except in text files.
    """

    row: dict[str, Any]
    source: str
    first: int
    last: int


def load_text(name: str, column: str, whole_rows: bool) -> Iterator[Document | ValueError]:
    """Yield the documents of a text file, one at a time in memory.

    Documents end at lines that hold only `<|endoftext|>`. If the file has no such line, they end at empty lines.

    Args:
        name: The path of the file.
        column: Must be `text`.
        whole_rows: Has no effect: a text file has one column.

    Yields:
        Each document, or a ValueError that explains what is wrong with it.

    Raises:
        OSError: The file cannot be read.
        ValueError: `column` is not `text`.
    """
    check_column(name, column, [TEXT_COLUMN])
    with _open(name) as file:  # twice, since the whole file decides which lines separate documents
        separator = END_OF_TEXT if any(line.rstrip("\n") == END_OF_TEXT for line in file) else ""
    lines, first, last = [], 0, 0
    with _open(name) as file:
        for number, line in enumerate(file, 1):
            if line.rstrip("\n") == separator:
                yield from _text_document(name, lines, first, last)
                lines = []
            elif lines or line.strip():
                first = first if lines else number
                last = number if line.strip() else last
                lines.append(line)
    yield from _text_document(name, lines, first, last)


def load_json_lines(name: str, column: str, whole_rows: bool) -> Iterator[Document | ValueError]:
    """Yield a document for the JSON object in each line of a file. Empty lines are left out.

    Args:
        name: The path of the file.
        column: Has no effect: rows may have different columns, so the caller checks each.
        whole_rows: Has no effect: rows have all their columns.

    Yields:
        A document, or a ValueError that explains what is wrong with the line.

    Raises:
        OSError: The file cannot be read.
    """
    with _open(name) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _json_document(name, number, line)


def load_json(name: str, column: str, whole_rows: bool) -> Iterator[Document | ValueError]:
    """Yield the objects of a JSON file as documents. The file holds a list, which is read whole, or an object per line.

    Args:
        name: The path of the file.
        column: Has no effect, as in [`load_json_lines`].
        whole_rows: Has no effect, as in [`load_json_lines`].

    Yields:
        A document, or a ValueError, for each object.

    Raises:
        OSError: The file cannot be read.
        ValueError: The list is broken.
    """
    with _open(name) as file:
        if not file.read(1024).lstrip().startswith("["):
            yield from load_json_lines(name, column, whole_rows)
            return
        file.seek(0)
        text = file.read()
    if problem := _not_utf8(name, 1, text):
        raise problem
    try:
        rows = json.loads(text.removeprefix("\ufeff"))
    except ValueError as error:
        raise _broken_json(name, 1, error) from None
    has_surrogates = _SURROGATE.search(text) is not None
    for number, row in enumerate(rows, 1):
        yield _row_document(name, number, row, has_surrogates)


def load_parquet(name: str, column: str, whole_rows: bool) -> Iterator[Document | ValueError]:
    """Yield the rows of a Parquet file as documents, `ROWS_AT_ONCE` rows at a time in memory.

    Args:
        name: The path of the file.
        column: The column of the text.
        whole_rows: Whether to read all columns, or only `column`.

    Yields:
        A document, or a ValueError, for each row.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file has no such column.
    """
    import pyarrow.parquet as pq  # here, so that text files can be read without pyarrow

    with pq.ParquetFile(name) as file:
        check_column(name, column, file.schema_arrow.names)
        batches = file.iter_batches(ROWS_AT_ONCE, columns=None if whole_rows else [column])
        for number, row in enumerate((row for batch in batches for row in _rows(batch)), 1):
            if isinstance(row, UnicodeDecodeError):
                yield ValueError(f"{name}:{number}: not UTF-8 text (byte {row.object[row.start]:#04x}).")
            else:
                yield Document(row, name, number, number)


# Suffix of a file -> its loader. Arguments: the path, the column of the text, and whether to give all columns.
LOADERS: dict[str, Callable[[str, str, bool], Iterator[Document | ValueError]]] = {
    ".jsonl": load_json_lines,
    ".json": load_json,
    ".parquet": load_parquet,
    ".txt": load_text,
}


def check_column(name: str, column: str, columns: Iterable[str]) -> None:
    """Raise ValueError if a data set lacks a column.

    Args:
        name: The name of the data set, for the message.
        column: The column that is needed.
        columns: The columns that there are.
    """
    columns = list(columns)
    if column not in columns:
        raise ValueError(describe_missing_column(name, column, columns))


def describe_missing_column(place: str, column: str, columns: Iterable[str]) -> str:
    """Return the error message for a missing column.

    Args:
        place: The data set or the line that lacks it.
        column: The missing column.
        columns: The columns that there are.
    """
    columns = list(columns)
    present = ", ".join(f"`{name}`" for name in columns)
    remedy = ""
    if column == "text" and columns:  # the column of a recipe that names none
        is_chat = "messages" in columns or "conversations" in columns
        remedy = " The recipe `sft` trains on conversations." if is_chat else " Give `column=NAME`."
    return f"{place} has no column `{column}`; it has {present or 'no columns'}.{remedy}"


def kind_of(value: Any) -> str:
    """Return the kind of a JSON value in words, such as `a number`."""
    return _KINDS.get(type(value), "an object")


def _open(name: str) -> io.TextIOWrapper:
    # Bytes that are not UTF-8 become lone surrogates, so that reading goes on and `_not_utf8` can name the line.
    return open(name, encoding="utf-8-sig", errors="surrogateescape")


def _not_utf8(name: str, first: int, text: str) -> ValueError | None:
    """Return an error if a text, which begins at line `first`, was not UTF-8 before `_open` decoded it; else `None`."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # `_open` has turned byte 0xNN into the surrogate 0xDCNN.
        line, byte = first + text.count("\n", 0, error.start), ord(text[error.start]) - 0xDC00
        return ValueError(f"{name}:{line}: not UTF-8 text (byte {byte:#04x}).")
    return None


def _text_document(name: str, lines: list[str], first: int, last: int) -> Iterator[Document | ValueError]:
    text = "".join(lines).strip()
    if text:
        yield _not_utf8(name, first, text) or Document({TEXT_COLUMN: text}, name, first, last)


def _json_document(name: str, number: int, line: str) -> Document | ValueError:
    if problem := _not_utf8(name, number, line):
        return problem
    try:
        row = json.loads(line.rstrip("\n"))
    except ValueError as error:
        return _broken_json(name, number, error)
    return _row_document(name, number, row, _SURROGATE.search(line) is not None)


def _has_lone_surrogate(row: Any) -> bool:
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _row_document(name: str, number: int, row: Any, has_surrogates: bool) -> Document | ValueError:
    """Return a row of JSON as a document. Only if its text `has_surrogates`, escaped, are its strings searched."""
    # JSON can escape half of a surrogate pair, which is not a character: tokenizers refuse it.
    if has_surrogates and _has_lone_surrogate(row):
        return ValueError(f"{name}:{number}: not Unicode text (a lone surrogate).")
    if not isinstance(row, dict):
        return ValueError(f"{name}:{number}: holds {kind_of(row)}, not a JSON object.")
    return Document(row, name, number, number)


def _broken_json(name: str, first: int, error: ValueError) -> ValueError:
    if isinstance(error, json.JSONDecodeError):
        return ValueError(f"{name}:{first + error.lineno - 1}: broken JSON at column {error.colno}: {error.msg}.")
    return ValueError(f"{name}:{first}: broken JSON: {error}.")


def _rows(batch: "pa.RecordBatch") -> Iterator[dict[str, Any] | UnicodeDecodeError]:
    """Yield the rows of a batch, or the error of a row that is not UTF-8."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError as error:
        if len(batch) == 1:
            yield error
        else:
            # The error does not name the row: convert each row by itself.
            for number in range(len(batch)):
                yield from _rows(batch.slice(number, 1))
