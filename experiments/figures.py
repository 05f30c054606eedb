"""Figures of a comparison, and of several at different depths, from the stored runs."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean

from attnres.analysis.drawing import blank, finish
from attnres.analysis.loss_figures import Points

from .harness import deviation_of
from .scratch import Comparison
from .scratch_declared import BASELINE

FARTHEST = 0.3  # nats/token: a model that ends farther from the standard one stands at the edge, with its numbers
SMOOTHED = 3  # points of a curve in one of a difference: single batches differ more than models do


def plot(comparison: Comparison, rates: Mapping[str, float], tokens: int, path: Path) -> None:
    """Draw the training loss of each connection, and below it what it is above `standard`, within seeds.

    Thick lines are means over seeds; where there are several, each has a thin one in the lower panel.
    """
    figure = blank(7, 6)
    upper, lower = figure.subplots(2, sharex=True, height_ratios=[3, 2])
    for number, (label, rate) in enumerate(rates.items()):
        color, curves = f"C{number}", [run["curve"] for run in comparison.runs(label, rate, tokens).values()]
        upper.plot(*zip(*_mean(curves)), label=f"{label} (seeds: {len(curves)})", color=color, linewidth=1.3)
        if label == BASELINE:
            continue
        leads = [smoothed(points) for points in comparison.leads(label, rates, tokens)]
        for points in leads if len(leads) > 1 else ():
            lower.plot(*zip(*points), color=color, linewidth=0.6, alpha=0.6)
        lower.plot(*zip(*_mean(leads)), color=color, linewidth=1.5)
    upper.set_ylabel("training loss (nats/token)")
    upper.legend(frameon=False, fontsize=8)
    lower.axhline(0, color="gray", linewidth=0.8)
    lower.set_ylabel("minus standard\n(thin: a seed)")
    lower.set_xlabel("step")
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
    finish(figure, path)


def _mean(curves: Sequence[Points]) -> Points:
    return [(points[0][0], mean(loss for _, loss in points)) for points in zip(*curves)]


def smoothed(points: Points) -> Points:
    """Means of so many neighbouring points, in their middle; what is left at the end goes into the last."""
    groups = [points[i : i + SMOOTHED] for i in range(0, len(points) - SMOOTHED + 1, SMOOTHED)] or [points]
    groups[-1] = points[len(groups[:-1]) * SMOOTHED :]
    return [(mean(step for step, _ in group), mean(value for _, value in group)) for group in groups]


def plot_beside_paper(comparison: Comparison, rates: Mapping[str, float], tokens: int, path: Path) -> None:
    """Draw each connection's loss minus that of `standard`: each seed, their mean, and what the paper has."""
    published = comparison.experiment.published
    found = {label: comparison.differences(label, rates, tokens) for label in rates if label != BASELINE}
    figure = blank(7, 1.2 + 0.28 * len(found))
    axes = figure.subplots()
    for row, (label, differences) in enumerate(found.items()):
        if abs(mean(differences)) > FARTHEST:
            edge = math.copysign(FARTHEST, mean(differences))
            axes.plot(edge, row, ">" if edge > 0 else "<", color="tab:blue")
            place = {"xytext": (-math.copysign(8, edge), 0), "ha": "right" if edge > 0 else "left", "va": "center"}
            seeds = ", ".join(f"{difference:+.2f}" for difference in differences)
            axes.annotate(seeds, (edge, row), textcoords="offset points", **place)
        else:
            axes.plot(differences, [row] * len(differences), "|", color="tab:blue", markersize=9)
            axes.plot(mean(differences), row, "o", color="tab:blue", fillstyle=_fill(differences))
        if label in published:
            axes.plot(published[label], row, "D", color="tab:orange", fillstyle="none")
    axes.plot([], [], "o", color="tab:blue", label="here: mean, and each seed")
    if any(len(differences) == 1 and abs(differences[0]) <= FARTHEST for differences in found.values()):
        axes.plot([], [], "o", color="tab:blue", fillstyle="none", label="here: one seed")
    axes.plot([], [], "D", color="tab:orange", fillstyle="none", label="paper, 436M parameters")
    axes.axvline(0, color="gray", linewidth=0.8)
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    axes.set_xlabel("loss minus that of the standard model (nats/token)")
    axes.grid(alpha=0.3, axis="x")
    axes.legend(frameon=False, fontsize=8)
    finish(figure, path)


def plot_block_sizes(comparison: Comparison, rates: Mapping[str, float], tokens: int, path: Path) -> None:
    """Draw the loss minus that of `standard` against the block size, as the paper's Figure 6 does; 1 is Full."""
    published = comparison.experiment.published
    sizes = block_sizes(comparison, rates)
    found = {size: comparison.differences(label, rates, tokens) for size, label in sizes.items()}
    beside = [(size, published[label]) for size, label in sizes.items() if label in published]
    _plot_spread(found, "sublayers in a block", "loss minus standard (nats/token)", path, beside)


def block_sizes(comparison: Comparison, labels: Iterable[str]) -> dict[int, str]:
    """Block size -> label, of the connections that change nothing else."""
    connections = {label: comparison.experiment.connections[label] for label in labels}
    alone = {label: own for label, own in connections.items() if own.keys() == {"attn_res_block_size"}}
    return dict(sorted((own["attn_res_block_size"], label) for label, own in alone.items()))


def gains(comparisons: Sequence[Comparison]) -> dict[int, list[float]]:
    """Sublayers -> the loss of the second connection minus that of `standard`, for each seed that has both."""
    found = {}
    for comparison in comparisons:
        experiment = comparison.experiment
        rates = comparison.reported(experiment.tokens)
        label = list(experiment.connections)[1]
        if {label, BASELINE} <= rates.keys():
            sublayers = 2 * experiment.model["num_hidden_layers"]
            found[sublayers] = comparison.differences(label, rates, experiment.tokens)
    return dict(sorted(found.items()))


def plot_gains(found: Mapping[int, Sequence[float]], path: Path) -> None:
    """Draw them against depth."""
    _plot_spread(found, "sublayers", "loss, Block minus standard (nats/token)", path)


def _fill(values: Sequence[float]) -> str:
    """Of a marker: one seed is hollow."""
    return "full" if len(values) > 1 else "none"


def _plot_spread(
    found: Mapping[int, Sequence[float]], across: str, upwards: str, path: Path, published: Points = ()
) -> None:
    """Values against powers of two: those of each seed, their mean with one standard deviation to either side."""
    figure = blank(5.5, 3.6)
    axes = figure.subplots()
    places = list(found)
    for place, values in found.items():
        axes.errorbar(
            place, mean(values), deviation_of(values), fmt="o", color="tab:blue", fillstyle=_fill(values), capsize=4
        )
    axes.errorbar([], [], [], fmt="o", color="tab:blue", capsize=4, label="mean ± standard deviation")
    seeds = [(place, value) for place, values in found.items() for value in values]
    axes.plot(*zip(*seeds), "x", color="tab:blue", alpha=0.6, label="a seed")
    if published:
        axes.plot(*zip(*published), "D--", color="tab:orange", fillstyle="none", label="paper, 436M parameters")
    axes.axhline(0, color="gray", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, list(map(str, places)))
    axes.minorticks_off()
    axes.set_xlabel(across)
    axes.set_ylabel(upwards)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    finish(figure, path)
