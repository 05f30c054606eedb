"""Figures of training: the loss curves of several models, and the mean curves of two models over the same seeds."""

import os
from collections.abc import Mapping, Sequence

import numpy as np

from attnres.utils.drawing import Drawing, column, finish, styled
from attnres.utils.intervals import Interval

Points = Sequence[tuple[int, float]]  # (step, loss in nats per token)


def plot_loss_curves(
    curves: Mapping[str, Points], path: str | os.PathLike, compare: tuple[str, str] | None = None
) -> None:
    """Draw losses and, if `compare` is given, the difference of two of them below.

    Args:
        curves: The points of each curve by its label.
        path: The `.png` or `.svg` file to write.
        compare: The labels of two curves with points at the same steps. The difference is first minus second.

    Raises:
        ValueError: The file name has another suffix.
        FileNotFoundError: The folder does not exist.
    """
    finish(_draw_curves(curves, compare), path)


@styled
def _draw_curves(curves: Mapping[str, Points], compare: tuple[str, str] | None) -> Drawing:
    """Return the figure of `plot_loss_curves`."""
    heights = [3, 1] if compare else [1]
    figure = column(2 + 0.8 * len(heights))
    panels = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)
    upper, lower = panels[0, 0], panels[-1, 0]
    for label, points in curves.items():
        upper.plot(*zip(*points), label=label, linewidth=1.3)
    upper.set_ylabel("loss (nats/token)")
    upper.legend(frameon=False)
    if compare:
        first, second = (curves[label] for label in compare)
        steps = [step for step, _ in first]
        lower.plot(steps, [a - b for (_, a), (_, b) in zip(first, second)], color="black", linewidth=1.3)
        lower.axhline(0, color="gray", linewidth=0.8)
        lower.set_ylabel("difference")
        lower.set_title(f"{compare[0]} - {compare[1]}")
    lower.set_xlabel("training step")
    for axes in panels.flat:
        axes.grid(alpha=0.3)
    return figure


def plot_paired_runs(runs: Mapping[str, Sequence[Points]], path: str | os.PathLike, points: int = 10) -> None:
    """Draw the training loss of two models run from the same seeds and, below it, their difference at equal seeds.

    Thin lines are single seeds, thick lines are means over the seeds. The band is the 95% interval of the mean
    difference (Student's t, paired by seed); a single seed has none.

    Args:
        runs: Two models: the label of each, and its points for each seed. All runs have points at the same steps. The
            difference is first minus second.
        path: The `.png` or `.svg` file to write.
        points: The number of points of a line. Each is a mean over several steps, since the losses of single batches
            differ more than those of the models.

    Raises:
        ValueError: The file name has another suffix.
        FileNotFoundError: The folder does not exist.
    """
    finish(_draw_pairs(runs, points), path)


@styled
def _draw_pairs(runs: Mapping[str, Sequence[Points]], points: int) -> Drawing:
    """Return the figure of `plot_paired_runs`."""
    # Losses, [seeds, steps].
    first, second = (np.array([[loss for _, loss in curve] for curve in curves]) for curves in runs.values())
    ends = np.array([step for step, _ in next(iter(runs.values()))[0]])
    parts = np.array_split(np.arange(len(ends)), min(points, len(ends)))
    steps = [ends[part].mean() for part in parts]

    figure = column(3.7)
    upper, lower = figure.subplots(2, sharex=True, height_ratios=[3, 2])
    lines = {label: (upper, losses) for label, losses in zip(runs, (first, second))}
    lines[" - ".join(runs)] = (lower, first - second)
    for color, (label, (axes, losses)) in zip(("tab:orange", "tab:blue", "black"), lines.items()):
        means = np.stack([losses[:, part].mean(1) for part in parts], axis=1)  # [seeds, points]
        axes.plot(steps, means.mean(0), label=label, color=color, linewidth=1.6, marker="o", markersize=3)
        axes.plot(steps, means.T, color=color, linewidth=0.6, alpha=0.5)
        axes.grid(alpha=0.3)
    differences = [(first - second)[:, part].mean(1) for part in parts]
    bounds = [Interval.of(by_seed.tolist()).bounds for by_seed in differences]
    if all(bounds):
        lower.fill_between(steps, *zip(*bounds), color="black", alpha=0.15, linewidth=0)
    upper.set_ylabel("training loss (nats/token)")
    upper.set_title(f"Thick lines: means of {len(first)} seeds; band: 95% interval of the mean")
    upper.legend(frameon=False)
    lower.axhline(0, color="gray", linewidth=0.8)
    lower.set_ylabel("difference")
    lower.set_title(f"{' - '.join(runs)}, within a seed")
    lower.set_xlabel("training step")
    return figure


__all__ = ["Points", "plot_loss_curves", "plot_paired_runs"]
