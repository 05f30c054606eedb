"""What all figures share: how they begin, and how they are written to files.

They are figures of their own, unknown to `pyplot`: no backend is chosen, and none stays open.
"""

import functools
import io
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from attnres.utils.files import atomic_write

WIDTH = 7.6  # inches: about the 800 pixels that a page has, so that fonts are seen in their size
STYLE = {
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8,
    "legend.fontsize": 8,
    "figure.titlesize": 9.5,
}
# As matplotlib comes, whatever a user has set, but for where figures are shown.
PLAIN = {
    name: value for name, value in matplotlib.rcParamsDefault.items() if not name.startswith(("backend", "webagg"))
}
SMALL = 7  # points: of tick labels, and of numbers in a map
_DPI = 150
_ALWAYS = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}  # nothing of the day or the machine


class Drawing(Figure):
    """A figure that notebooks show, whichever backend they use or none."""

    def _repr_png_(self) -> bytes:
        return _bytes(self, "png")


def blank(width: float, height: float) -> Drawing:
    """A figure with nothing on it, in inches; what is drawn on it is laid out so that nothing is cut off."""
    return Drawing(figsize=(width, height), layout="constrained")


def styled(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """A function that draws a figure, in the fonts of the figures of this folder, whatever a user has set."""

    @functools.wraps(draw)
    def drawn(*args: Any, **kwargs: Any) -> Figure:
        with matplotlib.rc_context(PLAIN | STYLE):
            figure = draw(*args, **kwargs)
        for axes in figure.axes:  # most ticks are made when a figure is written, and sized then
            axes.tick_params(labelsize=SMALL, which="both")
        return figure

    return drawn


def finish(figure: Figure, path: str | os.PathLike | None) -> Figure:
    """Write a figure, and return it; without a path, only return it.

    Args:
        path: a `.png` or `.svg` file, in a folder that exists. The same figure gives the same bytes.

    Raises:
        ValueError: the file's name ends otherwise.
        FileNotFoundError: there is no such folder.
    """
    if path is not None:
        path = Path(path)
        if path.suffix.lower().lstrip(".") not in _ALWAYS:
            raise ValueError(f"a figure is written as .png or .svg, and {path.name!r} is neither: rename it.")
        if not path.parent.is_dir():
            raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} to: make it first.")
        atomic_write(path, _bytes(figure, path.suffix.lower().lstrip(".")))
    return figure


def _bytes(figure: Figure, kind: str) -> bytes:
    figure = pickle.loads(pickle.dumps(figure))  # one that is drawn for a second time is laid out a little differently
    content = io.BytesIO()
    # Else an SVG has ids by chance. A name may have letters that the font lacks: they are drawn as boxes.
    with matplotlib.rc_context(PLAIN | STYLE | {"svg.hashsalt": "attnres"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")
        figure.savefig(content, format=kind, dpi=_DPI, metadata=_ALWAYS[kind])
    return content.getvalue()


__all__ = ["SMALL", "WIDTH", "Drawing", "blank", "finish", "styled"]
