"""Compare tiles of the kernels on a GPU.

It measures one aggregation with the chosen tile and with others, against a copy of the memory that it moves.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch

from attnres.accelerated.triton import kernels_available, launch

from .aggregation import BOUND, Inputs
from .clock import Clock
from .gpu_ops import ELEMENTS, replayed
from .stored import cell
from .timing import Setting, compare, interleave

# Sources, width, dtype.
POINTS = [(5, 1024, "bfloat16"), (5, 2048, "bfloat16"), (8, 512, "float32")]
TILES, PER_THREAD, PROGRAMS = (512, 1024, 2048), (8, 16, 32), (1024, 2048, 4096)
CHOSEN = "chosen"


def measure(device: str, quick: bool, clock: Clock) -> Iterator[dict]:
    """Yield one row per point and pass. A tile is named `elements/elements per thread`, backward with `/programs`."""
    setting = Setting(repeats=2 if quick else 10, quick=quick, device=device)
    for number, (n, width, dtype) in enumerate(POINTS):
        row = {"sources": n, "width": width, "dtype": dtype}
        seconds = clock.row(len(POINTS) - number)
        if seconds is None or not kernels_available(device, width):
            yield row | {"missing": "out of time" if seconds is None else "the kernels do not run here"}
            continue
        inputs = Inputs(n, width, ELEMENTS // width, getattr(torch, dtype), device)
        with torch.no_grad():
            for name, ways in {"forward": forwards(inputs), "backward": backwards(inputs)}.items():
                working, missing = replayed({BOUND: partial(inputs.copy, name)} | ways, device)
                times = interleave(working, setting, most_seconds=seconds / 4)
                pairs = {way: (way, BOUND) for way in working if way != BOUND}
                yield row | {"pass": name} | compare(times, pairs) | {"missing": missing}


def forwards(inputs: Inputs) -> dict:
    """Return the ways of the forward pass, by the name of the tile."""

    def way(**chosen: Any) -> None:
        with patch.multiple(launch, **chosen):
            launch.forward(inputs.query, inputs.sources, inputs.eps, False)

    return {CHOSEN: way} | {
        f"{tile}/{each}": lambda tile=tile, each=each: way(_TILE=tile, _PER_THREAD=each)
        for tile, each in product(TILES, PER_THREAD)
    }


def backwards(inputs: Inputs) -> dict:
    """Return the ways of the backward pass, by the name of the tile."""
    saved = launch.forward(inputs.query, inputs.sources, inputs.eps, False)[1:]

    def way(**chosen: Any) -> None:
        with patch.multiple(launch, **chosen):
            launch.backward(inputs.grad, None, [], inputs.query, inputs.sources, *saved, False, True)

    return {CHOSEN: way} | {
        f"{tile}/{each}/{programs}": lambda chosen=(tile, each, programs): way(
            **dict(zip(("_TILE", "_PER_THREAD", "_PROGRAMS"), chosen))
        )
        for tile, each, programs in product(TILES, PER_THREAD, PROGRAMS)
    }


def table(rows: list[dict]) -> tuple[str, list[str], list[list[str]], str]:
    """Return title, columns, cells and note of a table with the chosen tile beside the best tile that was tried."""
    cells = []
    for row in rows:
        if "ratios" not in row:
            continue
        best = min(row["ratios"], key=lambda way: row["ratios"][way]["median"])
        about = [row["pass"], row["dtype"], str(row["width"]), str(row["sources"])]
        cells.append([*about, cell(row, CHOSEN), best, cell(row, best)])
    columns = ["pass", "dtype", "d", "sources", "chosen / bound", "best tile", "best / bound"]
    notes = dict.fromkeys(row["missing"] for row in rows if isinstance(row["missing"], str))
    return "Tiles: elements / of a thread / programs", columns, cells, " ".join(notes)
