"""Write an inspection to a directory: the page `report.html`, figures as PNG and SVG, numbers as JSON and CSV."""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from attnres.utils.files import atomic_directory, atomic_write

from . import figures
from .depth_maps import largest
from .inspection import LABELS, Inspection
from .page import render
from .record import to_csv, to_json
from .report_files import MAPS, NUMBERS, PAGE, SUFFIXES, TOGETHER, WRITTEN_REPORT, figure_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_report(inspections: Sequence[Inspection], out: str | os.PathLike, overwrite: bool = False) -> None:
    """Write the report of one inspection, or of two that are compared, to a directory. A failure leaves nothing there.

    Args:
        inspections: One inspection or two.
        out: The directory to write. Missing parents are made.
        overwrite: Whether to replace `out` if it holds a report and nothing else.

    Raises:
        FileExistsError: `out` exists and must not be replaced.
        OSError: The files cannot be written.
    """
    with report_directory(out, overwrite) as folder:
        fill(folder, inspections)


def report_directory(out: str | os.PathLike, overwrite: bool = False) -> AbstractContextManager[Path]:
    """Return a context manager that makes a new directory, which gets the name `out` when the block ends.

    Enter the block before long work: an `out` that cannot be written raises an error at once.

    Args:
        out: The directory to write.
        overwrite: Whether to replace `out` if it holds a report and nothing else.

    Returns:
        The context manager, whose value is the new, empty directory. It is removed if the block raises an error.

    Raises:
        FileExistsError: `out` exists and must not be replaced.
        OSError: The directory cannot be made.
    """
    return atomic_directory(out, WRITTEN_REPORT, overwrite=overwrite)


def fill(folder: Path, inspections: Sequence[Inspection]) -> None:
    """Write all files of a report.

    Args:
        folder: A directory that exists.
        inspections: One inspection or two.

    Raises:
        OSError: The files cannot be written. The error names the file.
    """
    atomic_write(folder / NUMBERS, to_json(inspections))
    tables = to_csv(inspections)
    for name, table in tables.items():
        atomic_write(folder / name, table)
    svgs = {}
    for kind, draw in _figures(inspections).items():
        figure = draw()
        stem, _, letter = kind.partition(": ")
        name = figure_name(stem, letter)
        for suffix in SUFFIXES:
            figures.finish(figure, folder / f"{name}{suffix}")
        svgs[kind] = (folder / f"{name}.svg").read_text(encoding="utf-8")
    atomic_write(folder / PAGE, render(inspections, svgs, files=(NUMBERS, *tables)))


def labels(inspections: Sequence[Inspection]) -> list[str]:
    """Return the labels of models in figures.

    Args:
        inspections: The inspections that figures show.

    Returns:
        An empty label for a single model. For two, the letter of the page and the last parts of the model's path, as
        many as make the labels differ.
    """
    if len(inspections) < 2:
        return [""] * len(inspections)
    paths = [Path(str(i.model["name"])).parts for i in inspections]
    longest = max(map(len, paths))
    count = next((n for n in range(1, longest) if len({path[-n:] for path in paths}) == len(paths)), longest)
    # In matplotlib, a dollar sign begins a formula.
    return [f"{letter}: {'/'.join(path[-count:])}".replace("$", r"\$") for letter, path in zip(LABELS, paths)]


def _figures(inspections: Sequence[Inspection]) -> dict[str, Callable[[], "Figure"]]:
    """Return a function for each figure of a report, by its kind for [`render`], in the order of the page."""
    labelled = dict(zip(labels(inspections), inspections))
    draw: dict[str, Callable[[], Figure]] = {}
    # The maps of two models have the same scale.
    spread_limit = max((largest(i.depth_attention.spread) for i in inspections if i.depth_attention), default=0.0)
    mixing_limit = max(largest(i.mixing.mean) for i in inspections)
    for letter, (label, inspection) in zip(LABELS, labelled.items()):
        suffix = f": {letter}" if len(inspections) > 1 else ""
        if attention := inspection.depth_attention:
            for values, kind in MAPS.items():
                draw[f"{kind}{suffix}"] = partial(
                    figures.draw_depth_attention, attention, values, label=label, limit=spread_limit
                )
        draw[f"mixing{suffix}"] = partial(figures.draw_mixing, inspection.mixing, label, mixing_limit)
    draw_together = {
        "weights_by_depth": figures.draw_weights_by_depth,
        "magnitudes": figures.draw_magnitudes,
        "sinks": figures.draw_sinks,
        "interventions": figures.draw_interventions,
    }
    for kind, field in TOGETHER.items():
        measured = {label: getattr(i, field) for label, i in labelled.items() if getattr(i, field) is not None}
        if measured:
            draw[kind] = partial(draw_together[kind], measured)
    return draw


__all__ = ["NUMBERS", "PAGE", "fill", "labels", "report_directory", "write_report"]
