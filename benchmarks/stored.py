"""Turn rows of results into cells and tables, and store them in files.

This file needs no package beside `attnres`, so it also runs on a GPU machine without `rich`.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from attnres.utils.files import atomic_write


def cell(row: Mapping, name: str, digits: int = 2) -> str:
    """Return a ratio of a stored row with its quartiles, or `-` if it was not measured."""
    if name not in row["ratios"]:
        return "-"
    ratio = row["ratios"][name]
    return f"{ratio['median']:.{digits}f} [{ratio['low']:.{digits}f}, {ratio['high']:.{digits}f}]"


def verdict(value: float, target: float, at_least: bool = False) -> str:
    """Return whether a value meets its target, such as `<= 1.02 met` or `>= 4 missed`."""
    met = value >= target if at_least else value <= target
    return f"{'>=' if at_least else '<='} {target:g} {'met' if met else 'missed'}"


def targets_met(rows: Iterable[Sequence[str]]) -> str:
    """Count the cells of [`verdict`] that meet their target, as a sentence; empty if there are no such cells."""
    verdicts = [value.rpartition(" ")[2] for row in rows for value in row if value.endswith((" met", " missed"))]
    return f"Targets met: {verdicts.count('met')} of {len(verdicts)}. " if verdicts else ""


def markdown_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], note: str = "") -> str:
    """Return a Markdown table between its title and its note, padded so that it reads well on a terminal too.

    Numbers are aligned to the right. The number of targets met, if there are any, comes before the note.

    Args:
        title: text above the table.
        columns: heads of the columns.
        rows: cells, which may be numbers. A cell with a target comes from [`verdict`].
        note: text below the table.
    """
    cells = [[str(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells)]
    align = [
        str.rjust if all(row[i] == "-" or row[i][:1].isdigit() for row in cells) else str.ljust
        for i in range(len(columns))
    ]
    head, *lines = (
        f"| {' | '.join(put(text, width) for put, text, width in zip(align, row, widths))} |"
        for row in (columns, *cells)
    )
    rule = "|".join("-" * (width + 2) for width in widths)
    table = "\n".join([head, f"|{rule}|", *lines])
    return "\n\n".join(filter(None, (f"**{title}**", table, (targets_met(cells) + note).strip())))


def store(path: Path, content: Mapping) -> None:
    """Write JSON with one line per row of results. The file is replaced as a whole."""
    head = {key: value for key, value in content.items() if key != "rows"}
    rows = ",\n".join("  " + json.dumps(row) for row in content["rows"])
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n{rows}\n ]\n}}\n')
