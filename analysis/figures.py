"""Figures as PNG files: the depth-attention map of a model, and loss curves."""

import math
import os
from collections.abc import Mapping, Sequence

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
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
    num_sources = (~weights.isnan()).sum(1).tolist()
    # A source begins with the output of one sublayer, and is read from the next one on; the first is the embedding.
    begins = [num_sources.index(count) for count in range(2, columns + 1)] + [rows]
    block_size = begins[1] - begins[0] if columns > 1 else 1
    relative = (weights * weights.isfinite().sum(1, keepdim=True)).log2()
    # At least a factor of 2, so that rounding in a map of uniform rows is not drawn as structure.
    limit = max(1.0, relative.nan_to_num(neginf=0.0).abs().max().item())

    figure, axes = plt.subplots(figsize=(1.9 + 0.55 * columns, 1.4 + 0.28 * rows), layout="constrained")
    image = axes.imshow(relative.numpy(), aspect="auto", cmap="PuOr_r", vmin=-limit, vmax=limit)
    for row in range(rows):
        for column in range(columns):
            if not weights[row, column].isnan():
                axes.text(column, row, f"{weights[row, column]:.2f}", ha="center", va="center", fontsize=7)
    names = sublayer_names(config)
    axes.set_yticks(range(rows), [*names, "output"], fontsize=8)
    blocks = ["embedding"] + [str(b) if block_size > 1 else names[b - 1] for b in range(1, columns)]
    axes.set_xticks(range(columns), blocks, fontsize=8, rotation=45, ha="right")
    axes.set_xlabel(f"source: block of {block_size} sublayers" if block_size > 1 else "source: sublayer output")
    axes.set_ylabel("reader: sublayer")
    axes.set_title("Depth attention, mean over tokens", fontsize=10)
    ticks = range(math.ceil(-limit), math.floor(limit) + 1)
    bar = figure.colorbar(image, ax=axes, label="weight / uniform weight", ticks=list(ticks))
    bar.ax.set_yticklabels([f"{2.0**tick:g}" for tick in ticks])
    _write(figure, path)


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


def _write(figure: plt.Figure, path: str | os.PathLike) -> None:
    figure.savefig(path, dpi=110)
    plt.close(figure)
