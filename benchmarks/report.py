"""Show tables of results on the terminal and in Markdown."""

import sys
from collections.abc import Iterable, Sequence
from io import StringIO

from rich import box
from rich.console import Console
from rich.table import Table

from .stored import cell, store, targets_met, verdict


def open_console() -> Console:
    """Return a console with the terminal's width, or wide enough for every table if the output is a file."""
    # Without markup, since `rich` would take "[quartiles]" for a style and leave it out.
    if sys.stdout.isatty():
        return Console(markup=False)
    return Console(width=150, color_system=None, markup=False)


def make_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], note: str = "") -> Table:
    """Make a table with numbers aligned to the right. The number of targets met, if there are any, is shown below it.

    Args:
        title: text above the table.
        columns: heads of the columns.
        rows: cells, which may be numbers. A cell with a target comes from [`verdict`].
        note: text below the table.

    Returns:
        The table, to print or to pass to [`markdown`].
    """
    cells = [[str(value) for value in row] for row in rows]
    table = Table(title=title, caption=(targets_met(cells) + note).strip(), box=box.SIMPLE, title_justify="left")
    table.caption_justify = "left"
    for i, column in enumerate(columns):
        is_number = all(row[i] == "-" or row[i][:1].isdigit() for row in cells)
        table.add_column(column, justify="right" if is_number else "left")
    for row in cells:
        table.add_row(*row)
    return table


def markdown(table: Table) -> str:
    """Return the table in Markdown, between its title and its note."""
    text = StringIO()
    shown = Console(file=text, width=10_000, color_system=None)
    title, note, former = table.title, table.caption, table.box
    table.title, table.caption, table.box = None, None, box.MARKDOWN
    shown.print(table)
    table.title, table.caption, table.box = title, note, former
    lines = [line.strip() for line in text.getvalue().splitlines() if line.strip()]
    return "\n\n".join(part for part in (f"**{title}**", "\n".join(lines), str(note or "")) if part)


__all__ = ["cell", "make_table", "markdown", "open_console", "store", "verdict"]
