"""One aggregation on a GPU by the kernels of libraries, in turn with ours; some tune themselves for a minute."""

from collections.abc import Iterator

from . import gpu_ops
from .clock import Clock
from .peers import gpu_peers


def measure(device: str, quick: bool, clock: Clock) -> Iterator[dict]:
    """The rows of `gpu_ops`, with the libraries that are installed."""
    return gpu_ops.measure(device, quick, clock, gpu_peers())


def table(rows: list[dict]) -> tuple[str, list[str], list[list[str]], str]:
    """Title, columns, cells and note."""
    _, *rest = gpu_ops.table(rows)
    return "One aggregation, bfloat16, and the kernels of libraries", *rest
