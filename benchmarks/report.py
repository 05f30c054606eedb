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


def make_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """The first column that holds numbers, and those after it, are aligned to the right."""
    table, rows = Table(title=title, title_justify="left", box=box.SIMPLE), [list(map(str, row)) for row in rows]
    for i, column in enumerate(columns):
        is_number = bool(rows) and all(row[i][:1].isdigit() or row[i] in ("", "-") for row in rows)
        table.add_column(column, justify="right" if is_number else "left")
    for row in rows:
        table.add_row(*row)
    return table


def markdown(table: Table) -> str:
    """The table in Markdown; its title goes above it."""
    shown = Console(file=StringIO(), width=10_000, color_system=None)
    title, former, table.title, table.box = table.title, table.box, None, box.MARKDOWN
    shown.print(table)
    table.title, table.box = title, former
    lines = [line.strip() for line in shown.file.getvalue().splitlines() if line.strip()]
    return f"**{title}**\n\n" + "\n".join(lines)


def cell(row: Mapping, name: str, digits: int = 2) -> str:
    """A ratio of a stored row with its quartiles; `-` if it was not measured."""
    if name not in row["ratios"]:
        return "-"
    ratio = row["ratios"][name]
    return f"{ratio['median']:.{digits}f} [{ratio['low']:.{digits}f}, {ratio['high']:.{digits}f}]"


def verdict(value: float, target: float) -> str:
    """`<= 1.02 met`, or `<= 1.02 missed`."""
    return f"<= {target:g} {'met' if value <= target else 'missed'}"


def store(path: Path, content: Mapping) -> None:
    """Write JSON so that whoever reads it finds the old file or the new one; a row of results takes a line."""
    head = {key: value for key, value in content.items() if key != "rows"}
    rows = ",\n".join("  " + json.dumps(row) for row in content["rows"])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_at_once(path, json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n{rows}\n ]\n}}\n')
