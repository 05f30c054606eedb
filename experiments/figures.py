"""The figure of a comparison from scratch: its training losses over the steps."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from attnres.analysis.drawing import blank, finish
from attnres.analysis.loss_figures import Points

from .declared import BASELINE
from .scratch import ShownRuns

SMOOTHED = 3  # points of a difference that are averaged: single batches differ more than models do


def plot(shown: ShownRuns, path: Path) -> None:
    """Draw the training loss of each connection, and below it the loss minus that of the standard model.

    Thick lines are means over seeds. If there are several seeds, each has a thin line in the lower panel.

    Args:
        shown: The runs.
        path: The picture.
    """
    figure = blank(7, 6)
    upper, lower = figure.subplots(2, sharex=True, height_ratios=[3, 2])
    for number, label in enumerate(shown.rates):
        color, curves = f"C{number}", [run["curve"] for run, _ in shown.pairs[label]]
        upper.plot(*zip(*_mean(curves)), label=f"{label} (seeds: {len(curves)})", color=color, linewidth=1.3)
        if label == BASELINE:
            continue
        leads = [smoothed(points) for points in shown.leads(label)]
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
    """Return the means of `SMOOTHED` neighbouring points, in their middle. The rest at the end joins the last."""
    groups = [points[i : i + SMOOTHED] for i in range(0, len(points) - SMOOTHED + 1, SMOOTHED)] or [points]
    groups[-1] = points[len(groups[:-1]) * SMOOTHED :]
    return [(mean(step for step, _ in group), mean(value for _, value in group)) for group in groups]
