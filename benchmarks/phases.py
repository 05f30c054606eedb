"""Compare two-phase inference with one attention per sublayer, and check the rule that chooses between them.

It measures G sublayers of Full AttnRes. The first one reads n sources, and each later one reads one source more.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from attnres.accelerated.numba import call, kernels
from attnres.accelerated.phases import saves_readings
from attnres.functional_attnres import attend

from .stored import cell, markdown_table
from .timing import Setting, compare, interleave

TOKENS, WIDTH, EPS = 512, 1024, 1e-6
SOURCES, QUERIES = (2, 4, 8, 16, 32), (2, 4, 8)
# Bytes of all sources. Calls take them in turn, and they are so many that each comes from memory and not from a cache.
# In a model, the weights that are read between two sublayers have this effect.
POOL = 2**29
BOTH, EAGER = "two phases / one", "eager / one"


def measure(setting: Setting) -> Iterator[dict]:
    """Yield one row per number of sources and number of sublayers, in float32."""
    tokens, width, pool = (32, 64, 2**18) if setting.quick else (TOKENS, WIDTH, POOL)
    generator = torch.Generator().manual_seed(0)
    sources = torch.randn(pool // (4 * tokens * width), tokens, width, generator=generator).unbind()
    for n in SOURCES[:1] if setting.quick else SOURCES:
        for number in QUERIES[:1] if setting.quick else QUERIES:
            queries = torch.randn(number, width, generator=generator) / width**0.5
            sets = Sets(sources, n + number - 1)
            ways = {
                "one": lambda q=queries, n=n, sets=sets: one_by_one(q, n, sets.take()),
                "eager": lambda q=queries, n=n, sets=sets: one_by_one(q, n, sets.take(), "eager"),
                "two phases": lambda q=queries, n=n, sets=sets: in_two_phases(q, n, sets.take()),
            }
            with torch.no_grad():
                times = interleave(ways, setting)
            row = {"sources": n, "sublayers": number, "tokens": tokens, "width": width}
            yield (
                row
                | {"chosen": saves_readings(n, number)}
                | compare(times, {BOTH: ("two phases", "one"), EAGER: ("eager", "one")})
            )


class Sets:
    """A pool of sources. Each call takes other sources from it.

    Args:
        pool: all sources.
        size: number of sources of a call.
    """

    def __init__(self, pool: tuple[Tensor, ...], size: int):
        self.pool, self.size, self.start = pool, size, 0

    def take(self) -> tuple[Tensor, ...]:
        """Return the next sources. At the end of the pool, start again."""
        self.start = self.start + self.size if self.start + 2 * self.size <= len(self.pool) else 0
        return self.pool[self.start : self.start + self.size]


def one_by_one(queries: Tensor, n: int, sources: tuple[Tensor, ...], implementation: str = "auto") -> None:
    """Run one attention per query; the i-th one reads the first `n + i` sources."""
    for i, query in enumerate(queries):
        attend(query, sources[: n + i], None, EPS, True, implementation)


def in_two_phases(queries: Tensor, n: int, sources: tuple[Tensor, ...]) -> None:
    """Compute the same by one phase 1 over the first `n` sources, and one phase 2 per query."""
    taken = call.checked(sources)
    sums, statistics = kernels.phase_one(queries, EPS, call.checked(sources[:n]))
    for i, query in enumerate(queries):
        result = torch.empty_like(sources[0])
        fresh = taken._replace(addresses=taken.addresses[n : n + i], tensors=taken.tensors[n : n + i])
        call.forward(query, fresh, result, None, n + i, EPS, phase=(sums[i], statistics[i]))


def tables(rows: list[dict]) -> dict[str, str]:
    """Return the table of all rows, by its name in the README."""

    def judge(row: dict) -> str:
        return "two phases" if row["chosen"] else "one"

    is_faster = [(row["ratios"][BOTH]["median"] < 1) == row["chosen"] for row in rows]
    return {
        "phases": markdown_table(
            "Two phases against one attention for each sublayer",
            ["sources", "sublayers", BOTH, "the rule takes", EAGER],
            [[row["sources"], row["sublayers"], cell(row, BOTH), judge(row), cell(row, EAGER)] for row in rows],
            note=f"The rule takes the faster way in {sum(is_faster)} of {len(rows)} rows.",
        )
    }
