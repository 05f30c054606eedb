"""One aggregation: `attnres.depth_attention` against its peers and against the memory's speed.

The bound is the traffic that no implementation can avoid, at the speed of `copy_` on buffers of that size, measured in
turn with the rest. With sources of E elements, and a copy of E elements moving 2E:

    forward             read n sources, write the result                               (n + 1) E
    forward+backward    and read n sources, read the gradient, write n gradients       (3n + 2) E
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from rich.table import Table
from torch import Tensor

from attnres import depth_attention

from .peers import PEERS, Peer, compiled_reference, gpu_peers
from .report import cell, make_table, verdict
from .timing import Setting, Ways, compare, interleave

COMPILED = "torch.compile"
OURS, BOUND = "ours", "bound"
TARGET, TARGET_FROM_WIDTH = 1.5, 1024  # of ours / bound


@dataclass(frozen=True)
class Grid:
    """Every source has `elements` values, so that each row moves the same memory for each of its sources."""

    sources: tuple[int, ...] = (2, 5, 9, 17)
    widths: tuple[int, ...] = (512, 1024, 2048, 4096)
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    elements: int = 2**19


QUICK = Grid(sources=(2,), widths=(64,), elements=2**12)


def grid(setting: Setting) -> Grid:
    return QUICK if setting.quick else Grid() if setting.device == "cpu" else Grid(elements=2**24)


def measure(setting: Setting) -> Iterator[dict]:
    """A row for each pass, dtype, width and number of sources."""
    sizes = grid(setting)
    for dtype in sizes.dtypes:
        for width in sizes.widths:
            for n in sizes.sources:
                inputs = Inputs(n, width, sizes.elements // width, getattr(torch, dtype), setting.device)
                # Both passes of one compilation, before the next one resets it.
                peers = PEERS | gpu_peers() | {COMPILED: compiled_reference()}
                for name, ways in (("forward", forward), ("forward+backward", forward_and_backward)):
                    row = {
                        "pass": name,
                        "dtype": dtype,
                        "width": width,
                        "sources": n,
                        "tokens": sizes.elements // width,
                    }
                    yield row | _compare(ways(inputs, peers), setting)


class Inputs:
    """Random arguments of one aggregation, and buffers for copies as large as the memory it moves."""

    def __init__(self, n: int, width: int, tokens: int, dtype: torch.dtype, device: str):
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()

        self.sources = [random(tokens, width) for _ in range(n)]
        # Logits of the size of one: far larger ones leave the weight to one source, and others to denormal numbers.
        self.query = (random(width) / width**0.5).detach().requires_grad_()
        self.key_norm_weight, self.grad = random(width), random(tokens, width).detach()
        self.eps = 1e-6
        self.moved = {"forward": (n + 1) * tokens * width, "backward": (2 * n + 1) * tokens * width}
        # Written to: pages that never were are all the same one, and reading it takes no time.
        self.copy_from, self.copy_to = torch.ones(2, self.moved["backward"] // 2, dtype=dtype, device=device)

    def call(self, function: Peer) -> Tensor:
        return function(self.query, self.sources, self.key_norm_weight, self.eps)

    def copy(self, direction: str) -> None:
        """Move as many bytes as that direction of the aggregation has to."""
        half = self.moved[direction] // 2
        self.copy_to[:half].copy_(self.copy_from[:half])


def forward(inputs: Inputs, peers: dict[str, Peer]) -> Ways:
    functions = {OURS: depth_attention} | peers
    return {BOUND: partial(inputs.copy, "forward")} | {
        name: torch.no_grad()(partial(inputs.call, function)) for name, function in functions.items()
    }


def forward_and_backward(inputs: Inputs, peers: dict[str, Peer]) -> Ways:
    leaves = [inputs.query, inputs.key_norm_weight, *inputs.sources]

    def step(function: Peer) -> None:
        result = inputs.call(function)
        grad = inputs.grad.to(result.dtype)  # a library's result is always bfloat16
        torch.autograd.grad(result, leaves, grad, allow_unused=True)

    def copy() -> None:
        inputs.copy("forward")
        inputs.copy("backward")

    functions = {OURS: depth_attention} | peers
    return {BOUND: copy} | {name: partial(step, function) for name, function in functions.items()}


def _compare(ways: Ways, setting: Setting) -> dict:
    runnable, missing = dict(ways), {}
    for name in ways.keys() - PEERS.keys() - {OURS, BOUND}:
        try:
            ways[name]()
        except Exception as error:  # no C++ compiler; a library that is not here, or does not take the shape
            del runnable[name]
            missing[name] = next(iter(str(error).splitlines()), type(error).__name__)
    times = interleave(runnable, setting)
    pairs = {"ours / bound": (OURS, BOUND)}
    pairs |= {f"{name} / ours": (name, OURS) for name in runnable if name not in (OURS, BOUND)}
    return compare(times, pairs) | ({"missing": missing} if missing else {})


def tables(rows: list[dict]) -> dict[str, Table]:
    """A table for each dtype and pass."""
    ratios = list(dict.fromkeys(name for row in rows for name in row["ratios"]))
    kinds = dict.fromkeys((row["pass"], row["dtype"]) for row in rows)
    found = {}
    for name, dtype in sorted(kinds, key=lambda kind: kind[1] != "float32"):
        chosen = [row for row in rows if (row["pass"], row["dtype"]) == (name, dtype)]
        fastest = sum(all(row["ratios"][ratio]["median"] > 1 for ratio in peers_of(row)) for row in chosen)
        notes = [f"Ours is the fastest in {fastest} of {len(chosen)} rows."]
        notes += sorted(
            {f"{peer} did not run: {why}" for row in chosen for peer, why in row.get("missing", {}).items()}
        )
        found[f"ops, {name}, {dtype}"] = make_table(
            f"One aggregation, {name}, {dtype}",
            ["d", "sources", "tokens", ratios[0], "target", *ratios[1:]],
            [
                [row["width"], row["sources"], row["tokens"], cell(row, ratios[0]), judge(row)]
                + [cell(row, ratio) for ratio in ratios[1:]]
                for row in chosen
            ],
            note=" ".join(notes),
        )
    return found


def peers_of(row: dict) -> list[str]:
    return [ratio for ratio in row["ratios"] if ratio.endswith(f" / {OURS}")]


def judge(row: dict) -> str:
    ratio = row["ratios"][f"{OURS} / {BOUND}"]["median"]
    return verdict(ratio, TARGET) if row["width"] >= TARGET_FROM_WIDTH else "-"
