"""The one place where addresses leave Python: each of a tensor that has just been found to be what the loops expect.

That is: a plain tensor in memory, of the shape and dtype that the call is for, its numbers in a row and its storage
there. The callers' frames hold the tensors until the loops return.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..tensors import PLAIN
from . import engine
from .layout import MAGIC, Backward, Call, Forward, PhaseOne

SERVED = (torch.float32, torch.bfloat16)
_TOKENS_IN_PARALLEL = 16  # fewer are not worth waking other threads
_CHUNKS = 64


class Unfit(ValueError):
    """A tensor is not what the loops take; says which, and why."""


class Sources(NamedTuple):
    """Sources `[..., D]` that have been checked, all alike: the addresses of their rows, and what holds the rows."""

    addresses: list[int]
    tensors: list[Tensor]
    shape: torch.Size
    dtype: torch.dtype

    def after(self, number: int) -> "Sources":
        """Without the first of them; those that are left need not be any."""
        return self._replace(addresses=self.addresses[number:], tensors=self.tensors[number:])


def checked(sources: Sequence[Tensor]) -> Sources:
    """At least one source; copied where its numbers are not in a row.

    Raises:
        Unfit: they are not plain tensors in memory, all of one shape, and of float32 or of bfloat16.
    """
    addresses, tensors = [], []
    shape, dtype = sources[0].shape, sources[0].dtype
    if dtype not in SERVED or not shape:
        raise Unfit(f"the sources are {_described(sources[0])}, not [..., D] in float32 or bfloat16")
    for source in sources:
        try:
            address = _address(source, shape, dtype)
        except Unfit:
            if unfit(source) or source.shape != shape:
                raise
            source = source.contiguous().resolve_neg()
            address = _address(source, shape, dtype)
        addresses.append(address)
        tensors.append(source)
    return Sources(addresses, tensors, shape, dtype)


def unfit(tensor: Tensor) -> str | None:
    """Why the loops do not take a tensor, whatever its shape and dtype; `None` if they do."""
    if type(tensor) not in PLAIN:
        return f"a tensor is a {type(tensor).__name__}"
    if not tensor.is_cpu:
        return f"a tensor is on {tensor.device}, not in memory"
    if tensor.layout is not torch.strided:
        return f"a tensor is laid out as {tensor.layout}"
    return None


def forward(
    query: Tensor,
    sources: Sources,
    result: Tensor,
    weights: Tensor | None,
    multiplier: int,
    eps: float,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    phase: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Write the `result` `[..., D]`, or what a norm makes of it, and the `weights` `[n, ...]`.

    Args:
        query: `w * g`, `[D]` in float32.
        multiplier: the number of all sources for the scale `sum`, one for `mean`.
        norm_weight: weight `[D]` of a plain RMSNorm, in the dtype of the sources.
        phase: the query's part of what phase one returned for other sources; there are no weights then.

    Raises:
        Unfit: a tensor is not of these shapes and dtypes, contiguous, and in memory.
    """
    shape, dtype = sources.shape, sources.dtype
    tokens, width = shape[:-1], shape[-1:]
    if phase is None:
        sums = statistics = 0
        if not sources.addresses:
            raise Unfit("there is no source")
    else:
        if weights is not None:
            raise Unfit("weights are asked for of sources that phase one has read")
        sums = _address(phase[0], shape, torch.float32)
        statistics = _address(phase[1], (*tokens, 2), torch.float32)
    # By place and not by name, which would take as long as a check.
    addresses = Forward(
        _address(query, width, torch.float32),
        _address(result, shape, dtype),
        0 if weights is None else _address(weights, (len(sources.addresses), *tokens), torch.float32),
        0 if norm_weight is None else _address(norm_weight, width, dtype),
        sums,
        statistics,
    )
    _run("forward", sources, multiplier, addresses, sources.addresses, eps, norm_eps)


def phase_one(queries: Tensor, sources: Sources, sums: Tensor, statistics: Tensor, eps: float) -> None:
    """Write `sums` `[G, ..., D]` and `statistics` `[G, ..., 2]` of the `queries` `[G, D]`, all in float32.

    Raises:
        Unfit: as for [`forward`].
    """
    shape, number = sources.shape, len(queries)
    if not sources.addresses:
        raise Unfit("there is no source")
    addresses = PhaseOne(
        queries=_address(queries, (number, shape[-1]), torch.float32),
        sums=_address(sums, (number, *shape), torch.float32),
        statistics=_address(statistics, (number, *shape[:-1], 2), torch.float32),
    )
    _run("phase one", sources, number, addresses, sources.addresses, eps)


def backward(
    query: Tensor,
    grad: Tensor,
    grad_weights: Tensor | None,
    grad_query: Tensor,
    sources: Sources,
    grad_sources: Sequence[Tensor | None],
    later_grads: Sequence[Tensor | None],
    multiplier: int,
    eps: float,
) -> None:
    """Write `grad_sources`, `later_grads` included, where they are wanted; add the query's gradient to `grad_query`.

    Args:
        grad: `[..., D]` in the dtype of the sources, as `grad_sources` and `later_grads` are, one for each of them.
        grad_weights: `[n, ...]` in float32.
        grad_query: `[chunks(tokens), D]` in float32; the gradient is the sum of its rows.

    Raises:
        Unfit: as for [`forward`].
    """
    shape, dtype, n = sources.shape, sources.dtype, len(sources.addresses)
    if not n == len(grad_sources) == len(later_grads):
        raise Unfit(f"of {n} sources there are {len(grad_sources)} gradients and {len(later_grads)} later ones")
    addresses = Backward(
        query=_address(query, shape[-1:], torch.float32),
        grad=_address(grad, shape, dtype),
        grad_weights=0 if grad_weights is None else _address(grad_weights, (n, *shape[:-1]), torch.float32),
        grad_query=_address(grad_query, (chunks(shape), shape[-1]), torch.float32),
    )
    of_sources = [*sources.addresses]
    of_sources += [0 if tensor is None else _address(tensor, shape, dtype) for tensor in (*grad_sources, *later_grads)]
    _run("backward", sources, multiplier, addresses, of_sources, eps)


def chunks(shape: torch.Size) -> int:
    """Parts of the tokens of `[..., D]` that threads take one after another; one, or none, is done without them."""
    return _chunks(_tokens(shape))


def _chunks(tokens: int) -> int:
    return min(_CHUNKS, -(-tokens // _TOKENS_IN_PARALLEL))


def _tokens(shape: torch.Size) -> int:
    return shape.numel() // shape[-1] if shape[-1] else 0


def _address(tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> int:
    """Where the numbers of a tensor lie, which must be all that the loops rely on."""
    if (
        tensor.shape != shape
        or tensor.dtype is not dtype
        or type(tensor) not in PLAIN
        or not tensor.is_cpu
        or not tensor.is_contiguous()
        or tensor.is_neg()
    ):
        raise Unfit(f"a tensor is {_described(tensor)}, not {tuple(shape)} in {dtype}, contiguous and in memory")
    address = tensor.data_ptr()
    # Rows of bfloat16 may begin between two words.
    if (address == 0 and tensor.numel() > 0) or (address & 3 and address % dtype.itemsize):
        raise Unfit(f"the storage of a tensor, {_described(tensor)}, is freed or not aligned")
    return address


def _described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} in {tensor.dtype} on {tensor.device}"


def _run(
    loop: str,
    sources: Sources,
    number: int,
    addresses: Sequence[int],
    of_sources: Sequence[int],
    eps: float,
    norm_eps: float = 0.0,
) -> None:
    tokens, n, item = _tokens(sources.shape), len(sources.addresses), sources.dtype.itemsize
    # One argument: to look at the types of many takes longer than a token's depth attention.
    call = Call(MAGIC, len(addresses) + len(of_sources), tokens, sources.shape[-1], n, number, item)
    arguments = array("q", (*call, *addresses, *of_sources))
    engine.run(loop, _chunks(tokens), arguments.buffer_info()[0], eps, norm_eps, item)


__all__ = [
    "SERVED",
    "Sources",
    "Unfit",
    "backward",
    "checked",
    "chunks",
    "forward",
    "phase_one",
    "unfit",
]
