"""One aggregation on a GPU, in bfloat16: against a copy of what it must move; `gpu_libraries` adds other kernels.

What is timed are replays of CUDA graphs: the GPU's own time, not that of Python, which launches a kernel in more time
than a small one takes. Models in eager mode (`gpu_models`) pay that too.
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
ELEMENTS = 2**24  # of each source: all of them are far larger than the caches
# Sources of one number are together: libraries tune their kernels for each number and width.
SOURCES, WIDTHS = (5, 9, 17, 2), (1024, 2048)
PASSES = {"forward": forward, "forward+backward": forward_and_backward}


def measure(device: str, quick: bool, clock: Clock, peers: Mapping[str, Peer] | None = None) -> Iterator[dict]:
    """A row for each pass, width and number of sources: of ours and, where they are given, those of the peers."""
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
            found, missing = replayed(ways(inputs, peers or {}), device)
            times = interleave(found, setting, most_seconds=seconds / 2)
            pairs = {f"{OURS} / {BOUND}": (OURS, BOUND)}
            pairs |= {f"{peer} / {OURS}": (peer, OURS) for peer in found if peer not in (OURS, BOUND)}
            yield row | compare(times, pairs) | {"missing": missing}


def replayed(ways: Ways, device: str) -> tuple[Ways, dict[str, str]]:
    """The ways that run, each as a CUDA graph on a GPU, and of the others the first line of why not."""
    found, missing = runnable(ways)
    if device == "cpu":
        return found, missing
    return {name: graphed(way) for name, way in found.items()}, missing


def table(rows: list[dict]) -> tuple[str, list[str], list[list[str]], str]:
    """Title, columns, cells and note. A library that is faster than ours in a row is a target missed."""
    done = [row for row in rows if "ratios" in row]
    bound, own = f"{OURS} / {BOUND}", {f"{OURS} / {BOUND}", f"{EAGER} / {OURS}"}
    peers = [name for name in dict.fromkeys(name for row in done for name in row["ratios"]) if name not in own]
    columns = ["pass", "d", "sources", "tokens", bound, "target", f"{EAGER} / {OURS}"]
    cells = []
    for row in done:
        line = [row["pass"], *(str(row[key]) for key in ("width", "sources", "tokens")), cell(row, bound)]
        line += [verdict(row["ratios"][bound]["median"], TARGET), cell(row, f"{EAGER} / {OURS}")]
        for peer in peers:
            is_there = peer in row["ratios"]
            line += [cell(row, peer), verdict(row["ratios"][peer]["median"], 1, at_least=True) if is_there else "-"]
        cells.append(line)
    missing = sorted({f"{peer} did not run: {why}." for row in rows for peer, why in row.get("missing", {}).items()})
    columns += [column for peer in peers for column in (peer, "target")]
    return "One aggregation, bfloat16", columns, cells, " ".join(missing)
