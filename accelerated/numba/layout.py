"""Layout of the loops' arguments in an array of 64-bit numbers. Python and the compiled code use the same names.

    Call, then the addresses of one of `Forward`, `PhaseOne` and `Backward`, then the addresses of the sources
    Call, then `SiTU`, `SiTUGrads`, `PackedProduct` or `Unpacked`; there are no sources

In a backward pass, the addresses of the sources' gradients and of the later gradients follow. An address of zero means
that there is no tensor. The compiled side raises if `magic` or the number of addresses is not as it was compiled for.
"""

import zlib
from typing import NamedTuple


class Call(NamedTuple):
    """The first numbers of every call. `number` is the result's multiplier, or in phase one the number of queries.

    SiTU has neither sources nor this number; both are 0. With packed weights it is the number of vectors.
    """

    magic: int
    addresses: int  # how many follow
    tokens: int
    width: int
    sources: int
    number: int
    item: int  # bytes of a number in the sources


class Forward(NamedTuple):
    """Addresses of the tensors of `call.forward`.

    `sums` and `statistics` are the results of phase one; `kept` is for the backward pass.
    """

    query: int
    result: int
    weights: int
    norm_weight: int
    sums: int
    statistics: int
    kept: int


class PhaseOne(NamedTuple):
    """Addresses of the tensors of `call.phase_one`."""

    queries: int
    sums: int
    statistics: int


class Backward(NamedTuple):
    """Addresses of the tensors of `call.backward`; `grad_query` and `grad_norm` have a row for each chunk of tokens."""

    query: int
    grad: int
    grad_weights: int
    grad_query: int
    kept: int
    norm_weight: int
    grad_norm: int


class SiTU(NamedTuple):
    """Addresses of the tensors of `call.situ`, and the distances of rows in numbers."""

    gate: int
    up: int
    result: int
    gate_step: int
    up_step: int


class SiTUGrads(NamedTuple):
    """Addresses of the tensors of `call.situ_grads`, and the distances of rows in numbers."""

    gate: int
    up: int
    grad: int
    grad_gate: int
    grad_up: int
    gate_step: int
    up_step: int


class PackedProduct(NamedTuple):
    """Addresses of the tensors of `call.packed_product`. The rows are those of the weight, `width` is its columns."""

    codes: int
    scales: int
    vectors: int
    result: int


class Unpacked(NamedTuple):
    """Addresses of the tensors of `call.unpack`."""

    codes: int
    scales: int
    result: int


# Changes with every name and order above, so that machine code of another layout raises instead of misreading.
_PARTS = (Call, Forward, PhaseOne, Backward, SiTU, SiTUGrads, PackedProduct, Unpacked)
_LAYOUT = [(part.__name__, part._fields) for part in _PARTS]
MAGIC = zlib.crc32(repr(_LAYOUT).encode())

__all__ = ["MAGIC", "Backward", "Call", "Forward", "PackedProduct", "PhaseOne", "SiTU", "SiTUGrads", "Unpacked"]
