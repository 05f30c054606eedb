"""Tables, on the terminal and in Markdown, and the files that results are stored in."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from attnres.cli_support import write_at_once


def open_console() -> Console:
    """The terminal at its width; where it is a file, wide enough for every table."""
    return Console() if sys.stdout.isatty() else Console(width=150, color_system=None)


def make_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], note: str = "") -> Table:
    """Columns of numbers are aligned to the right. Below stand how many targets are met, if there are any, and a note.

    Args:
        rows: cells, which may be numbers; those with a target are from [`verdict`].
    """
    rows = [[str(value) for value in row] for row in rows]
    verdicts = [value.rpartition(" ")[2] for row in rows for value in row if value.endswith((" met", " missed"))]
    targets = f"Targets met: {verdicts.count('met')} of {len(verdicts)}. " if verdicts else ""
    table = Table(title=title, caption=(targets + note).strip(), box=box.SIMPLE, title_justify="left")
    table.caption_justify = "left"
    for i, column in enumerate(columns):
        is_number = all(row[i] == "-" or row[i][:1].isdigit() for row in rows)
        table.add_column(column, justify="right" if is_number else "left")
    for row in rows:
        table.add_row(*row)
    return table


def markdown(table: Table) -> str:
    """The table in Markdown, between its title and its note."""
    shown = Console(file=StringIO(), width=10_000, color_system=None)
    title, note, former = table.title, table.caption, table.box
    table.title, table.caption, table.box = None, None, box.MARKDOWN
    shown.print(table)
    table.title, table.caption, table.box = title, note, former
    lines = [line.strip() for line in shown.file.getvalue().splitlines() if line.strip()]
    return "\n\n".join(part for part in (f"**{title}**", "\n".join(lines), note) if part)


def cell(row: Mapping, name: str, digits: int = 2) -> str:
    """A ratio of a stored row with its quartiles; `-` if it was not measured."""
    if name not in row["ratios"]:
        return "-"
    ratio = row["ratios"][name]
    return f"{ratio['median']:.{digits}f} [{ratio['low']:.{digits}f}, {ratio['high']:.{digits}f}]"


def verdict(value: float, target: float, at_least: bool = False) -> str:
    """Such as `<= 1.02 met`, or `>= 4 missed`."""
    met = value >= target if at_least else value <= target
    return f"{'>=' if at_least else '<='} {target:g} {'met' if met else 'missed'}"


def store(path: Path, content: Mapping) -> None:
    """Write JSON so that whoever reads it finds the old file or the new one; a row of results takes a line."""
    head = {key: value for key, value in content.items() if key != "rows"}
    rows = ",\n".join("  " + json.dumps(row) for row in content["rows"])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_at_once(path, json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n{rows}\n ]\n}}\n')
