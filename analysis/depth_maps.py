"""Maps of depth: a row for each consumer, a column for each source or output, and darker cells for larger values.

The maps can be read in black and white. There, the two hues of a scale look alike, so cells below the middle of such a
scale are marked with a dot unless they show a number.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from attnres.utils.drawing import SMALL, WIDTH, blank, styled
from attnres.utils.extras import require_extra

from .depth_attention import DepthAttention
from .mixing import DepthMixing

with require_extra("analysis"):
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Colormap, ListedColormap, Normalize, PowerNorm
    from matplotlib.figure import Figure

VALUES = ("weight", "spread", "relative")

# The first colour map goes from pale to dark. The second has two hues, and is pale in the middle.
SEQUENTIAL = ListedColormap(matplotlib.colormaps["magma_r"](np.linspace(0.02, 0.88, 200)), "depth")
DIVERGING = matplotlib.colormaps["PuOr_r"]
# Sizes in inches.
_MARGINS = 1.75  # to the left and right of the maps: names and colour bar
_NUMBER_CELL = (0.2, 0.11)  # the smallest cell that a number fits into
_NAME_DISTANCE, _LETTER_WIDTH = 0.13, 0.06  # the smallest distance of two names, and the width of a letter


@dataclass(frozen=True)
class _Panel:
    """One map: its title, the rows of the table that it shows, and their names. The last row is the output."""

    title: str
    rows: list[int]
    names: list[str]


@dataclass(frozen=True)
class _Scale:
    """The scale of the colours. If `norm` begins below zero, it has two hues, which meet in zero."""

    label: str
    norm: Normalize
    ticks: Mapping[float, str] = field(default_factory=dict)
    extend: str = "neither"  # the ends of the colour bar beyond which values may lie

    @property
    def diverges(self) -> bool:
        return (self.norm.vmin or 0) < 0

    @property
    def cmap(self) -> Colormap:
        return DIVERGING if self.diverges else SEQUENTIAL


@styled
def draw_depth_attention(
    attention: DepthAttention, values: str = "weight", label: str = "", limit: float = 0.0
) -> Figure:
    """Draw the depth attention of a model.

    Args:
        attention: The depth attention to draw.
        values: `weight` draws the mean over tokens, with attention and MLP sublayers side by side, as in Figure 8 of
            the paper. `spread` draws the standard deviation over tokens in the same way. `relative` draws the mean
            weight divided by the uniform weight, in one map with the mean weights as numbers.
        label: The name of the model, for the title.
        limit: The least value at which the scale of `spread` may end, to give two maps the same scale.

    Returns:
        The figure.

    Raises:
        ValueError: `values` is not one of these.
    """
    if values not in VALUES:
        raise ValueError(f"`values` must be one of {', '.join(map(repr, VALUES))}, got {values!r}.")
    depth, table, numbers = attention.depth, attention.mean, attention.mean
    statistic, rows_label = "mean over tokens", "reader: decoder layer"
    panels = []
    for place, kind in enumerate(depth.kinds):
        rows = [*range(place, depth.num_sublayers, len(depth.kinds)), depth.num_sublayers]
        title = f"{kind} sublayers" if len(depth.kinds) > 1 else ""
        panels.append(_Panel(title, rows, [depth.consumers[row].rpartition(" ")[2] for row in rows]))
    if values == "weight":
        scale = _root_scale("weight", max(1.0, largest(table)))
    elif values == "spread":
        table = numbers = attention.spread
        statistic = "standard deviation over tokens"
        scale = _Scale("standard deviation of the weight", Normalize(0, max(1e-3, limit, largest(table))))
    else:
        # Drawn on a logarithmic scale: log2 of the weight times the number of sources.
        table = (table * table.isfinite().sum(1, keepdim=True)).log2()
        limit = _relative_limit(table)
        # A window gives weights of zero. Their logarithm, minus infinity, gets the lowest colour and is not left white.
        table = table.clamp_min(-2 * limit)
        ticks = {share * limit: f"{2.0 ** (share * limit):.2f}" for share in (-1.0, -0.5, 0.0, 0.5, 1.0)}
        scale = _Scale("weight / uniform weight", Normalize(-limit, limit), ticks, "both")
        panels, rows_label = [_Panel("", list(range(len(table))), list(depth.consumers))], "reader: sublayer"
    columns = [name.removeprefix("block ") for name in depth.sources]
    columns_label = f"source: {depth.block}" if depth.block_size > 1 else "source: sublayer output"
    figure = _draw(table, numbers, panels, columns, scale, len(depth.kinds))
    return _labelled(figure, f"Depth attention, {statistic}", label, rows_label, columns_label)


@styled
def draw_mixing(mixing: DepthMixing, label: str = "", limit: float = 0.0) -> Figure:
    """Draw the depth-mixing matrix of a model. Cells above the diagonal, for later outputs, stay white.

    Args:
        mixing: The matrix to draw.
        label: The name of the model, for the title.
        limit: The least value at which the scale may end, to give two matrices the same scale.

    Returns:
        The figure.
    """
    depth, table = mixing.depth, mixing.mean
    table = table.masked_fill(torch.ones_like(table).triu(1).bool(), math.nan)
    end = max(1e-3, limit, largest(table))
    unit = "factor of the output in the input"
    scale = _Scale(unit, Normalize(-end, end)) if (table < 0).any() else _root_scale(unit, end)
    panel = _Panel("", list(range(len(table))), list(depth.consumers))
    figure = _draw(table, table, [panel], list(depth.outputs), scale, len(depth.kinds))
    return _labelled(figure, "Depth mixing, mean over tokens", label, "input of sublayer", "output of sublayer")


def largest(table: Tensor) -> float:
    """Return the largest absolute value of a table, in which NaN counts as zero."""
    return table.nan_to_num(0).abs().max().item()


def _root_scale(label: str, largest: float) -> _Scale:
    """Return a scale of square roots from zero to the largest value, which separates small weights."""
    ticks = (step * 10.0**power for power in range(-4, 6) for step in (1, 2, 5))
    shown = [0, *(tick for tick in ticks if largest / 60 < tick <= largest * 1.001)]
    return _Scale(label, PowerNorm(0.5, 0, largest), {tick: f"{tick:g}" for tick in shown})


def _relative_limit(relative: Tensor) -> float:
    """Return the end of the scale for a map of logarithms: nine tenths of all values that are not zero lie within it.

    So a single large value does not make all other cells pale. The limit is at least 0.05 (a factor of 1.04), so that
    rounding errors in a map of uniform rows are not drawn as structure.
    """
    differing = relative[relative.isfinite() & (relative.abs() > 1e-3)].abs()
    return max(0.05, differing.quantile(0.9).item()) if len(differing) else 0.05


def _draw(
    table: Tensor, numbers: Tensor, panels: list[_Panel], columns: list[str], scale: _Scale, group: int
) -> Figure:
    """Draw maps of a table side by side; NaN is left white.

    Args:
        table: The values that colours show, `[rows, columns]`.
        numbers: The numbers to write in the cells where they have space, `[rows, columns]`.
        panels: The maps, from left to right.
        columns: The names of the columns.
        scale: The scale of the colours.
        group: The number of sublayers in a decoder layer. If names do not fit, those of whole layers are left out.
    """
    rows, width = len(panels[0].rows), len(columns) * len(panels)
    cell = min(0.5, (WIDTH - _MARGINS) / width), min(0.28, 6.5 / rows)  # width and height of a cell, in inches
    # Names are horizontal if neighbours do not touch, else vertical, which takes more space below the map.
    is_horizontal = all((len(a + b) / 2 + 1) * _LETTER_WIDTH < cell[0] for a, b in pairwise(columns))
    above = 1.0 if is_horizontal else 1.5
    figure = blank(_MARGINS + max(1.7 * len(panels), width * cell[0]), above + max(2.0, rows * cell[1]))
    all_axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    colors = ScalarMappable(scale.norm, scale.cmap)
    for axes, panel in zip(all_axes, panels):
        part = table[panel.rows].numpy()
        axes.imshow(part, aspect="auto", cmap=scale.cmap, norm=scale.norm, interpolation="nearest")
        if cell[0] >= _NUMBER_CELL[0] and cell[1] >= _NUMBER_CELL[1]:
            _write_numbers(axes, numbers[panel.rows].numpy(), colors.to_rgba(part), cell[0])
        elif scale.diverges:
            _mark_low_cells(axes, scale.norm(part), min(cell))
        if rows > 2:
            axes.axhline(rows - 1.5, color="white", linewidth=2)  # sets the output apart from the sublayers
        named = _named_places(rows, 0, cell[1], group if len(panels) == 1 else 1)
        axes.set_yticks(named, [panel.names[place] for place in named])
        named = _named_places(len(columns), 1, cell[0], group)
        axes.set_xticks(named, [columns[place] for place in named])
        for label in axes.get_xticklabels():
            label.set_rotation(0 if is_horizontal or label.get_text().isdigit() else 90)
        axes.set_title(panel.title)
    bar = figure.colorbar(colors, ax=list(all_axes), label=scale.label, extend=scale.extend)
    if scale.ticks:
        bar.set_ticks(list(scale.ticks), labels=list(scale.ticks.values()))
    return figure


def _write_numbers(axes: Axes, numbers: np.ndarray, colors: np.ndarray, width: float) -> None:
    """Write numbers in the cells, in black or white, whichever contrasts more with the cell.

    Args:
        axes: The map.
        numbers: The numbers, `[rows, columns]`; NaN is not written.
        colors: The colours of the cells, `[rows, columns, 4]`.
        width: The width of a cell in inches. Narrow cells get `.25` for `0.25`.
    """
    lightness = colors[..., :3] @ (0.299, 0.587, 0.114)
    largest = np.nanmax(np.abs(numbers), initial=1e-9)
    # In wide cells, the largest number is shown with at least two significant digits.
    digits = min(4, max(2, 1 - math.floor(math.log10(largest)))) if width >= 0.35 else 2
    for row, column in np.argwhere(np.isfinite(numbers)):
        color = "black" if lightness[row, column] > 0.5 else "white"
        text = f"{numbers[row, column]:.{digits}f}"
        if width < 0.27:  # there is space for three characters
            text = text.replace("0.", ".", 1) if abs(numbers[row, column]) < 0.995 else text[:-1]
        axes.text(column, row, text, ha="center", va="center", fontsize=SMALL, color=color)


def _mark_low_cells(axes: Axes, values: np.ndarray, cell: float) -> None:
    """Mark the cells below the middle of the scale with dots; `values` go from 0 to 1, `cell` is a size in inches."""
    rows, columns = np.nonzero(values < 0.45)
    axes.plot(columns, rows, ".", color="white", markeredgecolor="black", markeredgewidth=0.4, markersize=30 * cell)


def _named_places(count: int, first: int, distance: float, group: int) -> list[int]:
    """Choose which places of an axis get a name: both ends, and as many between as there is space for.

    Args:
        count: The number of places.
        first: The place of the first sublayer: 1 if the embedding comes before it, else 0.
        distance: The distance of neighbouring places in inches.
        group: If not all places get a name, the distance of names is a multiple of this number of places.
    """
    least = math.ceil(_NAME_DISTANCE / distance)
    step = least if least == 1 else math.ceil(least / group) * group
    between = range(first, count - 1, step)
    return [0, *(place for place in between if least <= place <= count - 1 - least), count - 1]


def _labelled(figure: Figure, title: str, label: str, rows: str, columns: str) -> Figure:
    """Add the title, with the name of the model, and the labels of both axes to a figure."""
    figure.suptitle(f"{title}\n{label}" if label else title)
    maps = [axes for axes in figure.axes if axes.images]
    maps[0].set_ylabel(rows)
    for axes in maps:
        axes.set_xlabel(columns)
    return figure


__all__ = ["DIVERGING", "SEQUENTIAL", "VALUES", "draw_depth_attention", "draw_mixing", "largest"]
