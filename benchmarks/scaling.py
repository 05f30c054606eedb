"""Measure how the cost of attention residuals grows with depth, block size, width and length.

It measures prefill of a Llama shape, as a ratio to the standard model, and compares it with the paper's traffic model
(Table 1). That counts units of d values per token and sublayer, for N blocks of S sublayers:

    residual 3        Block, two-phase N/S + 5        Full, two-phase S + N, for the best S

The predicted added time is the traffic beyond that of the residual stream, at the measured speed of `copy_`.
"""

import gc
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.table import Table

from .report import cell, make_table
from .shapes import EAGER, STANDARD, build, connect, llama, token_ids
from .timing import Setting, compare, interleave
from .workloads import prefill

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from attnres.utils.drawing import Drawing

BASE = {"layers": 12, "block_size": 4, "width": 512, "tokens": 512}
PANELS = {
    "layers": (4, 8, 12, 16, 24),
    "block_size": (1, 2, 4, 8, 24),
    "width": (256, 512, 768, 1024),
    "tokens": (64, 256, 512, 1024, 2048),
}
QUICK_BASE = {"layers": 2, "block_size": 2, "width": 64, "tokens": 16}
QUICK_PANELS = {"layers": (1, 2), "block_size": (1, 2), "width": (64,), "tokens": (8, 16)}
COPY = "copy"
COPY_BYTES = 2**26
RESIDUAL_TRAFFIC = 3


def measure(setting: Setting) -> Iterator[dict]:
    """Yield one row per panel, value and block size."""
    base, panels = (QUICK_BASE, QUICK_PANELS) if setting.quick else (BASE, PANELS)
    source = torch.ones(COPY_BYTES // 4, device=setting.device)
    target = torch.zeros_like(source)
    for panel, values in panels.items():
        # Block sizes are measured together, because they share the standard model and the turns.
        points = [base | {panel: value} for value in values]
        shared = [points] if panel == "block_size" else [[point] for point in points]
        for group in shared:
            shape = group[0]
            standard = build(llama(shape["width"], shape["layers"]), torch.float32, setting.device)
            sizes = sorted({point["block_size"] for point in group} | (set() if len(group) > 1 else {1}))
            models = {STANDARD: standard} | {str(size): connect(standard, block_size=size) for size in sizes}
            models |= {f"{EAGER}{size}": connect(standard, "eager", block_size=size) for size in sizes}
            ways = prefill(models, token_ids(standard.config, shape["tokens"], 1, setting.device))
            times = interleave({COPY: partial(target.copy_, source)} | dict(ways), setting)
            for size in sizes:
                by_way = {"standard": times[STANDARD], "ours": times[str(size)], COPY: times[COPY]}
                by_way["ours eager"] = times[f"{EAGER}{size}"]
                row = {"panel": panel} | shape | {"block_size": size}
                row |= compare(by_way, {f"{way} / standard": (way, "standard") for way in ("ours", "ours eager")})
                yield row | {"predicted": predicted(row)}
            del models, ways, standard
            gc.collect()


def traffic(sublayers: int, block_size: int) -> float:
    """Return the values moved per token and sublayer, in units of the width (the paper's Table 1)."""
    if block_size == 1:  # Full reads in groups of the best size
        return min(size + math.ceil(sublayers / size) for size in range(1, sublayers + 1))
    return math.ceil(sublayers / block_size) / block_size + 5


def predicted(row: dict) -> float:
    """Return the ratio to the standard model that memory traffic alone predicts for a measured row."""
    sublayers = 2 * row["layers"]
    added = traffic(sublayers, row["block_size"]) - RESIDUAL_TRAFFIC
    moved = added * sublayers * row["tokens"] * row["width"] * 4
    bytes_per_second = 2 * COPY_BYTES / row["seconds"][COPY]["median"]
    return 1 + moved / bytes_per_second / row["seconds"]["standard"]["median"]


def tables(rows: list[dict]) -> dict[str, Table]:
    """Return the table of all rows, by its name in the README."""
    keys = ["layers", "width", "tokens", "block_size"]
    return {
        "scaling": make_table(
            "Prefill / standard, and by the paper's traffic model",
            ["panel", "layers", "width", "tokens", "S", "ours / standard", "predicted", "ours eager / standard"],
            [
                [
                    *(row["panel"], *(row[key] for key in keys), cell(row, "ours / standard", 3)),
                    *(f"{row['predicted']:.3f}", cell(row, "ours eager / standard", 3)),
                ]
                for row in rows
            ],
        )
    }


LABELS = {"layers": "decoder layers", "block_size": "block size S", "width": "hidden size", "tokens": "tokens"}
COLOURS = {False: "C0", True: "C1"}  # Block, Full


def plot(rows: list[dict], path: Path) -> None:
    """Draw one panel per varied size, measured (with quartiles) and predicted, into a PNG file."""
    from attnres.utils.drawing import column, finish, styled  # matplotlib is in an extra

    finish(styled(_draw)(column(4), rows), path)


def _draw(figure: "Drawing", rows: list[dict]) -> "Drawing":
    """Fill the figure of `plot`, and return it."""
    from attnres.utils.drawing import SMALL

    panels = figure.subplots(2, 2, sharey=True)
    for axes, panel in zip(panels.flat, LABELS):
        chosen = [row for row in rows if row["panel"] == panel]
        for is_full in (False, True):
            line = [row for row in chosen if panel == "block_size" or (row["block_size"] == 1) == is_full]
            if line and not (panel == "block_size" and is_full):
                _draw_line(axes, panel, line, is_full)
        axes.set_xscale("log", base=2)
        ticks = sorted({row[panel] for row in chosen})
        blocks = {row[panel]: math.ceil(2 * row["layers"] / row["block_size"]) for row in chosen}
        names = [f"{tick}\nN={blocks[tick]}" if panel == "block_size" else str(tick) for tick in ticks]
        axes.set_xticks(ticks, names)
        axes.minorticks_off()
        fixed = (f"{chosen[0][key]} {LABELS[key]}" for key in ("layers", "width", "tokens") if key != panel)
        axes.set_title(", ".join(fixed).replace("decoder ", "").replace("hidden size", "wide"), fontsize=SMALL)
        axes.set_xlabel(LABELS[panel])
        axes.grid(alpha=0.3)
    figure.supylabel("time added to prefill (%)", fontsize="medium")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return figure


def _draw_line(axes: "Axes", panel: str, line: list[dict], is_full: bool) -> None:
    """Draw the measured and the predicted line of Full or Block."""
    line = sorted(line, key=lambda row: row[panel])
    x, ratios = [row[panel] for row in line], [row["ratios"]["ours / standard"] for row in line]
    y = [percent(ratio["median"]) for ratio in ratios]
    spread = [[100 * abs(ratio[end] - ratio["median"]) for ratio in ratios] for end in ("low", "high")]
    name = "Full" if is_full else f"Block, S={line[0]['block_size']}"
    style = {"color": COLOURS[is_full]}
    axes.errorbar(x, y, spread, marker="o", markersize=4, capsize=2, label=f"{name}: measured", **style)
    axes.plot(x, [percent(row["predicted"]) for row in line], "--", label=f"{name}: traffic model", **style)


def percent(ratio: float) -> float:
    """Return how many percent a ratio adds."""
    return 100 * (ratio - 1)
