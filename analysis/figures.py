"""Figures as PNG files: the depth-attention map of a model, and loss curves."""

import os
from collections.abc import Mapping, Sequence

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from torch import Tensor

from attnres import ResidualConfig

Points = Sequence[tuple[int, float]]  # (step, loss in nats per token)


def plot_depth_attention(weights: Tensor, path: str | os.PathLike, config: ResidualConfig) -> None:
    """Draw a map from [`attnres.analysis.depth_attention.depth_attention_map`].

    A cell shows the weight; its colour how that compares with uniform weights, which every row starts from.

    Args:
        weights: `[sublayers + 1, sources]`, NaN where a sublayer lacks a source.
        path: the PNG file to write.
        config: that of the model, which names the sublayers.
    """
    rows, columns = weights.shape
    block_size = _block_size(weights)
    relative = (weights * weights.isfinite().sum(1, keepdim=True)).log2()
    limit = _limit(relative)

    figure, axes = plt.subplots(figsize=(1.9 + 0.55 * columns, 1.4 + 0.28 * rows), layout="constrained")
    image = axes.imshow(relative.numpy(), aspect="auto", cmap="PuOr_r", vmin=-limit, vmax=limit)
    for row in range(rows):
        for column in range(columns):
            if not weights[row, column].isnan():
                color = "white" if relative[row, column].abs() > 0.6 * limit else "black"
                text = f"{weights[row, column]:.2f}"
                axes.text(column, row, text, ha="center", va="center", fontsize=7, color=color)
    axes.set_yticks(range(rows), [*sublayer_names(config), "output"], fontsize=8)
    axes.set_xticks(
        range(columns),
        [name.removeprefix("block ") for name in source_names(weights, config)],
        fontsize=8,
        rotation=45,
        ha="right",
    )
    axes.set_xlabel(f"source: block of {block_size} sublayers" if block_size > 1 else "source: sublayer output")
    axes.set_ylabel("reader: sublayer")
    axes.set_title("Depth attention, mean over tokens", fontsize=10)
    ticks = [share * limit for share in (-1.0, -0.5, 0.0, 0.5, 1.0)]
    bar = figure.colorbar(image, ax=axes, label="weight / uniform weight", ticks=ticks, extend="both")
    bar.ax.set_yticklabels([f"{2.0**tick:.2f}" for tick in ticks])
    _write(figure, path)


def source_names(weights: Tensor, config: ResidualConfig) -> list[str]:
    """A name for each column of a map: `embedding`, then blocks by number or, where they are single, sublayers."""
    single = _block_size(weights) == 1
    names = sublayer_names(config) if single else [f"block {b}" for b in range(1, weights.shape[1])]
    return ["embedding", *names][: weights.shape[1]]


def _block_size(weights: Tensor) -> int:
    """Sublayers in a block, or all where there is one block: as many rows as gain no source after the first block's."""
    rows, columns = weights.shape
    num_sources = (~weights.isnan()).sum(1).tolist()
    # A source begins with the output of one sublayer, and is read from the next one on; the first is the embedding.
    begins = [num_sources.index(count) for count in range(2, columns + 1)] + [rows]
    return begins[1] - begins[0] if columns > 1 else 1


def _limit(relative: Tensor) -> float:
    """Where the colours of a map end: beyond nine tenths of what differs, so that a single cell does not pale the rest.

    At least 0.05 (a factor of 1.04), so that rounding in a map of uniform rows is not drawn as structure.
    """
    differing = relative[relative.isfinite() & (relative.abs() > 1e-3)].abs()
    return max(0.05, differing.quantile(0.9).item()) if len(differing) else 0.05


def sublayer_names(config: ResidualConfig) -> list[str]:
    """A name for each sublayer in turn: `attention 0`, `MLP 0`, ..., or `layer 0`, ... where the two are parallel."""
    kinds = {"self_attention_res": "attention", "mlp_res": "MLP", "parallel_res": "layer"}
    layers, sublayers = range(config.num_hidden_layers), config.sublayers
    return [f"{kinds.get(sublayer.name, sublayer.name)} {layer}" for layer in layers for sublayer in sublayers]


def plot_loss_curves(
    curves: Mapping[str, Points], path: str | os.PathLike, compare: tuple[str, str] | None = None
) -> None:
    """Draw training losses, and below them the difference of two curves.

    Args:
        curves: label -> points.
        path: the PNG file to write.
        compare: labels of two curves with points at the same steps; the difference is first minus second.
    """
    heights = [3, 1] if compare else [1]
    size = (7, 3 + 1.5 * len(heights))
    figure, panels = plt.subplots(
        len(heights), sharex=True, squeeze=False, figsize=size, height_ratios=heights, layout="constrained"
    )
    upper, lower = panels[0, 0], panels[-1, 0]
    for label, points in curves.items():
        upper.plot(*zip(*points), label=label, linewidth=1.3)
    upper.set_ylabel("training loss (nats/token)")
    upper.legend(frameon=False)
    if compare:
        first, second = (curves[label] for label in compare)
        steps = [step for step, _ in first]
        lower.plot(steps, [a - b for (_, a), (_, b) in zip(first, second)], color="black", linewidth=1.3)
        lower.axhline(0, color="gray", linewidth=0.8)
        lower.set_ylabel("difference")
        lower.set_title(f"{compare[0]} - {compare[1]}", fontsize=9)
    lower.set_xlabel("step")
    for axes in panels.flat:
        axes.grid(alpha=0.3)
    _write(figure, path)


def plot_paired_runs(runs: Mapping[str, Sequence[Points]], path: str | os.PathLike, points: int = 10) -> None:
    """Draw the training loss of two models, run from the same seeds, and below it their difference within a seed.

    Lines are means over the seeds, bands reach one standard deviation to either side.

    Args:
        runs: label -> the points of each seed, at the same steps in all; the difference is first minus second.
        path: the PNG file to write.
        points: of a line, each the mean of as many steps as that leaves: single batches differ more than models do.
    """
    first, second = (np.array([[loss for _, loss in curve] for curve in curves]) for curves in runs.values())
    ends = np.array([step for step, _ in next(iter(runs.values()))[0]])
    parts = np.array_split(np.arange(len(ends)), min(points, len(ends)))
    steps = [ends[part].mean() for part in parts]

    figure, (upper, lower) = plt.subplots(2, sharex=True, figsize=(7, 6), height_ratios=[3, 2], layout="constrained")
    lines = {label: (upper, losses) for label, losses in zip(runs, (first, second))}
    lines[" - ".join(runs)] = (lower, first - second)
    for color, (label, (axes, losses)) in zip(("tab:orange", "tab:blue", "black"), lines.items()):
        means = np.stack([losses[:, part].mean(1) for part in parts], axis=1)  # [seeds, points]
        middle, spread = means.mean(0), means.std(0, ddof=1)
        axes.plot(steps, middle, label=label, color=color, linewidth=1.6, marker="o", markersize=3)
        axes.fill_between(steps, middle - spread, middle + spread, color=color, alpha=0.2, linewidth=0)
        axes.grid(alpha=0.3)
    upper.set_ylabel("training loss (nats/token)")
    upper.set_title(f"Lines: mean of {len(first)} seeds; bands: one standard deviation", fontsize=9)
    upper.legend(frameon=False)
    lower.axhline(0, color="gray", linewidth=0.8)
    lower.set_ylabel("difference")
    lower.set_title(f"{' - '.join(runs)}, within a seed", fontsize=9)
    lower.set_xlabel("step")
    _write(figure, path)


def _write(figure: plt.Figure, path: str | os.PathLike) -> None:
    figure.savefig(path, dpi=110)
    plt.close(figure)
