"""Measure one aggregation on a GPU by the kernels of libraries, in turn with ours.

Some of the libraries tune themselves for a minute at their first call.
"""

from collections.abc import Iterator

from . import gpu_ops
from .clock import Clock
from .peers import gpu_peers


def measure(device: str, quick: bool, clock: Clock) -> Iterator[dict]:
    """Yield the rows of `gpu_ops`, with the installed libraries."""
    return gpu_ops.measure(device, quick, clock, gpu_peers())


def table(rows: list[dict]) -> tuple[str, list[str], list[list[str]], str]:
    """Return title, columns, cells and note of the table."""
    _, columns, cells, note = gpu_ops.table(rows)
    return "One aggregation, bfloat16, and the kernels of libraries", columns, cells, note
