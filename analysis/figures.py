"""Figures as PNG files: the depth-attention map of a model, and loss curves."""

import os
from collections.abc import Mapping, Sequence

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from torch import Tensor


def plot_depth_attention(weights: Tensor, path: str | os.PathLike, block_size: int) -> None:
    """Draw a map from [`attnres.analysis.depth_attention.depth_attention_map`].

    Args:
        weights: `[2 * layers + 1, sources]`, NaN where a sublayer lacks a source.
        path: the PNG file to write.
        block_size: block size S in sublayers, which names the sources.
    """
    rows, columns = weights.shape
    figure, axes = plt.subplots(figsize=(1.6 + 0.55 * columns, 1.4 + 0.3 * rows), layout="constrained")
    image = axes.imshow(weights.numpy(), aspect="auto", cmap="viridis", vmin=0, vmax=float(weights.nan_to_num().max()))
    names = [f"{'attention' if row % 2 == 0 else 'MLP'} {row // 2}" for row in range(rows - 1)]
    axes.set_yticks(range(rows), [*names, "output"], fontsize=8)
    blocks = ["embedding"] + [str(b) if block_size > 1 else names[b - 1] for b in range(1, columns)]
    axes.set_xticks(range(columns), blocks, fontsize=8, rotation=45, ha="right")
    axes.set_xlabel(f"source: block of {block_size} sublayers" if block_size > 1 else "source: sublayer output")
    axes.set_ylabel("reader: sublayer")
    axes.set_title("Depth attention, mean over tokens", fontsize=10)
    figure.colorbar(image, ax=axes, label="weight")
    _write(figure, path)


def plot_loss_curves(curves: Mapping[str, Sequence[tuple[int, float]]], path: str | os.PathLike) -> None:
    """Draw training losses; `curves` maps a label to its points (step, loss in nats per token)."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for label, points in curves.items():
        axes.plot(*zip(*points), label=label, linewidth=1.3)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss (nats/token)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    _write(figure, path)


def _write(figure: plt.Figure, path: str | os.PathLike) -> None:
    figure.savefig(path, dpi=120)
    plt.close(figure)
