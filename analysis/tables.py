"""Tables of results in Markdown files, written in place between marks."""

from pathlib import Path

from attnres.files import atomic_write


def update_tables(path: Path, tables: dict[str, str]) -> None:
    """Write each table between the marks `<!-- NAME -->` and `<!-- end -->` of a Markdown file, or at its end.

    Raises:
        ValueError: a mark has no end, or another mark before it; the file is left as it is.
    """
    text = path.read_text() if path.exists() else ""
    for name, table in tables.items():
        begin, end = f"<!-- {name} -->", "<!-- end -->"
        if begin not in text:
            text += f"\n{begin}\n{end}\n"
        head, _, rest = text.partition(begin)
        old, found, tail = rest.partition(end)
        if not found or "<!--" in old:
            raise ValueError(f"{path}: the table of `{begin}` does not end with `{end}`.")
        text = f"{head}{begin}\n{table}\n{end}{tail}"
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, text)
