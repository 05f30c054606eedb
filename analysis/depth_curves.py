"""Curves from the embedding to the output, of one model or several.

A decoder layer is one step of the axis, so that models with and without blocks can be held against each other. Models
differ in colour, line and marker, and kinds of sublayers in the filling of the marker.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from .drawing import SMALL, WIDTH, blank, styled
from .names import Depth

if TYPE_CHECKING:
    from .attention_sinks import AttentionSinks
    from .depth_attention import DepthAttention
    from .interventions import Interventions
    from .magnitudes import Magnitudes

_COLORS = ("#14387f", "#d95f02", "#1b9e77", "#a6448b", "#7a6a00")
_LINES, _MARKERS = ("-", "--", "-.", ":"), ("o", "s", "^", "D", "v")
_FILLED, _HOLLOW = "full", "none"
_SPAN = 20  # the factor that values span on an axis that is logarithmic
_DECADES = 3  # of an axis that has zero in it


@styled
def draw_weights_by_depth(attentions: Mapping[str, "DepthAttention"]) -> Figure:
    """Draw by reader how far its depth weights are from uniform, and how much goes to the embedding, to the nearest
    source, and to those between.

    Args:
        attentions: label -> that of a model; a single one may have the label `""`.
    """
    panels = {
        "entropy": ("entropy", "entropy / log(sources)"),
        "distance": ("distance from uniform weights", "share of the weight"),
        "embedding": ("weight on the embedding", "weight"),
        "nearest": ("weight on the nearest source", "weight"),
        "rest": ("weight on the sources between", "weight"),
    }
    figure, every = _grid(len(panels))
    for axes, (name, (title, unit)) in zip(every, panels.items()):
        axes.set(title=title, ylabel=unit)
        axes.ticklabel_format(axis="y", useOffset=False)
        for attention, style in _styles(attentions):
            _by_kind(axes, attention.depth, getattr(attention, name), _readers(attention.depth), style)
    return _explained(figure, every, attentions, [attention.depth for attention in attentions.values()], "output")


@styled
def draw_magnitudes(models: Mapping[str, "Magnitudes"]) -> Figure:
    """Draw root mean squares by depth, as in Figure 5 (b, c) of the paper: the stream, inputs, outputs, gradients.

    Args:
        models: label -> those of a model; a single one may have the label `""`. Gradients that were not measured have
            no panel.
    """
    panels = {
        "outputs": ("output of sublayer", "root mean square"),
        "gradients": ("gradient by the output of sublayer", "root mean square"),
        "stream": ("stream, or sum of the block", "root mean square"),
        "inputs": ("input of sublayer", "root mean square"),
        "largest": ("largest input", "largest / median"),
    }
    panels = {name: texts for name, texts in panels.items() if any(_any(getattr(of, name)) for of in models.values())}
    figure, every = _grid(len(panels))
    for axes, (name, (title, unit)) in zip(every, panels.items()):
        axes.set(title=title, ylabel=unit)
        for of, style in _styles(models):
            if name == "stream":
                axes.plot(_outputs(of.depth), of.stream.numpy(), **style | {"marker": "none"})
            else:
                places = _outputs(of.depth) if name in ("outputs", "gradients") else _readers(of.depth)
                _by_kind(axes, of.depth, getattr(of, name), places, style)
        _scale(axes, [getattr(of, name) for of in models.values()])
    return _explained(figure, every, models, [of.depth for of in models.values()], "embedding and output")


@styled
def draw_sinks(models: Mapping[str, "AttentionSinks"]) -> Figure:
    """Draw by layer how much of the attention goes to the first token.

    Args:
        models: label -> those of a model; a single one may have the label `""`.
    """
    figure, (axes,) = _grid(1)
    for sinks, style in _styles(models):
        for values, filling in ((sinks.mean, _FILLED), (sinks.strongest, _HOLLOW)):
            axes.plot(range(len(values)), values.numpy(), **style, fillstyle=filling)
    for uniform in sorted({round(sinks.uniform, 6) for sinks in models.values()}):
        axes.axhline(uniform, color="gray", linestyle=(0, (6, 3)), linewidth=0.9, zorder=0)
    note = "filled: mean over heads; hollow: the head that gives most; dashed, gray: uniform attention"
    if any(sinks.mean.isnan().any() for sinks in models.values()):
        note += "\ngaps: layers of linear attention, which has no weights"
    layers = max(len(sinks.mean) for sinks in models.values())
    largest = max(0, *(2 * of.uniform for of in models.values()), axes.dataLim.ymax)
    axes.set(title="attention to the first token", ylabel="weight", xlim=(-0.5, layers - 0.5))
    axes.set_ylim(0, 1.08 * largest)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    return _finished(figure, [axes], models, note)


@styled
def draw_interventions(models: Mapping[str, "Interventions"]) -> Figure:
    """Draw the rise of the loss for each hidden source, over all outputs in it, and for each reader made uniform.

    Args:
        models: label -> those of a model; a single one may have the label `""`.
    """
    has_uniform = any(_any(of.uniform) for of in models.values())
    figure, every = _grid(1 + has_uniform, columns=1)
    for of, style in _styles(models):
        _over_members(every[0], of, style)
    every[0].set_title("a source is hidden; the bar spans the outputs in it")
    _scale(every[0], [of.hidden for of in models.values()], signed=True)
    if has_uniform:
        for of, style in _styles(models):
            _by_kind(every[1], of.depth, of.uniform, _readers(of.depth), style)
        every[1].set_title("the weights of a reader are made uniform")
        _scale(every[1], [of.uniform for of in models.values()], signed=True)
    for axes in every:
        axes.axhline(0, color="gray", linewidth=0.8, zorder=0)
        axes.set_ylabel("rise of the loss (nats/token)")
    return _explained(figure, every, models, [of.depth for of in models.values()], "output" if has_uniform else "")


def _grid(count: int, columns: int = 2) -> tuple[Figure, list[Axes]]:
    """A figure with `count` panels; the last one is as wide as the figure if it is alone in its row."""
    columns = min(columns, count)
    rows = math.ceil(count / columns)
    figure = blank(WIDTH, 0.9 + 1.9 * rows if rows > 1 else 3.2)
    grid = figure.add_gridspec(rows, columns)
    places = [grid[i // columns, i % columns] for i in range(count)]
    if count % columns:
        places[-1] = grid[-1, :]
    return figure, [figure.add_subplot(place) for place in places]


def _styles(models: Mapping[str, Any]) -> Iterable[tuple[Any, dict[str, Any]]]:
    """Each model, and what its curves look like."""
    for of, color, line, marker in zip(models.values(), cycle(_COLORS), cycle(_LINES), cycle(_MARKERS)):
        yield of, {"color": color, "linestyle": line, "marker": marker, "markersize": 3.5, "linewidth": 1.1}


def _readers(depth: Depth) -> np.ndarray:
    """Where readers stand, in decoder layers: the output behind the last one."""
    return np.arange(len(depth.readers)) / len(depth.kinds)


def _outputs(depth: Depth) -> np.ndarray:
    """Where outputs stand: that of a sublayer where it reads, the embedding before the first one."""
    return (np.arange(len(depth.outputs)) - 1) / len(depth.kinds)


def _by_kind(axes: Axes, depth: Depth, values: Tensor, places: np.ndarray, style: Mapping[str, Any]) -> None:
    """A curve for each kind of sublayer, and a star for what is none: the embedding or the output."""
    sublayers = np.rint(places * len(depth.kinds)).astype(int)
    is_sublayer = (sublayers >= 0) & (sublayers < depth.num_sublayers)
    for kind, filling in zip(range(len(depth.kinds)), cycle((_FILLED, _HOLLOW))):
        chosen = is_sublayer & (sublayers % len(depth.kinds) == kind)
        axes.plot(places[chosen], values.numpy()[chosen], **style, fillstyle=filling)
    star = {**style, "marker": "*", "markersize": 8, "linestyle": "none"}
    axes.plot(places[~is_sublayer], values.numpy()[~is_sublayer], **star, fillstyle=_FILLED)


def _over_members(axes: Axes, of: "Interventions", style: Mapping[str, Any]) -> None:
    """A bar over all outputs that a source sums up, with its marker in the middle."""
    places, half = _outputs(of.depth), 0.5 / len(of.depth.kinds)
    spans = [of.depth.members(source) for source in range(len(of.depth.sources))]
    left, right = ([places[span[end]] + sign * half for span in spans] for end, sign in ((0, -1), (-1, 1)))
    axes.hlines(of.hidden.numpy(), left, right, color=style["color"], linewidth=1.6)
    middle = (np.array(left) + np.array(right)) / 2
    axes.plot(middle, of.hidden.numpy(), **style | {"linewidth": 0.5})


def _scale(axes: Axes, several: Iterable[Tensor], signed: bool = False) -> None:
    """A logarithmic axis where values span so much; about zero it is linear, if they may have either sign."""
    values = np.concatenate([values.numpy() for values in several])
    sizes = np.abs(values[np.isfinite(values) & (values != 0)])
    if len(sizes) == 0 or sizes.max() < _SPAN * sizes.min():
        return
    if signed:
        axes.set_yscale("symlog", linthresh=10.0 ** (math.floor(math.log10(sizes.max())) - _DECADES + 1))
    else:
        axes.set_yscale("log")


def _any(values: Tensor) -> bool:
    return not values.isnan().all()


def _explained(
    figure: Figure, every: Sequence[Axes], models: Mapping[str, Any], depths: Sequence[Depth], stars: str
) -> Figure:
    """With what fillings and stars mean, if there are any, and where blocks begin, if that is the same for all."""
    notes = []
    if stars:
        kinds = next((depth.kinds for depth in depths if len(depth.kinds) > 1), ())
        notes += [*(f"{filling}: {kind}" for filling, kind in zip(("filled", "hollow"), kinds)), f"star: {stars}"]
    last = max(_readers(depth)[-1] for depth in depths)
    blocks = {(depth.block_size, depth.kinds) for depth in depths if depth.block_size > 1}
    for axes in every:
        axes.set_xlim(-0.5 - 0.03 * last, 1.03 * last)
        if len(blocks) == 1:
            ((size, kinds),) = blocks
            for begin in np.arange(-0.5, last * len(kinds) - 0.5, size) / len(kinds):
                axes.axvline(begin, color="0.85", linewidth=0.8, zorder=0)
        places = [place for place in MaxNLocator(integer=True, nbins=10).tick_values(0, last) if 0 <= place < last]
        step = places[1] - places[0] if len(places) > 1 else 0
        places = [place for place in places if place <= last - 0.7 * step] or places
        has_output = axes.dataLim.xmax > last - 1e-6
        names = [*(f"{place:g}" for place in places), *(["output"] if has_output else [])]
        axes.set_xticks([*places, last][: len(names)], names)
    if len(blocks) == 1:
        notes.append("vertical lines: where blocks begin")
    return _finished(figure, every, models, "; ".join(notes))


def _finished(figure: Figure, every: Sequence[Axes], models: Mapping[str, Any], note: str) -> Figure:
    for axes in every:
        axes.set_xlabel("decoder layer")
        axes.grid(axis="y", alpha=0.3)
    if note:
        figure.supxlabel(note, fontsize=SMALL)
    if any(models):
        handles = [Line2D([], [], label=label, **style) for label, (_, style) in zip(models, _styles(models))]
        columns = min(4, len(models), max(1, 100 // (8 + max(map(len, models)))))
        figure.legend(handles=handles, loc="outside upper center", ncols=columns, frameon=False)
    return figure


__all__ = ["draw_interventions", "draw_magnitudes", "draw_sinks", "draw_weights_by_depth"]
