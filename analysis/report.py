"""An inspection as a directory: the page `report.html`, figures as PNG and SVG, and the numbers as JSON and CSV."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from attnres.utils.files import atomic_directory

from . import figures
from .depth_maps import largest
from .inspection import Inspection
from .overview import LABELS
from .page import render
from .record import WRITTEN_BY, to_csv, to_json
from .report_files import MAPS, NUMBERS, PAGE, SUFFIXES, TOGETHER, figure_name, report_names

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_report(inspections: Sequence[Inspection], out: str | os.PathLike, overwrite: bool = False) -> None:
    """Write one inspection, or two that are compared, to the directory `out`, all or nothing.

    Args:
        overwrite: replace `out` if an inspection was written there, and nothing else is in it.

    Raises:
        FileExistsError: `out` exists and is not to be replaced.
        OSError: it cannot be written.
    """
    with report_directory(out, overwrite) as folder:
        fill(folder, inspections)


@contextmanager
def report_directory(out: str | os.PathLike, overwrite: bool = False) -> Iterator[Path]:
    """A new directory, which takes the name `out` when the block ends; what is raised is as for [`write_report`].

    Enter it before what takes long: it shows at once whether `out` can be written.
    """
    if overwrite and Path(out).is_dir():
        names = report_names()
        others = sorted(path.name for path in Path(out).iterdir() if path.is_dir() or path.name not in names)
        if others:
            raise FileExistsError(f"{out} holds {others[0]}, which is of no report. Choose another directory.")
    with atomic_directory(out, overwrite=overwrite, marker=NUMBERS, content=WRITTEN_BY) as folder:
        yield folder


def fill(folder: Path, inspections: Sequence[Inspection]) -> None:
    """Write the files of a report. Raises OSError: there is no room for them."""
    (folder / NUMBERS).write_text(to_json(inspections), encoding="utf-8")
    tables = to_csv(inspections)
    for name, table in tables.items():
        (folder / name).write_text(table, encoding="utf-8")
    drawn = {}
    for kind, draw in _figures(inspections).items():
        (stem, _, letter), figure = kind.partition(": "), draw()
        name = figure_name(stem, letter)
        for suffix in SUFFIXES:
            figures.finish(figure, folder / f"{name}{suffix}")
        drawn[kind] = (folder / f"{name}.svg").read_text(encoding="utf-8")
    (folder / PAGE).write_text(render(inspections, drawn, files=(NUMBERS, *tables)), encoding="utf-8")


def labels(inspections: Sequence[Inspection]) -> list[str]:
    """What models are called in figures: nothing if there is one, else a letter, as on the page, and a short name."""
    if len(inspections) < 2:
        return [""] * len(inspections)
    paths = [Path(str(i.model["name"])).parts for i in inspections]
    most = max(map(len, paths))
    count = next((n for n in range(1, most) if len({path[-n:] for path in paths}) == len(paths)), most)
    # A dollar sign would begin a formula.
    return [f"{letter}: {'/'.join(path[-count:])}".replace("$", r"\$") for letter, path in zip(LABELS, paths)]


def _figures(inspections: Sequence[Inspection]) -> dict[str, Callable[[], "Figure"]]:
    """Kind of figure, as [`render`] takes it, -> what draws it, in the order of the page."""
    named = dict(zip(labels(inspections), inspections))
    drawn: dict[str, Callable[[], Figure]] = {}
    limits = {
        "spread": max((largest(i.depth_attention.spread) for i in inspections if i.depth_attention), default=0.0),
        "mixing": max(largest(i.mixing.mean) for i in inspections),
    }
    for letter, (label, inspection) in zip(LABELS, named.items()):
        of = f": {letter}" if len(inspections) > 1 else ""
        if attention := inspection.depth_attention:
            draw = partial(figures.draw_depth_attention, attention, label=label, limit=limits["spread"])
            for values, kind in MAPS.items():
                drawn[f"{kind}{of}"] = partial(draw, values)
        drawn[f"mixing{of}"] = partial(figures.draw_mixing, inspection.mixing, label, limits["mixing"])
    for kind, part in TOGETHER.items():
        if of_models := {label: getattr(i, part) for label, i in named.items() if getattr(i, part) is not None}:
            drawn[kind] = partial(getattr(figures, f"draw_{kind}"), of_models)
    return drawn


__all__ = ["NUMBERS", "PAGE", "fill", "labels", "report_directory", "write_report"]
