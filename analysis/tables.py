"""Write tables of results into Markdown pages, between marks.

Pages of this project show numbers that commands measure. A page marks the place of each table. The command that
measures the numbers replaces the table there.
"""

import os
import re
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


def check_tables(path: Path, prefix: str) -> None:
    """Check that [`update_tables`] can write the tables of a page. Call this before long work.

    Args:
        path: The Markdown file, which need not exist.
        prefix: The beginning of the names of the marks to check.

    Raises:
        ValueError: As for [`update_tables`].
    """
    text = _read(path)
    _with_tables(path, text, dict.fromkeys(re.findall(rf"<!-- ({re.escape(prefix)}.*?) -->", text), ""))


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


__all__ = ["check_tables", "update_tables"]
