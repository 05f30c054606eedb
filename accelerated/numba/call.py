"""Validate every tensor before its address reaches a loop, and call the loops.

The loops expect a plain tensor in memory of the shape and dtype that the call is for, contiguous and with its storage.
The callers' frames hold the tensors until the loops return.
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
_TOKENS_IN_PARALLEL = 16  # fewer tokens are not worth waking other threads
_CHUNKS = 64


class Unfit(ValueError):
    """Raised for a tensor that the loops do not take; the message names the tensor and the reason."""


class Sources(NamedTuple):
    """Checked sources `[..., D]` of one shape and dtype: their addresses, and the tensors that own the memory."""

    addresses: list[int]
    tensors: list[Tensor]
    shape: torch.Size
    dtype: torch.dtype

    def after(self, number: int) -> "Sources":
        """Return all but the first `number` sources. The result may be empty."""
        return self._replace(addresses=self.addresses[number:], tensors=self.tensors[number:])


def checked(sources: Sequence[Tensor]) -> Sources:
    """Check sources, and copy those that are not contiguous.

    Args:
        sources: at least one tensor `[..., D]`.

    Raises:
        Unfit: they are not plain tensors in memory of one shape, all in float32 or all in bfloat16.
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
    """Return why the loops do not take a tensor, whatever its shape and dtype; `None` if they do."""
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
    """Compute depth attention, and the norm after it if one is given, into memory that the caller has allocated.

    Args:
        query: `w * g`, `[D]` in float32.
        sources: the checked sources.
        result: `[..., D]` in the dtype of the sources; it is written.
        weights: `[n, ...]` in float32, or `None`; it is written.
        multiplier: the number of all sources for the scale `sum`, one for `mean`.
        eps: epsilon of the key norm.
        norm_weight: weight `[D]` of a plain RMSNorm in the dtype of the sources, or `None` for no norm.
        norm_eps: epsilon of that norm.
        phase: the query's part of the result of phase one for other sources. There are no weights then.

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
    """Compute phase one into memory that the caller has allocated; see [`kernels.phase_one`]. All is in float32.

    Args:
        queries: `[G, D]`.
        sources: the checked sources.
        sums: `[G, ..., D]`; it is written.
        statistics: `[G, ..., 2]`; it is written.
        eps: epsilon of the key norm.

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
    """Compute the gradients into memory that the caller has allocated.

    Args:
        query: `w * g`, `[D]` in float32.
        grad: gradient of the result, `[..., D]` in the dtype of the sources.
        grad_weights: gradient of the weights, `[n, ...]` in float32, or `None`.
        grad_query: `[chunks(shape), D]` in float32, zeros; the query's gradient is added, as the sum of the rows.
        sources: the checked sources.
        grad_sources: for each source `[..., D]` in its dtype, which is written, or `None` if it is not needed.
        later_grads: for each source a gradient of the same kind that is added to its own, or `None`.
        multiplier: the number of sources for the scale `sum`, one for `mean`.
        eps: epsilon of the key norm.

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
    """Return the number of chunks that the tokens of `[..., D]` are divided into, for threads to take in turn.

    A single chunk, or none, is computed without threads.
    """
    return _chunks(_tokens(shape))


def _chunks(tokens: int) -> int:
    return min(_CHUNKS, -(-tokens // _TOKENS_IN_PARALLEL))


def _tokens(shape: torch.Size) -> int:
    return shape.numel() // shape[-1] if shape[-1] else 0


def _address(tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the address of a tensor's numbers, after all that the loops rely on has been checked."""
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
    # One argument, since `numba` looks at the type of each: for many that takes longer than a token's depth attention.
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
