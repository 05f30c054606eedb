"""Curves from the embedding to the output, of one model or several.

The horizontal axis counts decoder layers, so models with and without blocks can be compared. Models differ in colour,
line and marker. Kinds of sublayers differ in the filling of the marker.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
from torch import Tensor

from attnres.utils.drawing import SMALL, WIDTH, blank, styled
from attnres.utils.extras import require_extra

from .attention_sinks import AttentionSinks
from .axis import DepthAxis
from .depth_attention import DepthAttention
from .interventions import Interventions
from .magnitudes import Magnitudes

with require_extra("analysis"):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

_COLORS = ("#14387f", "#d95f02", "#1b9e77", "#a6448b", "#7a6a00")
_LINES, _MARKERS = ("-", "--", "-.", ":"), ("o", "s", "^", "D", "v")
_FILLED, _HOLLOW = "full", "none"
_LOG_SPAN = 20  # an axis is logarithmic if the largest value is at least this multiple of the smallest
_DECADES = 3  # powers of ten on each side of zero, on a logarithmic axis with both signs


@styled
def draw_weights_by_depth(attentions: Mapping[str, DepthAttention]) -> Figure:
    """Draw how far the depth weights of each consumer are from uniform, and how much goes to which source.

    The panels are entropy, distance from uniform weights, and the weights on the embedding, on the nearest source and
    on the sources between.

    Args:
        attentions: The depth attention of each model by its label. A single model may have the label `""`.

    Returns:
        The figure.
    """
    panels = {
        "entropy": ("entropy", "entropy / log(sources)"),
        "distance": ("distance from uniform weights", "share of the weight"),
        "embedding": ("weight on the embedding", "weight"),
        "nearest": ("weight on the nearest source", "weight"),
        "rest": ("weight on the sources between", "weight"),
    }
    figure, all_axes = _grid(len(panels))
    for axes, (name, (title, unit)) in zip(all_axes, panels.items()):
        axes.set(title=title, ylabel=unit)
        axes.ticklabel_format(axis="y", useOffset=False)
        for attention, style in _with_styles(attentions):
            depth = attention.depth
            _plot_by_kind(axes, depth, getattr(attention, name), _consumer_places(depth), style)
    depths = [attention.depth for attention in attentions.values()]
    return _finish_depth_figure(figure, all_axes, attentions, depths, "output")


@styled
def draw_magnitudes(models: Mapping[str, Magnitudes]) -> Figure:
    """Draw root mean squares by depth, as in Figure 5 (b, c) of the paper: the stream, inputs, outputs, gradients.

    Args:
        models: The magnitudes of each model by its label. A single model may have the label `""`. Gradients that were
            not measured get no panel.

    Returns:
        The figure.
    """
    panels = {
        "outputs": ("output of sublayer", "root mean square"),
        "gradients": ("gradient by the output of sublayer", "root mean square"),
        "stream": ("stream, or sum of the block", "root mean square"),
        "inputs": ("input of sublayer", "root mean square"),
        "largest": ("largest input", "largest / median"),
    }
    panels = {
        name: texts for name, texts in panels.items() if any(_has_values(getattr(m, name)) for m in models.values())
    }
    figure, all_axes = _grid(len(panels))
    for axes, (name, (title, unit)) in zip(all_axes, panels.items()):
        axes.set(title=title, ylabel=unit)
        for measurement, style in _with_styles(models):
            depth = measurement.depth
            if name == "stream":
                axes.plot(_output_places(depth), measurement.stream.numpy(), **style | {"marker": "none"})
            else:
                places = _output_places(depth) if name in ("outputs", "gradients") else _consumer_places(depth)
                _plot_by_kind(axes, depth, getattr(measurement, name), places, style)
        _scale_axis(axes, [getattr(measurement, name) for measurement in models.values()])
    depths = [measurement.depth for measurement in models.values()]
    return _finish_depth_figure(figure, all_axes, models, depths, "embedding and output")


@styled
def draw_sinks(models: Mapping[str, AttentionSinks]) -> Figure:
    """Draw the share of the attention that goes to the first token, by layer.

    Args:
        models: The attention sinks of each model by its label. A single model may have the label `""`.

    Returns:
        The figure.
    """
    figure, (axes,) = _grid(1)
    for sinks, style in _with_styles(models):
        for values, filling in ((sinks.mean, _FILLED), (sinks.strongest, _HOLLOW)):
            axes.plot(range(len(values)), values.numpy(), **style, fillstyle=filling)
    for uniform in sorted({round(sinks.uniform, 6) for sinks in models.values()}):
        axes.axhline(uniform, color="gray", linestyle=(0, (6, 3)), linewidth=0.9, zorder=0)
    note = "filled: mean over heads; hollow: the head that gives most; dashed, gray: uniform attention"
    if any(sinks.mean.isnan().any() for sinks in models.values()):
        note += "\ngaps: layers of linear attention, which has no weights"
    layers = max(len(sinks.mean) for sinks in models.values())
    largest = max(0, *(2 * sinks.uniform for sinks in models.values()), axes.dataLim.ymax)
    axes.set(title="attention to the first token", ylabel="weight", xlim=(-0.5, layers - 0.5))
    axes.set_ylim(0, 1.08 * largest)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    return _finish_figure(figure, [axes], models, note)


@styled
def draw_interventions(models: Mapping[str, Interventions]) -> Figure:
    """Draw the rise of the loss for each source that is hidden, and for each consumer whose weights are made uniform.

    Args:
        models: The interventions on each model by its label. A single model may have the label `""`.

    Returns:
        The figure.
    """
    has_uniform = any(_has_values(measurement.uniform) for measurement in models.values())
    figure, all_axes = _grid(1 + has_uniform, columns=1)
    for measurement, style in _with_styles(models):
        _plot_over_members(all_axes[0], measurement, style)
    all_axes[0].set_title("a source is hidden; the bar spans the outputs in it")
    _scale_axis(all_axes[0], [measurement.hidden for measurement in models.values()], has_both_signs=True)
    if has_uniform:
        for measurement, style in _with_styles(models):
            depth = measurement.depth
            _plot_by_kind(all_axes[1], depth, measurement.uniform, _consumer_places(depth), style)
        all_axes[1].set_title("the weights of a reader are made uniform")
        _scale_axis(all_axes[1], [measurement.uniform for measurement in models.values()], has_both_signs=True)
    for axes in all_axes:
        axes.axhline(0, color="gray", linewidth=0.8, zorder=0)
        axes.set_ylabel("rise of the loss (nats/token)")
    depths = [measurement.depth for measurement in models.values()]
    return _finish_depth_figure(figure, all_axes, models, depths, "output" if has_uniform else "")


def _grid(count: int, columns: int = 2) -> tuple[Figure, list[Axes]]:
    """Return a figure with `count` panels. A last panel that is alone in its row is as wide as the figure."""
    columns = min(columns, count)
    rows = math.ceil(count / columns)
    figure = blank(WIDTH, 0.9 + 1.9 * rows if rows > 1 else 3.2)
    grid = figure.add_gridspec(rows, columns)
    cells = [grid[i // columns, i % columns] for i in range(count)]
    if count % columns:
        cells[-1] = grid[-1, :]
    return figure, [figure.add_subplot(cell) for cell in cells]


def _with_styles(models: Mapping[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield each model's measurement with the style of its curves."""
    for measurement, color, line, marker in zip(models.values(), cycle(_COLORS), cycle(_LINES), cycle(_MARKERS)):
        yield measurement, {"color": color, "linestyle": line, "marker": marker, "markersize": 3.5, "linewidth": 1.1}


def _consumer_places(depth: DepthAxis) -> np.ndarray:
    """Return the places of consumers on the axis in decoder layers, `[L + 1]`. The output follows the last layer."""
    return np.arange(len(depth.consumers)) / len(depth.kinds)


def _output_places(depth: DepthAxis) -> np.ndarray:
    """Return the places of outputs on the axis, `[L + 1]`: the embedding before layer 0, outputs at their sublayer."""
    return (np.arange(len(depth.outputs)) - 1) / len(depth.kinds)


def _plot_by_kind(axes: Axes, depth: DepthAxis, values: Tensor, places: np.ndarray, style: dict[str, Any]) -> None:
    """Plot a curve for each kind of sublayer, and a star for the embedding or the output.

    Args:
        axes: The panel.
        depth: The depth axis of the model.
        values: The values to plot, `[L + 1]`.
        places: Their places on the axis, `[L + 1]` in decoder layers.
        style: The style of the model's curves.
    """
    sublayers = np.rint(places * len(depth.kinds)).astype(int)
    is_sublayer = (sublayers >= 0) & (sublayers < depth.num_sublayers)
    for kind, filling in zip(range(len(depth.kinds)), cycle((_FILLED, _HOLLOW))):
        chosen = is_sublayer & (sublayers % len(depth.kinds) == kind)
        axes.plot(places[chosen], values.numpy()[chosen], **style, fillstyle=filling)
    star: dict[str, Any] = {**style, "marker": "*", "markersize": 8, "linestyle": "none"}
    axes.plot(places[~is_sublayer], values.numpy()[~is_sublayer], **star, fillstyle=_FILLED)


def _plot_over_members(axes: Axes, measurement: Interventions, style: dict[str, Any]) -> None:
    """Plot the rise for each hidden source: a bar over all outputs that the source sums up, with a marker."""
    depth = measurement.depth
    places, half = _output_places(depth), 0.5 / len(depth.kinds)
    spans = [depth.members(source) for source in range(len(depth.sources))]
    left, right = ([places[span[end]] + sign * half for span in spans] for end, sign in ((0, -1), (-1, 1)))
    axes.hlines(measurement.hidden.numpy(), left, right, color=style["color"], linewidth=1.6)
    middle = (np.array(left) + np.array(right)) / 2
    thin: dict[str, Any] = {**style, "linewidth": 0.5}
    axes.plot(middle, measurement.hidden.numpy(), **thin)


def _scale_axis(axes: Axes, curves: Iterable[Tensor], has_both_signs: bool = False) -> None:
    """Make the vertical axis logarithmic if the values span a factor of `_LOG_SPAN`.

    Args:
        axes: The panel.
        curves: All values of the panel.
        has_both_signs: Whether values may be zero or negative. The axis is then linear around zero.
    """
    values = np.concatenate([curve.numpy() for curve in curves])
    sizes = np.abs(values[np.isfinite(values) & (values != 0)])
    if len(sizes) == 0 or sizes.max() < _LOG_SPAN * sizes.min():
        return
    if has_both_signs:
        axes.set_yscale("symlog", linthresh=10.0 ** (math.floor(math.log10(sizes.max())) - _DECADES + 1))
    else:
        axes.set_yscale("log")


def _has_values(values: Tensor) -> bool:
    return not values.isnan().all()


def _finish_depth_figure(
    figure: Figure, all_axes: Sequence[Axes], models: Mapping[str, Any], depths: Sequence[DepthAxis], stars: str
) -> Figure:
    """Finish a figure whose axis is the depth: add ticks, lines where blocks begin, and a note on the markers.

    Args:
        figure: The figure.
        all_axes: Its panels.
        models: The measurement of each model by its label.
        depths: The depth axis of each model.
        stars: The meaning of a star; empty if there are no curves by kind.
    """
    notes = []
    if stars:
        kinds = next((depth.kinds for depth in depths if len(depth.kinds) > 1), ())
        notes += [*(f"{filling}: {kind}" for filling, kind in zip(("filled", "hollow"), kinds)), f"star: {stars}"]
    last = max(_consumer_places(depth)[-1] for depth in depths)
    # Lines are drawn only if blocks begin at the same places in all models with blocks.
    blocks = {(depth.block_size, depth.kinds) for depth in depths if depth.block_size > 1}
    for axes in all_axes:
        axes.set_xlim(-0.5 - 0.03 * last, 1.03 * last)
        if len(blocks) == 1:
            ((size, kinds),) = blocks
            for begin in np.arange(-0.5, last * len(kinds) - 0.5, size) / len(kinds):
                axes.axvline(begin, color="0.85", linewidth=0.8, zorder=0)
        places = [place for place in MaxNLocator(integer=True, nbins=10).tick_values(0, last) if 0 <= place < last]
        # A tick close to the last one would overlap its name, "output".
        step = places[1] - places[0] if len(places) > 1 else 0
        places = [place for place in places if place <= last - 0.7 * step] or places
        has_output = axes.dataLim.xmax > last - 1e-6
        names = [*(f"{place:g}" for place in places), *(["output"] if has_output else [])]
        axes.set_xticks([*places, last][: len(names)], names)
    if len(blocks) == 1:
        notes.append("vertical lines: where blocks begin")
    return _finish_figure(figure, all_axes, models, "; ".join(notes))


def _finish_figure(figure: Figure, all_axes: Sequence[Axes], models: Mapping[str, Any], note: str) -> Figure:
    """Finish a figure: add the name of the axis, a note below, and a legend above if models have labels."""
    for axes in all_axes:
        axes.set_xlabel("decoder layer")
        axes.grid(axis="y", alpha=0.3)
    if note:
        figure.supxlabel(note, fontsize=SMALL)
    if any(models):
        handles = [Line2D([], [], label=label, **style) for label, (_, style) in zip(models, _with_styles(models))]
        # As many columns as the longest label leaves room for.
        columns = min(4, len(models), max(1, 100 // (8 + max(map(len, models)))))
        figure.legend(handles=handles, loc="outside upper center", ncols=columns, frameon=False)
    return figure


__all__ = ["draw_interventions", "draw_magnitudes", "draw_sinks", "draw_weights_by_depth"]
