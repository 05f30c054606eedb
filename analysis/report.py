"""An inspection as a directory: the page `report.html`, figures as PNG and SVG, and the numbers as JSON and CSV."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attnres.files import atomic_directory

from . import figures
from .inspection import Inspection
from .page import render
from .record import WRITTEN_BY, to_csv, to_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE, NUMBERS = "report.html", "inspection.json"


def write_report(inspections: Sequence[Inspection], out: str | os.PathLike, overwrite: bool = False) -> None:
    """Write one inspection, or two that are compared, to the directory `out`, all or nothing.

    Args:
        overwrite: replace `out` if an inspection was written there.

    Raises:
        FileExistsError: `out` exists and is not to be replaced.
        OSError: it cannot be written.
    """
    with atomic_directory(out, overwrite=overwrite, marker=NUMBERS, content=WRITTEN_BY) as folder:
        (folder / NUMBERS).write_text(to_json(inspections), encoding="utf-8")
        tables = to_csv(inspections)
        for name, table in tables.items():
            (folder / name).write_text(table, encoding="utf-8")
        drawn = {}
        for name, draw in _figures(inspections).items():
            figure = draw()
            for suffix in (".png", ".svg"):
                figures.finish(figure, folder / f"{name}{suffix}")
            drawn[name] = (folder / f"{name}.svg").read_text(encoding="utf-8")
        page = render(inspections, drawn, files=(NUMBERS, *tables))
        (folder / PAGE).write_text(page, encoding="utf-8")


def labels(inspections: Sequence[Inspection]) -> list[str]:
    """What models are called in figures of several, by the ends of their names as far as these tell them apart."""
    names = [inspection.model["name"].rstrip("/") for inspection in inspections]
    if len(names) < 2:
        return [""] * len(names)
    short = [Path(name).name for name in names]
    revisions = [inspection.model["revision"] for inspection in inspections]
    for candidates in (short, names, [f"{name}@{(revision or '')[:7]}" for name, revision in zip(names, revisions)]):
        if len(set(candidates)) == len(candidates):
            return list(candidates)
    return [f"{name} ({place})" for place, name in enumerate(names, 1)]


def _figures(inspections: Sequence[Inspection]) -> dict[str, Callable[[], "Figure"]]:
    """File name without suffix -> what draws it, in the order of the page."""
    named = dict(zip(labels(inspections), inspections))
    drawn: dict[str, Callable[[], Figure]] = {}
    for place, inspection in enumerate(inspections, 1):
        number = f"_{place}" if len(inspections) > 1 else ""
        if attention := inspection.depth_attention:
            for values, name in (("weight", "depth_attention"), ("spread", "depth_attention_spread")):
                drawn[f"{name}{number}"] = lambda a=attention, v=values: figures.draw_depth_attention(a, v)
        drawn[f"depth_mixing{number}"] = lambda m=inspection.mixing: figures.draw_mixing(m)
    attentions = {label: i.depth_attention for label, i in named.items() if i.depth_attention}
    if attentions:
        drawn["depth_weights"] = lambda: figures.draw_weights_by_depth(attentions)
    drawn["magnitudes"] = lambda: figures.draw_magnitudes({label: i.magnitudes for label, i in named.items()})
    drawn["attention_sinks"] = lambda: figures.draw_sinks({label: i.sinks for label, i in named.items()})
    found = {label: i.interventions for label, i in named.items() if i.interventions}
    if found:
        drawn["interventions"] = lambda: figures.draw_interventions(found)
    return drawn


__all__ = ["NUMBERS", "PAGE", "labels", "write_report"]
