"""The names of the files that a report of `attnres inspect` can have, and the files of the report in a folder.

A folder with a report may hold other files too. Only files with these names are published and served.
"""

from pathlib import Path

from attnres.utils.files import Written, entries_beyond

from .inspection import LABELS
from .record import TABLES, WRITTEN_BY

PAGE, NUMBERS, SUFFIXES = "report.html", "inspection.json", (".png", ".svg")
# Values of a map of depth attention, as `draw_depth_attention` takes them -> the kind of figure.
MAPS = {
    "weight": "depth_attention",
    "relative": "depth_attention_relative",
    "spread": "depth_attention_spread",
}
# Kinds of figures that show two models together -> the field of an inspection that they draw.
TOGETHER = {
    "weights_by_depth": "depth_attention",
    "magnitudes": "magnitudes",
    "sinks": "sinks",
    "interventions": "interventions",
}
_MAX_NUMBERS = 100 * 10**6  # bytes; a larger `inspection.json` is not from a report, and is not read


def figure_name(kind: str, letter: str = "") -> str:
    """Return the file name of a figure without its suffix.

    Args:
        kind: The kind of figure: a value of `MAPS`, `mixing`, or a key of `TOGETHER`.
        letter: The letter of the model in a comparison; empty if the figure shows one model, or both together.
    """
    return f"{kind}_{letter.lower()}" if letter else kind


def report_names() -> set[str]:
    """Return the names of all files that a report can have."""
    kinds = [figure_name(kind, letter) for kind in (*MAPS.values(), "mixing") for letter in ("", *LABELS)]
    return {PAGE, NUMBERS, *TABLES, *(f"{kind}{suffix}" for kind in (*kinds, *TOGETHER) for suffix in SUFFIXES)}


def _beyond_report(folder: Path) -> list[str]:
    """Return what lies in the directory of a report but is not part of it."""
    names = report_names()
    return entries_beyond(folder, lambda path: path in names)


WRITTEN_REPORT = Written("a report", NUMBERS, WRITTEN_BY, _beyond_report)


def report_files(folder: Path) -> dict[str, Path]:
    """Return the files of the report in a folder, including links.

    Args:
        folder: The folder to look in. The caller decides whether to follow a link.

    Returns:
        The paths of the files by their names; empty if `attnres inspect` has not written to this folder.
    """
    numbers = folder / NUMBERS
    if not numbers.is_file() or numbers.stat().st_size > _MAX_NUMBERS:
        return {}
    if WRITTEN_BY not in numbers.read_text(encoding="utf-8", errors="replace"):
        return {}
    names = report_names()
    return {path.name: path for path in sorted(folder.iterdir()) if path.name in names and not path.is_dir()}


__all__ = ["MAPS", "NUMBERS", "PAGE", "SUFFIXES", "TOGETHER", "figure_name", "report_files", "report_names"]
