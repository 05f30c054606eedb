"""Format tables of results in Markdown, and write them into pages, between marks.

Pages of this project show numbers that commands measure. A page marks the place of each table. The command that
measures the numbers replaces the table there.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from attnres.utils.files import atomic_write, locked


def update_tables(path: Path, tables: dict[str, str]) -> None:
    """Write tables between the marks `<!-- NAME -->` and `<!-- end -->` of a Markdown file.

    A table without marks is added at the end of the file. A missing file is made.

    Args:
        path: The Markdown file.
        tables: The tables in Markdown by the names of their marks.

    Raises:
        ValueError: A mark has no end, has another mark before its end, or occurs twice; or the file is not UTF-8. The
            file stays as it is.
    """
    path = Path(os.path.realpath(path))  # so that a link stays, and the file behind it is replaced
    path.parent.mkdir(parents=True, exist_ok=True)
    # Another process may write other tables of the same page.
    with locked(path.with_name(f".{path.name}.lock"), path, wait=True):
        atomic_write(path, _with_tables(path, _read(path), tables))


def markdown(columns: Iterable[str], rows: Iterable[Iterable[str]], texts: int | None = None) -> str:
    """Return a table in Markdown.

    Args:
        columns: The heads of the columns.
        rows: The cells of each row.
        texts: How many of the first columns hold text. The others hold numbers, and are aligned to the right. `None`
            aligns no column.
    """
    columns = [*columns]
    num_texts = len(columns) if texts is None else texts
    rule = ["---"] * num_texts + ["---:"] * (len(columns) - num_texts)
    return "\n".join([f"| {' | '.join(columns)} |", f"|{'|'.join(rule)}|", *(f"| {' | '.join(row)} |" for row in rows)])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8") if path.exists() else ""
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be a text in UTF-8 ({error}).") from error


def _with_tables(path: Path, text: str, tables: dict[str, str]) -> str:
    """Return the text of a page with these tables; `path` is for error messages."""
    for name, table in tables.items():
        begin, end = f"<!-- {name} -->", "<!-- end -->"
        if begin not in text:
            text += f"\n{begin}\n{end}\n"
        head, _, rest = text.partition(begin)
        if begin in rest:
            raise ValueError(f"{path}: `{begin}` occurs twice: keep one of its tables.")
        old, closing, tail = rest.partition(end)
        if not closing or "<!--" in old:
            raise ValueError(f"{path}: the table of `{begin}` does not end with `{end}`.")
        text = f"{head}{begin}\n{table}\n{end}{tail}"
    return text


__all__ = ["markdown", "update_tables"]
