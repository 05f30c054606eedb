"""The common parts of all figures: their style, their size, and writing them to files.

Figures are not registered with `pyplot`, so no backend is chosen and no figure stays open. A user's settings of
matplotlib do not change the figures: the same numbers give the same bytes.
"""

import functools
import io
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .extras import require_extra
from .files import atomic_write

with require_extra("analysis"):
    import matplotlib
    from matplotlib.figure import Figure

WIDTH = 7.6  # inches; the page of an inspection shows a figure at about this width, so fonts appear in their own size
# Inches. Pages show a figure of this width at 700 px, and at 350 px on a phone, where 8 points still have 9 px.
COLUMN = 4.2
SMALL = 7  # points: the size of tick labels, and of numbers in a map
STYLE = {
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8,
    "legend.fontsize": 8,
    "figure.titlesize": 9.5,
}
# The defaults of matplotlib. They replace the user's settings, except for the backend.
PLAIN = {
    name: value for name, value in matplotlib.rcParamsDefault.items() if not name.startswith(("backend", "webagg"))
}
_DPI = 150
_COLUMN_DPI = 250  # 1050 px, so that a column is sharp at 700 px
# Kind of file -> metadata to leave out, since they hold the date or the version of matplotlib.
_METADATA = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}


class Drawing(Figure):
    """A figure that notebooks show with any backend of matplotlib, or without one."""

    def _repr_png_(self) -> bytes:
        return _bytes(self, "png")


def blank(width: float, height: float) -> Drawing:
    """Return an empty figure whose layout leaves room for all labels.

    Args:
        width: The width in inches.
        height: The height in inches.
    """
    return Drawing(figsize=(width, height), dpi=_DPI, layout="constrained")


def column(height: float) -> Drawing:
    """Return an empty figure for a page, whose text can be read at the width of a phone.

    Args:
        height: The height in inches; the width is `COLUMN`.
    """
    return Drawing(figsize=(COLUMN, height), dpi=_COLUMN_DPI, layout="constrained")


def styled(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """Decorate a function that draws a figure, so that it uses the common style."""

    @functools.wraps(draw)
    def draw_in_style(*args: Any, **kwargs: Any) -> Figure:
        with matplotlib.rc_context(PLAIN | STYLE):
            figure = draw(*args, **kwargs)
        # Most ticks are made when the figure is written, after this context has ended.
        for axes in figure.axes:
            axes.tick_params(labelsize=SMALL, which="both")
        return figure

    return draw_in_style


def finish(figure: Figure, path: str | os.PathLike | None) -> Figure:
    """Write a figure to a file, and return it.

    Args:
        figure: The figure to write.
        path: The `.png` or `.svg` file, in a folder that exists; `None` to write no file.

    Returns:
        The figure.

    Raises:
        ValueError: The file name has another suffix.
        FileNotFoundError: The folder does not exist.
    """
    if path is not None:
        path = Path(path)
        if path.suffix.lower().lstrip(".") not in _METADATA:
            raise ValueError(f"the file name of a figure must end in .png or .svg, got {path.name!r}.")
        if not path.parent.is_dir():
            raise FileNotFoundError(f"the folder {path.parent} for {path.name} was not found: make it first.")
        atomic_write(path, _bytes(figure, path.suffix.lower().lstrip(".")))
    return figure


def _bytes(figure: Figure, kind: str) -> bytes:
    """Return the content of a PNG or SVG file."""
    # The layout changes a little when a figure is drawn a second time, so every file is drawn from a fresh copy.
    figure = pickle.loads(pickle.dumps(figure))
    content = io.BytesIO()
    # Without a salt, ids in an SVG are random.
    with matplotlib.rc_context(PLAIN | STYLE | {"svg.hashsalt": "attnres"}), warnings.catch_warnings():
        # Matplotlib draws a box for a letter that the font lacks, as in the name of a model, and warns each time.
        warnings.filterwarnings("ignore", "Glyph")
        figure.savefig(content, format=kind, dpi="figure", metadata=_METADATA[kind])
    return content.getvalue()


__all__ = ["COLUMN", "SMALL", "WIDTH", "Drawing", "blank", "column", "finish", "styled"]
