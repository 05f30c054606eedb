"""Compare one aggregation, `attnres.depth_attention`, with its peers and with the speed of the memory."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .aggregation import BOUND, OURS, Inputs, forward, forward_and_backward, runnable
from .peers import PEERS, compiled_reference
from .stored import cell, markdown_table, verdict
from .timing import Setting, Ways, compare, interleave

COMPILED = "torch.compile"
TARGET, TARGET_FROM_WIDTH = 1.5, 1024  # for ours / bound


@dataclass(frozen=True)
class Grid:
    """The sizes to measure. Every source has `elements` values, so each row moves the same memory per source."""

    sources: tuple[int, ...] = (2, 5, 9, 17)
    widths: tuple[int, ...] = (512, 1024, 2048, 4096)
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    elements: int = 2**19


QUICK = Grid(sources=(2,), widths=(64,), elements=2**12)


def measure(setting: Setting) -> Iterator[dict]:
    """Yield one row per pass, dtype, width and number of sources."""
    sizes = QUICK if setting.quick else Grid()
    for dtype in sizes.dtypes:
        for width in sizes.widths:
            for n in sizes.sources:
                inputs = Inputs(n, width, sizes.elements // width, getattr(torch, dtype), setting.device)
                # Both passes share a compilation, which the next size resets.
                peers = PEERS | {COMPILED: compiled_reference()}
                for name, ways in (("forward", forward), ("forward+backward", forward_and_backward)):
                    row = {
                        "pass": name,
                        "dtype": dtype,
                        "width": width,
                        "sources": n,
                        "tokens": sizes.elements // width,
                    }
                    yield row | _compare(ways(inputs, peers), setting)


def _compare(ways: Ways, setting: Setting) -> dict:
    working, missing = runnable(ways)
    times = interleave(working, setting)
    pairs = {"ours / bound": (OURS, BOUND)}
    pairs |= {f"{name} / ours": (name, OURS) for name in working if name not in (OURS, BOUND)}
    return compare(times, pairs) | ({"missing": missing} if missing else {})


def tables(rows: list[dict]) -> dict[str, str]:
    """Return a table per dtype and pass, by its name in the README."""
    ratios = list(dict.fromkeys(name for row in rows for name in row["ratios"]))
    kinds = dict.fromkeys((row["pass"], row["dtype"]) for row in rows)
    tables = {}
    for name, dtype in sorted(kinds, key=lambda kind: kind[1] != "float32"):
        chosen = [row for row in rows if (row["pass"], row["dtype"]) == (name, dtype)]
        fastest = sum(all(row["ratios"][ratio]["median"] > 1 for ratio in peers_of(row)) for row in chosen)
        notes = [f"Ours is the fastest in {fastest} of {len(chosen)} rows."]
        notes += sorted(
            {f"{peer} did not run: {why}" for row in chosen for peer, why in row.get("missing", {}).items()}
        )
        tables[f"ops, {name}, {dtype}"] = markdown_table(
            f"One aggregation, {name}, {dtype}",
            ["d", "sources", "tokens", ratios[0], "target", *ratios[1:]],
            [
                [row["width"], row["sources"], row["tokens"], cell(row, ratios[0]), judge(row)]
                + [cell(row, ratio) for ratio in ratios[1:]]
                for row in chosen
            ],
            note=" ".join(notes),
        )
    return tables


def peers_of(row: dict) -> list[str]:
    """Return the names of the ratios of peers to ours in a row."""
    return [ratio for ratio in row["ratios"] if ratio.endswith(f" / {OURS}")]


def judge(row: dict) -> str:
    """Return whether ours meets the target, or `-` if there is no target for the width."""
    ratio = row["ratios"][f"{OURS} / {BOUND}"]["median"]
    return verdict(ratio, TARGET) if row["width"] >= TARGET_FROM_WIDTH else "-"
