"""Tables of results in Markdown files, written in place between marks."""

import os
import re
from pathlib import Path

from attnres.utils.files import atomic_write, locked


def update_tables(path: Path, tables: dict[str, str]) -> None:
    """Write each table between the marks `<!-- NAME -->` and `<!-- end -->` of a Markdown file, or at its end.

    Raises:
        ValueError: a mark has no end, or another mark before it, or stands there twice, or the file is no text; it is
            left as it is.
    """
    path = Path(os.path.realpath(path))  # by a link it is the same page
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_name(f".{path.name}.lock"), path, wait=True):  # others may write other tables of the page
        atomic_write(path, _with_tables(path, _read(path), tables))


def check_tables(path: Path, prefix: str) -> None:
    """Raises ValueError: [`update_tables`] would, for a name of this file that begins with `prefix`."""
    text = _read(path)
    _with_tables(path, text, dict.fromkeys(re.findall(rf"<!-- ({re.escape(prefix)}.*?) -->", text), ""))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8") if path.exists() else ""
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8 ({error}).") from error


def _with_tables(path: Path, text: str, tables: dict[str, str]) -> str:
    """The text of a file with these tables in it."""
    for name, table in tables.items():
        begin, end = f"<!-- {name} -->", "<!-- end -->"
        if begin not in text:
            text += f"\n{begin}\n{end}\n"
        head, _, rest = text.partition(begin)
        if begin in rest:
            raise ValueError(f"{path}: `{begin}` stands there twice. Keep one of its tables.")
        old, found, tail = rest.partition(end)
        if not found or "<!--" in old:
            raise ValueError(f"{path}: the table of `{begin}` does not end with `{end}`.")
        text = f"{head}{begin}\n{table}\n{end}{tail}"
    return text
