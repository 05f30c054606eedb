"""The names of the files that a report of `attnres inspect` can hold, and those that are in a folder.

Whatever publishes or serves a report goes by these names: a folder may hold other files, which are not of the report.
"""

from pathlib import Path

from .overview import LABELS
from .record import TABLES, WRITTEN_BY

PAGE, NUMBERS, SUFFIXES = "report.html", "inspection.json", (".png", ".svg")
# What a map of depth attention shows -> its kind.
MAPS = {
    "weight": "depth_attention",
    "relative": "depth_attention_relative",
    "spread": "depth_attention_spread",
}
# Kinds of figures that show two models together -> the part of an inspection that they are drawn of.
TOGETHER = {
    "weights_by_depth": "depth_attention",
    "magnitudes": "magnitudes",
    "sinks": "sinks",
    "interventions": "interventions",
}
_MAX_NUMBERS = 100 * 10**6  # bytes of `inspection.json`: more than any report has


def figure_name(kind: str, letter: str = "") -> str:
    """Return the name of a figure's files without suffix.

    Args:
        kind: what the figure shows.
        letter: of the model in a comparison; empty if the figure is of one model or of both together.
    """
    return f"{kind}_{letter.lower()}" if letter else kind


def report_names() -> set[str]:
    """Return the names of all files that a report can hold."""
    kinds = [figure_name(kind, letter) for kind in (*MAPS.values(), "mixing") for letter in ("", *LABELS)]
    return {PAGE, NUMBERS, *TABLES, *(f"{kind}{suffix}" for kind in (*kinds, *TOGETHER) for suffix in SUFFIXES)}


def report_files(folder: Path) -> dict[str, Path]:
    """Return the files of the report in a folder by their names; nothing if `attnres inspect` wrote none there.

    A link is among them: whether to follow it is for the caller to say.
    """
    numbers = folder / NUMBERS
    if not numbers.is_file() or numbers.stat().st_size > _MAX_NUMBERS:
        return {}
    if WRITTEN_BY not in numbers.read_text(encoding="utf-8", errors="replace"):
        return {}
    names = report_names()
    return {path.name: path for path in sorted(folder.iterdir()) if path.name in names and not path.is_dir()}


__all__ = ["MAPS", "NUMBERS", "PAGE", "SUFFIXES", "TOGETHER", "figure_name", "report_files", "report_names"]
