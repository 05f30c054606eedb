"""Measure one aggregation on a GPU in bfloat16, against a copy of the memory that it must move.

Replays of CUDA graphs are timed. They show the GPU's time without Python's, which takes longer to launch a small kernel
than the kernel runs. Models in eager mode (`gpu_models`) pay for launches too. `gpu_libraries` adds other kernels.
"""

from collections.abc import Iterator, Mapping
from itertools import product

import torch

from .aggregation import BOUND, EAGER, OURS, Inputs, forward, forward_and_backward, runnable
from .clock import Clock
from .graphs import graphed
from .peers import Peer
from .stored import cell, verdict
from .timing import Setting, Ways, compare, interleave

TARGET = 1.3  # of ours / bound
ELEMENTS = 2**24  # values of each source, so that all sources are far larger than the caches
# Points with the same number of sources follow each other, because libraries tune their kernels per number and width.
SOURCES, WIDTHS = (5, 9, 17, 2), (1024, 2048)
PASSES = {"forward": forward, "forward+backward": forward_and_backward}


def measure(device: str, quick: bool, clock: Clock, peers: Mapping[str, Peer] | None = None) -> Iterator[dict]:
    """Yield one row per pass, width and number of sources.

    Args:
        device: where to measure.
        quick: take tiny sizes.
        clock: the budget of the part.
        peers: other functions to measure, by name.

    Yields:
        Times and ratios of ours and of the peers, and the reason for each way that is missing.
    """
    setting = Setting(repeats=2 if quick else 30, quick=quick, device=device)
    points = [(2, 64)] if quick else list(product(SOURCES, WIDTHS))
    for number, (n, width) in enumerate(points):
        tokens = 2**12 // width if quick else ELEMENTS // width
        inputs = None
        for name, ways in PASSES.items():
            row = {"pass": name, "dtype": "bfloat16", "width": width, "sources": n, "tokens": tokens}
            seconds = clock.row(len(PASSES) * (len(points) - number) - list(PASSES).index(name))
            if seconds is None:
                yield row | {"missing": {OURS: "out of time"}}
                continue
            inputs = inputs or Inputs(n, width, tokens, torch.bfloat16, device)
            working, missing = replayed(ways(inputs, peers or {}), device)
            times = interleave(working, setting, most_seconds=seconds / 2)
            pairs = {f"{OURS} / {BOUND}": (OURS, BOUND)}
            pairs |= {f"{peer} / {OURS}": (peer, OURS) for peer in working if peer not in (OURS, BOUND)}
            yield row | compare(times, pairs) | {"missing": missing}


def replayed(ways: Ways, device: str) -> tuple[Ways, dict[str, str]]:
    """Return the ways that run, each as a CUDA graph on a GPU, and for each other way the first line of its error."""
    working, missing = runnable(ways)
    if device == "cpu":
        return working, missing
    return {name: graphed(way) for name, way in working.items()}, missing


def table(rows: list[dict]) -> tuple[str, list[str], list[list[str]], str]:
    """Return title, columns, cells and note. A library that is faster than ours in a row is a missed target."""
    done = [row for row in rows if "ratios" in row]
    bound, eager = f"{OURS} / {BOUND}", f"{EAGER} / {OURS}"
    ratios = dict.fromkeys(name for row in done for name in row["ratios"])
    peers = [name for name in ratios if name not in (bound, eager)]
    columns = ["pass", "d", "sources", "tokens", bound, "target", eager]
    cells = []
    for row in done:
        line = [row["pass"], *(str(row[key]) for key in ("width", "sources", "tokens")), cell(row, bound)]
        line += [verdict(row["ratios"][bound]["median"], TARGET), cell(row, eager)]
        for peer in peers:
            is_there = peer in row["ratios"]
            line += [cell(row, peer), verdict(row["ratios"][peer]["median"], 1, at_least=True) if is_there else "-"]
        cells.append(line)
    missing = sorted({f"{peer} did not run: {why}." for row in rows for peer, why in row.get("missing", {}).items()})
    columns += [column for peer in peers for column in (peer, "target")]
    return "One aggregation, bfloat16", columns, cells, " ".join(missing)
