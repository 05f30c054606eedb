"""Layout of the compiled loops' arguments: an array of 64-bit numbers, by name for both sides of the call.

    Call, then the addresses of one of `Forward`, `PhaseOne` and `Backward`, then the addresses of the sources

(in a backward pass also those of the sources' gradients and of later gradients). An address of zero is no tensor. The
compiled side raises if the `magic` number or the number of addresses is another than it was compiled for.
"""

import zlib
from typing import NamedTuple


class Call(NamedTuple):
    """The first numbers of every call; `number` is the multiplier of the result, or phase one's number of queries."""

    magic: int
    addresses: int
    tokens: int
    width: int
    sources: int
    number: int
    item: int  # bytes of a source's number


class Forward(NamedTuple):
    """`query` and `weights` are of float32, `norm_weight` as the result; `sums` and `statistics` are phase one's."""

    query: int
    result: int
    weights: int
    norm_weight: int
    sums: int
    statistics: int


class PhaseOne(NamedTuple):
    """All three are of float32."""

    queries: int
    sums: int
    statistics: int


class Backward(NamedTuple):
    """`grad_query` has a row for each chunk of tokens."""

    query: int
    grad: int
    grad_weights: int
    grad_query: int


_LAYOUT = [(part.__name__, part._fields) for part in (Call, Forward, PhaseOne, Backward)]
MAGIC = zlib.crc32(repr(_LAYOUT).encode())

__all__ = ["MAGIC", "Backward", "Call", "Forward", "PhaseOne"]
