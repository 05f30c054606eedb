"""Maps of depth: a row for each reader, a column for each source or output, and the darker the more.

They can be read in black and white: what is below the middle of a scale with two hues is marked where it has no number.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, ListedColormap, Normalize, PowerNorm
from matplotlib.figure import Figure
from torch import Tensor

from .drawing import SMALL, WIDTH, blank, styled

if TYPE_CHECKING:
    from .depth_attention import DepthAttention
    from .mixing import DepthMixing

VALUES = ("weight", "spread", "relative")

# From pale to dark throughout; and two hues that are pale where they meet.
SEQUENTIAL = ListedColormap(matplotlib.colormaps["magma_r"](np.linspace(0.02, 0.88, 200)), "depth")
DIVERGING = matplotlib.colormaps["PuOr_r"]
_BESIDE = 1.75  # inches to the left and right of the maps: names and colour bar
_NUMBER = (0.2, 0.11)  # the least cell, in inches, that a number fits into
_NAME, _LETTER = 0.13, 0.06  # the least distance of names, and how wide a letter is


@dataclass(frozen=True)
class _Panel:
    """One map: its title, which rows of the table it has, and their names; the last one is the output."""

    title: str
    rows: list[int]
    names: list[str]


@dataclass(frozen=True)
class _Scale:
    """What colours mean; two hues meet in zero if `norm` begins below it."""

    label: str
    norm: Normalize
    ticks: Mapping[float, str] = field(default_factory=dict)
    extend: str = "neither"  # the ends of the colour bar beyond which values may lie

    @property
    def diverges(self) -> bool:
        return self.norm.vmin < 0

    @property
    def cmap(self) -> Colormap:
        return DIVERGING if self.diverges else SEQUENTIAL


@styled
def draw_depth_attention(
    attention: "DepthAttention", values: str = "weight", label: str = "", limit: float = 0.0
) -> Figure:
    """Draw the depth attention of a model.

    Args:
        values: `weight`, the mean over tokens, attention and MLP sublayers side by side, as in Figure 8 of the paper;
            `spread`, the standard deviation over tokens, likewise; `relative`, the mean weight over the uniform one,
            which every row starts from, in one map with the weights as numbers.
        label: of the model, for the title.
        limit: where the scale of `spread` ends at the least, for maps that are to be held side by side.

    Raises:
        ValueError: `values` is none of these.
    """
    if values not in VALUES:
        raise ValueError(f"values={values!r} cannot be drawn: choose one of {', '.join(map(repr, VALUES))}.")
    depth, table, numbers = attention.depth, attention.mean, attention.mean
    of_tokens, panels = "mean over tokens", []
    for place, kind in enumerate(depth.kinds):
        rows = [*range(place, depth.num_sublayers, len(depth.kinds)), depth.num_sublayers]
        title = f"{kind} sublayers" if len(depth.kinds) > 1 else ""
        panels.append(_Panel(title, rows, [depth.readers[row].rpartition(" ")[2] for row in rows]))
    reader = "reader: decoder layer"
    if values == "weight":
        # Most weights are small where there are many sources.
        scale = _rooted("weight", max(1.0, largest(table)))
    elif values == "spread":
        table = numbers = attention.spread
        of_tokens = "standard deviation over tokens"
        scale = _Scale("standard deviation of the weight", Normalize(0, max(1e-3, limit, largest(table))))
    else:
        table = (table * table.isfinite().sum(1, keepdim=True)).log2()
        limit = _limit(table)
        # A weight of zero, which a window gives, is not lacking but far below the uniform one.
        table = table.clamp_min(-2 * limit)
        ticks = {share * limit: f"{2.0 ** (share * limit):.2f}" for share in (-1.0, -0.5, 0.0, 0.5, 1.0)}
        scale = _Scale("weight / uniform weight", Normalize(-limit, limit), ticks, "both")
        panels, reader = [_Panel("", list(range(len(table))), list(depth.readers))], "reader: sublayer"
    columns = [name.removeprefix("block ") for name in depth.sources]
    source = f"source: block of {depth.block_size} sublayers" if depth.block_size > 1 else "source: sublayer output"
    figure = _draw(table, numbers, panels, columns, scale, len(depth.kinds))
    return _named(figure, f"Depth attention, {of_tokens}", label, reader, source)


@styled
def draw_mixing(mixing: "DepthMixing", label: str = "", limit: float = 0.0) -> Figure:
    """Draw the depth-mixing matrix of a model; an input has nothing of outputs that come after it.

    Args:
        label: of the model, for the title.
        limit: where the scale ends at the least, for matrices that are to be held side by side.
    """
    depth, table = mixing.depth, mixing.mean
    table = table.masked_fill(torch.ones_like(table).triu(1).bool(), math.nan)
    end = max(1e-3, limit, largest(table))
    unit = "factor of the output in the input"
    scale = _Scale(unit, Normalize(-end, end)) if (table < 0).any() else _rooted(unit, end)
    panel = _Panel("", list(range(len(table))), list(depth.readers))
    figure = _draw(table, table, [panel], list(depth.outputs), scale, len(depth.kinds))
    return _named(figure, "Depth mixing, mean over tokens", label, "input of sublayer", "output of sublayer")


def _rooted(label: str, largest: float) -> _Scale:
    """From zero to the largest by square roots: of many sources, most are read little."""
    ticks = (step * 10.0**power for power in range(-4, 6) for step in (1, 2, 5))
    shown = [0, *(tick for tick in ticks if largest / 60 < tick <= largest * 1.001)]
    return _Scale(label, PowerNorm(0.5, 0, largest), {tick: f"{tick:g}" for tick in shown})


def _draw(
    table: Tensor, numbers: Tensor, panels: list[_Panel], columns: list[str], scale: _Scale, group: int
) -> Figure:
    """Maps of a table `[rows, columns]` side by side; NaN is left white.

    Args:
        numbers: what is written in the cells, `[rows, columns]`, where they have space.
        group: sublayers of a decoder layer; names that do not fit are left out for whole layers.
    """
    rows, width = len(panels[0].rows), len(columns) * len(panels)
    cell = min(0.5, (WIDTH - _BESIDE) / width), min(0.28, 6.5 / rows)
    is_upright = all((len(a + b) / 2 + 1) * _LETTER < cell[0] for a, b in pairwise(columns))
    above = 1.0 if is_upright else 1.5
    figure = blank(_BESIDE + max(1.7 * len(panels), width * cell[0]), above + max(2.0, rows * cell[1]))
    every = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, panel in zip(every, panels):
        part = table[panel.rows].numpy()
        image = axes.imshow(part, aspect="auto", cmap=scale.cmap, norm=scale.norm, interpolation="nearest")
        if cell[0] >= _NUMBER[0] and cell[1] >= _NUMBER[1]:
            _write(axes, numbers[panel.rows].numpy(), image.to_rgba(part), cell[0])
        elif scale.diverges:
            _mark(axes, scale.norm(part), min(cell))
        if rows > 2:
            axes.axhline(rows - 1.5, color="white", linewidth=2)  # the output stands apart
        places = _thinned(rows, 0, cell[1], group if len(panels) == 1 else 1)
        axes.set_yticks(places, [panel.names[place] for place in places])
        places = _thinned(len(columns), 1, cell[0], group)
        axes.set_xticks(places, [columns[place] for place in places])
        for label in axes.get_xticklabels():
            label.set_rotation(0 if is_upright or label.get_text().isdigit() else 90)
        axes.set_title(panel.title)
    bar = figure.colorbar(image, ax=list(every), label=scale.label, extend=scale.extend)
    if scale.ticks:
        bar.set_ticks(list(scale.ticks), labels=list(scale.ticks.values()))
    return figure


def _write(axes: Axes, numbers: np.ndarray, colors: np.ndarray, cell: float) -> None:
    """Numbers in the cells, in black or white, whichever differs more from the cell's color; in narrow ones `.25`."""
    lightness = colors[..., :3] @ (0.299, 0.587, 0.114)
    largest = np.nanmax(np.abs(numbers), initial=1e-9)
    # Two digits that count of the largest, if there is space for them.
    digits = min(4, max(2, 1 - math.floor(math.log10(largest)))) if cell >= 0.35 else 2
    for row, column in np.argwhere(np.isfinite(numbers)):
        color = "black" if lightness[row, column] > 0.5 else "white"
        text = f"{numbers[row, column]:.{digits}f}"
        if cell < 0.27:
            text = text.replace("0.", ".", 1) if abs(numbers[row, column]) < 0.995 else text[:-1]
        axes.text(column, row, text, ha="center", va="center", fontsize=SMALL, color=color)


def _mark(axes: Axes, values: np.ndarray, cell: float) -> None:
    """Dots in cells below the middle of the scale, `values` from 0 to 1: in black and white both hues are alike."""
    rows, columns = np.nonzero(values < 0.45)
    axes.plot(columns, rows, ".", color="white", markeredgecolor="black", markeredgewidth=0.4, markersize=30 * cell)


def _thinned(count: int, first: int, distance: float, group: int) -> list[int]:
    """Which of `count` places have a name: both ends, and every so many from `first` on, as far as there is space.

    Args:
        distance: of neighbours, in inches.
        group: where not all have names, whole groups are left out.
    """
    least = math.ceil(_NAME / distance)
    step = least if least == 1 else math.ceil(least / group) * group
    between = range(first, count - 1, step)
    return [0, *(place for place in between if least <= place <= count - 1 - least), count - 1]


def _named(figure: Figure, title: str, label: str, reader: str, source: str) -> Figure:
    figure.suptitle(f"{title}\n{label}" if label else title)
    maps = [axes for axes in figure.axes if axes.images]
    maps[0].set_ylabel(reader)
    for axes in maps:
        axes.set_xlabel(source)
    return figure


def largest(table: Tensor) -> float:
    return table.nan_to_num(0).abs().max().item()


def _limit(relative: Tensor) -> float:
    """Where the colours of a map end: beyond nine tenths of what differs, so that a single cell does not pale the rest.

    At least 0.05 (a factor of 1.04), so that rounding in a map of uniform rows is not drawn as structure.
    """
    differing = relative[relative.isfinite() & (relative.abs() > 1e-3)].abs()
    return max(0.05, differing.quantile(0.9).item()) if len(differing) else 0.05


__all__ = ["DIVERGING", "SEQUENTIAL", "VALUES", "draw_depth_attention", "draw_mixing", "largest"]
