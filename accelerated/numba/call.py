"""Validate every tensor before its address reaches a loop, and call the loops.

The loops expect plain tensors in memory, contiguous, not freed, and of the shapes and dtypes of the call. The callers'
frames hold the tensors until the loops return.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..tensors import PLAIN
from . import engine
from .layout import MAGIC, Backward, Call, Forward, PackedProduct, PhaseOne, SiTU, SiTUGrads, Unpacked

DTYPES = (torch.float32, torch.bfloat16)
_TOKENS_IN_PARALLEL = 16  # fewer tokens are not worth waking other threads
_CHUNKS = 64


class Unfit(ValueError):
    """Raised for tensors that the loops do not take; the message describes the tensor and what is expected."""


class CheckedSources(NamedTuple):
    """Checked sources `[..., D]` of one shape and dtype: their addresses, and the tensors that own the memory."""

    addresses: list[int]
    tensors: list[Tensor]
    shape: torch.Size
    dtype: torch.dtype

    def after(self, number: int) -> "CheckedSources":
        """Return all but the first `number` sources. The result may be empty."""
        return self._replace(addresses=self.addresses[number:], tensors=self.tensors[number:])


def checked(sources: Sequence[Tensor]) -> CheckedSources:
    """Check sources, and copy those that are not contiguous.

    Args:
        sources: at least one tensor `[..., D]`.

    Raises:
        Unfit: the sources are not plain tensors in memory of one shape, all in float32 or all in bfloat16.
    """
    addresses, tensors = [], []
    shape, dtype = sources[0].shape, sources[0].dtype
    if dtype not in DTYPES or not shape:
        raise Unfit(f"the sources must be [..., D] in float32 or bfloat16, got {_described(sources[0])}")
    for source in sources:
        try:
            address = _address(source, shape, dtype)
        except Unfit:
            # A copy helps only a tensor that is not contiguous or has a pending negation.
            if why_unfit(source) or source.shape != shape:
                raise
            source = source.contiguous().resolve_neg()
            address = _address(source, shape, dtype)
        addresses.append(address)
        tensors.append(source)
    return CheckedSources(addresses, tensors, shape, dtype)


def why_unfit(tensor: Tensor) -> str | None:
    """Return why the loops do not take a tensor, whatever its shape and dtype; `None` if they do."""
    if type(tensor) not in PLAIN:
        return f"a tensor is a {type(tensor).__name__}"
    if not tensor.is_cpu:
        return f"a tensor is on {tensor.device}, not in memory"
    if tensor.layout is not torch.strided:
        return f"a tensor has the layout {tensor.layout}"
    return None


def forward(
    query: Tensor,
    sources: CheckedSources,
    result: Tensor,
    weights: Tensor | None,
    multiplier: int,
    eps: float,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    phase: tuple[Tensor, ...] | None = None,
    kept: Tensor | None = None,
) -> None:
    """Compute depth attention, and the norm after it if one is given, into memory that the caller has allocated.

    Args:
        query: `w * g`, `[D]` in float32.
        sources: the checked sources.
        result: `[..., D]` in the dtype of the sources; it is written.
        weights: `[n, ...]` in float32, or `None`; it is written.
        multiplier: the number of all sources, also those of phase one, for the scale `sum`; 1 for `mean`.
        eps: epsilon of the key norm.
        norm_weight: weight `[D]` of a plain RMSNorm in the dtype of the sources, or `None` for no norm.
        norm_eps: epsilon of that norm.
        phase: sums `[..., D]` and statistics `[..., 2]` of phase one over earlier sources, in float32, from which this
            call continues. `weights` and `kept` must be `None` then.
        kept: `[..., kept_size(n)]` in float32, or `None`; it is written, for [`backward`].

    Raises:
        Unfit: a tensor has another shape or dtype, is not contiguous, or is not in memory.
    """
    shape, dtype = sources.shape, sources.dtype
    tokens, width = shape[:-1], shape[-1:]
    if phase is None:
        sums = statistics = 0
        if not sources.addresses:
            raise Unfit("there must be at least one source")
    else:
        if weights is not None or kept is not None:
            raise Unfit("`weights` and `kept` must be `None` after phase one, which has them of its sources only")
        sums = _address(phase[0], shape, torch.float32)
        statistics = _address(phase[1], (*tokens, 2), torch.float32)
    # Without keywords, which would take as long as a check. This call is the one that decoding repeats.
    addresses = Forward(
        _address(query, width, torch.float32),
        _address(result, shape, dtype),
        0 if weights is None else _address(weights, (len(sources.addresses), *tokens), torch.float32),
        0 if norm_weight is None else _address(norm_weight, width, dtype),
        sums,
        statistics,
        0 if kept is None else _address(kept, (*tokens, kept_size(len(sources.addresses))), torch.float32),
    )
    places = (*addresses, *sources.addresses)
    _run("forward", shape, dtype, len(sources.addresses), multiplier, places, eps, norm_eps)


class FewTokens:
    """Arguments that [`read_few`] needs of all reads in a pass.

    Args:
        queries: `w * g` of each read, `[reads, D]` in float32.
        shape: the shape of all sources and results, `[..., D]`.
        dtype: their dtype, float32 or bfloat16.

    Raises:
        Unfit: as for [`forward`].
    """

    def __init__(self, queries: Tensor, shape: torch.Size, dtype: torch.dtype):
        self.queries, self.shape, self.dtype = queries, shape, dtype
        self.query_address = _address(queries, (len(queries), shape[-1]), torch.float32)
        self.query_step = queries.stride(0) * queries.itemsize
        self.norm_shape = shape[-1:]


def read_few(
    few: FewTokens,
    position: int,
    sources: Sequence[Tensor],
    result: Tensor,
    is_sum: bool,
    eps: float,
    norm_weight: Tensor | None,
    norm_eps: float,
) -> bool | None:
    """Compute the same as [`checked`] and [`forward`], in one function.

    In decoding, the weights of each sublayer push Python's code and objects out of the processor's caches. Then each
    function and each object costs a wait for memory, and [`forward`] takes three times as long as in a loop. So this
    function calls few others.

    Args:
        few: the arguments of all reads.
        position: index of the query.
        sources: at least one source.
        result: like the sources, contiguous; it is written.
        is_sum: whether the scale is `sum`.
        eps: epsilon of the key norm.
        norm_weight: weight `[D]` of a plain RMSNorm, or `None` for no norm.
        norm_eps: epsilon of that norm.

    Returns:
        Whether the norm is applied, or `None` if the sources are not all of the shape and dtype of `few` and ready for
        the loop; then nothing is written.
    """
    shape, dtype = few.shape, few.dtype
    addresses = []
    for tensor in (result, *sources):
        # As `_address`.
        if (
            tensor.shape != shape
            or tensor.dtype is not dtype
            or type(tensor) not in PLAIN
            or not tensor.is_cpu
            or not tensor.is_contiguous()
            or tensor.is_neg()
        ):
            return None
        address = tensor.data_ptr()
        if address == 0 or (address & 3 and address % dtype.itemsize):
            return None
        addresses.append(address)
    norm_address = 0
    if (
        norm_weight is not None
        and norm_weight.shape == few.norm_shape
        and norm_weight.dtype is dtype
        and norm_weight.is_cpu
        and norm_weight.is_contiguous()
        and not norm_weight.is_neg()
    ):
        norm_address = norm_weight.data_ptr()
    n = len(sources)
    tokens = shape.numel() // shape[-1]
    call = MAGIC, len(Forward._fields) + n, tokens, shape[-1], n, n if is_sum else 1, dtype.itemsize
    query = few.query_address + position * few.query_step
    # `Call`, `Forward` and the sources. The variable holds the memory until the loop returns.
    numbers = array("q", (*call, query, addresses[0], 0, norm_address, 0, 0, 0, *addresses[1:]))
    engine.run("forward", _chunks(tokens), numbers.buffer_info()[0], eps, norm_eps, dtype.itemsize)
    return norm_address != 0


def phase_one(queries: Tensor, sources: CheckedSources, sums: Tensor, statistics: Tensor, eps: float) -> None:
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
        raise Unfit("there must be at least one source")
    addresses = PhaseOne(
        queries=_address(queries, (number, shape[-1]), torch.float32),
        sums=_address(sums, (number, *shape), torch.float32),
        statistics=_address(statistics, (number, *shape[:-1], 2), torch.float32),
    )
    places = (*addresses, *sources.addresses)
    _run("phase one", shape, sources.dtype, len(sources.addresses), number, places, eps)


def backward(
    query: Tensor,
    grad: Tensor,
    grad_weights: Tensor | None,
    grad_query: Tensor,
    sources: CheckedSources,
    grad_sources: Sequence[Tensor | None],
    later_grads: Sequence[Tensor | None],
    multiplier: int,
    kept: Tensor,
    norm_weight: Tensor | None = None,
    grad_norm: Tensor | None = None,
) -> None:
    """Compute the gradients into memory that the caller has allocated.

    Args:
        query: `w * g`, `[D]` in float32.
        grad: gradient of the result, `[..., D]` in the dtype of the sources.
        grad_weights: gradient of the weights, `[n, ...]` in float32, or `None`.
        grad_query: `[chunks(shape), D]` in float32, zeros. The call adds to it; the sum of the rows is the gradient.
        sources: the checked sources.
        grad_sources: for each source `[..., D]` in its dtype, which is written, or `None` if it is not needed.
        later_grads: for each source a gradient like these, which is added, or `None`.
        multiplier: the number of sources for the scale `sum`, 1 for `mean`.
        kept: what [`forward`] has kept.
        norm_weight: the weight that [`forward`] got.
        grad_norm: like `grad_query`, for the gradient of that weight; `None` without a norm.

    Raises:
        Unfit: as for [`forward`].
    """
    shape, dtype, n = sources.shape, sources.dtype, len(sources.addresses)
    if not n == len(grad_sources) == len(later_grads):
        raise Unfit(
            f"expected {n} gradients and {n} later gradients, one per source, got {len(grad_sources)} and "
            f"{len(later_grads)}"
        )
    if (norm_weight is None) != (grad_norm is None):
        raise Unfit("`norm_weight` and `grad_norm` must be given together")
    tokens, width = shape[:-1], shape[-1:]
    rows = (chunks(shape), *width)
    addresses = Backward(
        query=_address(query, width, torch.float32),
        grad=_address(grad, shape, dtype),
        grad_weights=0 if grad_weights is None else _address(grad_weights, (n, *tokens), torch.float32),
        grad_query=_address(grad_query, rows, torch.float32),
        kept=_address(kept, (*tokens, kept_size(n)), torch.float32),
        norm_weight=0 if norm_weight is None else _address(norm_weight, width, dtype),
        grad_norm=0 if grad_norm is None else _address(grad_norm, rows, torch.float32),
    )
    grads = (0 if tensor is None else _address(tensor, shape, dtype) for tensor in (*grad_sources, *later_grads))
    _run("backward", shape, dtype, n, multiplier, (*addresses, *sources.addresses, *grads), 0.0)


def situ(gate: Tensor, up: Tensor, result: Tensor, beta: float, linear_beta: float | None) -> None:
    """Compute SiTU into memory that the caller has allocated.

    Args:
        gate: `[..., width]` in float32 or bfloat16. If it has two dimensions, its rows may lie apart, as halves of
            longer rows do.
        up: as `gate`, of the same shape and dtype.
        result: `[..., width]`, contiguous; it is written.
        beta: bound of the gate.
        linear_beta: bound of the up projection, or `None`.

    Raises:
        Unfit: as for [`forward`].
    """
    shape, dtype = gate.shape, gate.dtype
    (gate_rows, gate_step), (up_rows, up_step) = _rows(gate, shape, dtype), _rows(up, shape, dtype)
    places = SiTU(gate_rows, up_rows, _address(result, shape, dtype), gate_step, up_step)
    _run("situ", shape, dtype, 0, 0, places, beta, linear_beta or 0.0)  # to the loop, 0 is no `linear_beta`


def situ_grads(
    gate: Tensor,
    up: Tensor,
    grad: Tensor,
    grad_gate: Tensor,
    grad_up: Tensor,
    beta: float,
    linear_beta: float | None,
) -> None:
    """Compute the gradients of SiTU into memory that the caller has allocated.

    Args:
        gate: as for [`situ`].
        up: as for [`situ`].
        grad: gradient of the result, like the result of [`situ`].
        grad_gate: like `grad`; it is written.
        grad_up: like `grad`; it is written.
        beta: bound of the gate.
        linear_beta: bound of the up projection, or `None`.

    Raises:
        Unfit: as for [`forward`].
    """
    shape, dtype = gate.shape, gate.dtype
    (gate_rows, gate_step), (up_rows, up_step) = _rows(gate, shape, dtype), _rows(up, shape, dtype)
    grads = _address(grad, shape, dtype), _address(grad_gate, shape, dtype), _address(grad_up, shape, dtype)
    places = SiTUGrads(gate_rows, up_rows, *grads, gate_step, up_step)
    _run("situ grads", shape, dtype, 0, 0, places, beta, linear_beta or 0.0)


def packed_product(codes: Tensor, scales: Tensor, vectors: Tensor, result: Tensor) -> None:
    """Compute products of a weight in MXFP4 with a few vectors into memory that the caller has allocated.

    Args:
        codes: `[out, in / 2]` uint8.
        scales: `[out, in / 32]` uint8.
        vectors: `[n, in]` in float32, of each 32 columns the even ones first.
        result: `[n, out]` in float32 or bfloat16; it is written.

    Raises:
        Unfit: as for [`forward`].
    """
    shape, places = _packed(codes, scales)
    number = len(vectors)
    places += _address(vectors, (number, shape[1]), torch.float32), _address(result, (number, shape[0]), result.dtype)
    _run("packed product", shape, result.dtype, 0, number, PackedProduct(*places), 0.0)


def unpack(codes: Tensor, scales: Tensor, result: Tensor) -> None:
    """Write the values of a weight in MXFP4 into memory that the caller has allocated.

    Args:
        codes: `[out, in / 2]` uint8.
        scales: `[out, in / 32]` uint8.
        result: `[out, in]` in float32 or bfloat16; it is written.

    Raises:
        Unfit: as for [`forward`].
    """
    shape, places = _packed(codes, scales)
    places += (_address(result, shape, result.dtype),)
    _run("unpack", shape, result.dtype, 0, 0, Unpacked(*places), 0.0)


def _packed(codes: Tensor, scales: Tensor) -> tuple[torch.Size, tuple[int, ...]]:
    """Return the shape `[out, in]` of a weight in MXFP4, and the addresses of its parts."""
    if codes.ndim != 2 or codes.shape[1] % 16:
        raise Unfit(f"the codes must be [out, in / 2] with whole groups of 32 columns, got {_described(codes)}")
    rows, columns = codes.shape[0], 2 * codes.shape[1]
    places = _address(codes, codes.shape, torch.uint8), _address(scales, (rows, columns // 32), torch.uint8)
    return torch.Size((rows, columns)), places


def kept_size(sources: int) -> int:
    """Return how many numbers of a token the forward pass keeps: three of each source, and one of the norm."""
    return 3 * sources + 1


def chunks(shape: torch.Size) -> int:
    """Return the number of chunks into which the tokens of `[..., D]` are divided among threads.

    It does not depend on the number of threads. A single chunk is computed without threads.
    """
    return _chunks(_tokens(shape))


def _chunks(tokens: int) -> int:
    return min(_CHUNKS, -(-tokens // _TOKENS_IN_PARALLEL))


def _tokens(shape: torch.Size) -> int:
    return shape.numel() // shape[-1] if shape[-1] else 0


def _address(tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the address of a tensor's numbers.

    Raises:
        Unfit: the loops could not use the address.
    """
    if (
        tensor.shape != shape
        or tensor.dtype is not dtype
        or type(tensor) not in PLAIN
        or not tensor.is_cpu
        or not tensor.is_contiguous()
        or tensor.is_neg()
    ):
        raise Unfit(f"a tensor must be {tuple(shape)} in {dtype}, contiguous and in memory, got {_described(tensor)}")
    address = tensor.data_ptr()
    # Nearly every address is a multiple of 4, which is quick to check and enough for both dtypes.
    if (address == 0 and tensor.numel() > 0) or (address & 3 and address % dtype.itemsize):
        raise Unfit(f"the memory of a tensor must be aligned and not freed, got that of {_described(tensor)}")
    return address


def _rows(tensor: Tensor, shape: torch.Size, dtype: torch.dtype) -> tuple[int, int]:
    """Return the address of a tensor's numbers `[..., width]`, and the distance of its rows in numbers.

    Raises:
        Unfit: the loops could not use the address.
    """
    if dtype not in DTYPES or not shape:
        raise Unfit(f"a tensor must be [..., width] in float32 or bfloat16, got {_described(tensor)}")
    if len(shape) != 2 or tensor.is_contiguous():
        return _address(tensor, shape, dtype), shape[-1]
    if tensor.shape != shape or tensor.stride(1) != 1:
        raise Unfit(f"a tensor must be {tuple(shape)} with contiguous rows, got {_described(tensor)}")
    # The first row is contiguous, and tells all else.
    return _address(tensor[:1], (1, shape[1]), dtype), tensor.stride(0)


def _described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} in {tensor.dtype} on {tensor.device}"


def _run(
    loop: str,
    shape: torch.Size,
    dtype: torch.dtype,
    sources: int,
    number: int,
    addresses: Sequence[int],
    first: float,
    second: float = 0.0,
) -> None:
    """Run a loop over the rows `[..., D]` on the arguments that `layout` describes; `number` is `Call.number`."""
    tokens, item = _tokens(shape), dtype.itemsize
    # One array, because numba inspects the type of each argument, and for many that takes longer than the depth
    # attention of a token.
    call = Call(MAGIC, len(addresses), tokens, shape[-1], sources, number, item)
    arguments = array("q", (*call, *addresses))
    engine.run(loop, _chunks(tokens), arguments.buffer_info()[0], first, second, item)


__all__ = [
    "DTYPES",
    "CheckedSources",
    "FewTokens",
    "Unfit",
    "backward",
    "checked",
    "chunks",
    "forward",
    "kept_size",
    "packed_product",
    "phase_one",
    "read_few",
    "situ",
    "situ_grads",
    "unpack",
    "why_unfit",
]
