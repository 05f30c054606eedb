"""Launch the Triton kernels: check every tensor before a kernel gets its address, allocate outputs, choose tiles.

- `forward` and `backward`, for training: one pass over the sources by online softmax. The backward pass reads the
  sources once more (and once from the cache) and writes their gradients, to which it adds the gradients from later
  reads. It sums the query's gradient in two steps, in a fixed order.
- `phase_one`, for inference: the queries of several sublayers against the sources that all of them read, in one pass.
- `read_fused`, for inference: the read of one sublayer, continued from phase one or not, and the norm that follows.

Everything is computed in float32 and rounded once, when it is written. A norm rounds where its module does. `query` is
always `w * g`, the pseudo-query times the key norm's weight.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType

import torch
from torch import Tensor

from ..tensors import PLAIN, packed

MAX_WIDTH = 16384
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Chosen by measurements on an H100 (`benchmarks/gpu.md`).
_TILE = 1024  # elements of a tile, as far as whole tokens allow
_PER_THREAD = 32  # elements of a tile that a thread computes
_QUERY_TILE = 16384  # elements of the queries that a program keeps in registers
_CHUNK = 8  # pointers from which a loop picks
_PROGRAMS = 2048  # most programs that share the sum of the query's gradient


@functools.cache
def kernels() -> ModuleType:
    """Return the module of the kernels. The first call imports Triton, which takes seconds."""
    from . import kernels

    return kernels


@functools.cache
def why_no_kernels() -> str | None:
    """Return why the kernels do not load, or `None` if they do."""
    try:
        kernels()
    except ModuleNotFoundError:
        return "Triton is not installed"
    except Exception as error:
        return f"Triton does not load: {error}"
    return None


def common_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype to which the dtypes of all tensors promote."""
    return functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))


def phase_one(queries: Tensor, eps: float, *sources: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute phase 1: the queries of several sublayers against the sources that all of them read. Not differentiable.

        m_q = max_i l_qi,   z_q = sum_i exp(l_qi - m_q),   u_q = sum_i exp(l_qi - m_q) s_i,   l_qi = q . RMSNorm(s_i)

    Args:
        queries: `w * g` of the G sublayers, `[G, D]`, float32.
        eps: epsilon of the key norm.
        sources: at least one, each `[..., D]`.

    Returns:
        `u` `[G, ..., D]`, `m` and `z` `[G, ...]`, in float32. `read_fused` continues from one entry of each.

    Raises:
        ValueError: the shapes, dtypes or devices do not fit each other.
    """
    dtype = common_dtype(sources)
    return _phase_one(packed(queries), eps, [packed(source.to(dtype)) for source in sources])


def read_fused(
    query: Tensor,
    eps: float,
    multiplier: int,
    sources: Sequence[Tensor],
    phase: tuple[Tensor, ...] | None = None,
    dtype: torch.dtype | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
) -> Tensor:
    """Compute the read of one sublayer, `h`, over the sources of phase one and newer ones, or the RMSNorm of `h`.

    Not differentiable.

        h = k (exp(m - t) u + sum_i exp(l_i - t) s_i) / (exp(m - t) z + sum_i exp(l_i - t)),   t = max(m, l_1, l_2, ...)

    Args:
        query: `w * g`, `[D]`, float32; `D <= MAX_WIDTH`.
        eps: epsilon of the key norm.
        multiplier: `k`: the number of all sources, also those of phase one, for the scale `sum`; 1 for `mean`.
        sources: the sources that phase one did not read, each `[..., D]`; at least one if `phase` is `None`.
        phase: one entry of the result of `phase_one`: `u` `[..., D]`, `m` and `z` `[...]`, in float32.
        dtype: dtype of the result; by default the common dtype of `sources`, or without sources that of `u`.
        norm_weight: weight `[D]` of an RMSNorm like Llama's, in the dtype of the result; no norm if `None`.
        norm_eps: epsilon of this norm.

    Returns:
        `h`, or `norm_weight * (h * rsqrt(mean(h^2) + norm_eps))`, `[..., D]`; rounded where the norm's module rounds.

    Raises:
        ValueError: the shapes, dtypes or devices do not fit each other.
    """
    if sources:
        common = common_dtype(sources)
        sources = [packed(source.to(common)) for source in sources]
    dtype = dtype or [*sources, *(phase or ())][0].dtype
    parts = [None] * 3 if phase is None else [packed(tensor) for tensor in phase]
    norm_weight = None if norm_weight is None else packed(norm_weight)
    return _read(packed(query), eps, multiplier, sources, *parts, dtype, norm_weight, norm_eps)


def _operator(allocate: Callable) -> Callable:
    """Make a function a single operator for `torch.compile`, which cannot trace through tuples of pointers.

    Code that is not compiled calls the function itself, because the dispatch of an operator would take longer than a
    small kernel.

    Args:
        allocate: takes the same arguments, and returns outputs of the right shapes and dtypes without computing them.
    """

    def decorate(function: Callable) -> Callable:
        name = f"attnres_triton::{function.__name__.strip('_')}"
        operator = torch.library.custom_op(name, function, mutates_args=())
        operator.register_fake(allocate)

        @functools.wraps(function)
        def call(*args):
            return (operator if torch.compiler.is_compiling() else function)(*args)

        return call

    return decorate


def _require(device: torch.device, *groups: tuple[Iterable[Tensor | None], Sequence[int], torch.dtype]) -> None:
    """Validate every tensor before its pointer reaches a kernel.

    Args:
        device: the device of all tensors.
        groups: tensors, some of which may be `None`, with the shape and dtype that they must have.

    Raises:
        ValueError: a tensor has another shape, dtype or device, or is not contiguous.
    """
    for tensors, shape, dtype in groups:
        for tensor in tensors:
            if tensor is None:
                continue
            is_alike = tensor.dtype is dtype and tensor.shape == shape and tensor.device == device
            is_plain = type(tensor) in PLAIN and tensor.is_contiguous() and not tensor.is_neg()
            if not (is_alike and is_plain and (tensor.data_ptr() or not tensor.numel())):
                raise ValueError(
                    f"A kernel takes a contiguous tensor of {dtype}, shape {tuple(shape)}, on {device}, not freed. "
                    f"Got a {type(tensor).__name__} of {tensor.dtype}, shape {tuple(tensor.shape)}, strides "
                    f"{tuple(tensor.stride())}, on {tensor.device}."
                )


def _require_rows(query: Tensor, sources: Sequence[Tensor]) -> torch.Size:
    """Return the shape of the sources. Raise `ValueError` if the kernels do not take the query or the sources."""
    shape = sources[0].shape
    if sources[0].dtype not in DTYPES or not shape or not 1 <= shape[-1] <= MAX_WIDTH:
        raise ValueError(
            f"A kernel takes rows of 1 to {MAX_WIDTH} numbers in {', '.join(map(str, DTYPES))}. "
            f"Got {sources[0].dtype} of shape {tuple(shape)}."
        )
    _require(query.device, ([query], shape[-1:], torch.float32), (sources, shape, sources[0].dtype))
    return shape


def tile_of(width: int) -> dict[str, int]:
    """Return a tile's numbers of tokens and columns, which are powers of two, and its number of warps."""
    columns = _power_of_two(width)
    tokens = max(1, min(32, _TILE // columns))
    return {"TOKENS": tokens, "COLUMNS": columns, "num_warps": _warps(tokens * columns)}


def _warps(elements: int) -> int:
    return min(16, max(1, elements // (32 * _PER_THREAD)))


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def padded_number(number: int) -> int:
    """Return how many pointers a kernel takes for a number of tensors: 1, 2, 4, 8, 16, 24, ..., so that few suffice."""
    return _power_of_two(number) if number <= _CHUNK else _CHUNK * _cdiv(number, _CHUNK)


def _pointers(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the tensors, padded by the first one."""
    return (*tensors, *[tensors[0]] * (padded_number(len(tensors)) - len(tensors)))


def sizes(pointers: int, width: int) -> dict[str, int]:
    """Return the constants of a kernel that depend on the number of pointers and the width."""
    return {"N": pointers, "CHUNK": min(_CHUNK, pointers), "WIDTH": width}


def backward_programs(tokens: int, width: int) -> int:
    """Return the number of programs of the backward kernel. Each sums a part of the query's gradient."""
    tiles = _cdiv(tokens, tile_of(width)["TOKENS"])
    tiles_per_program = max(1, _cdiv(tiles, _PROGRAMS))
    return max(1, _cdiv(tiles, tiles_per_program))


def _empty(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocate an output of a kernel on the device of `like`, whatever defaults a program has set."""
    return torch.empty(shape, dtype=dtype, device=like.device)


def _forward_outputs(query, sources, eps, is_sum):
    first = sources[0]
    statistics = _empty(query, (3, len(sources), *first.shape[:-1]), torch.float32)
    return _empty(query, first.shape, first.dtype), statistics


@_operator(_forward_outputs)
def forward(query: Tensor, sources: Sequence[Tensor], eps: float, is_sum: bool) -> tuple[Tensor, Tensor]:
    """Compute the result `[..., D]`, and in float32 the statistics `[3, n, ...]`.

    The statistics are the weights, the logits and 1 / RMS of all sources.

    Args:
        query: `w * g`, `[D]`, float32.
        sources: n >= 1 tensors `[..., D]` of one dtype.
        eps: epsilon of the key norm.
        is_sum: whether to multiply the result by n.
    """
    shape = _require_rows(query, sources)
    outputs = result, statistics = _forward_outputs(query, sources, eps, is_sum)
    count, width, pointers = len(sources), query.numel(), _pointers(sources)
    _require(
        query.device,
        ([result], shape, result.dtype),
        ([statistics], (3, count, *shape[:-1]), torch.float32),
    )
    tokens, tile = result.numel() // width, tile_of(width)
    if tokens:
        with torch.cuda.device_of(query):
            kernels().forward_kernel[(_cdiv(tokens, tile["TOKENS"]),)](
                pointers, query, None, None, None, None, None, result, None, statistics,
                tokens, count, float(count if is_sum else 1), eps, 0.0,
                HAS_KEY_NORM=False, HAS_PHASE=False, HAS_NORM=False, KEEPS_STATISTICS=True,
                **sizes(len(pointers), width), **tile,
            )  # fmt: skip
    return outputs


def _backward_outputs(grad, grad_weights, later_grads, query, sources, statistics, is_sum, needs_sources):
    width = query.numel()
    partial = _empty(query, (backward_programs(grad.numel() // width, width), width), torch.float32)
    return partial, [_empty(query, source.shape, source.dtype) for source in sources] if needs_sources else []


@_operator(_backward_outputs)
def backward(
    grad: Tensor,
    grad_weights: Tensor | None,
    later_grads: Sequence[Tensor],
    query: Tensor,
    sources: Sequence[Tensor],
    statistics: Tensor,
    is_sum: bool,
    needs_sources: bool,
) -> tuple[Tensor, list[Tensor]]:
    """Compute the query's gradient, in parts `[programs, D]` to sum, and the sources' gradients or an empty list.

    Args:
        grad: gradient of the result, `[..., D]`.
        grad_weights: gradient of the weights, `[n, ...]`, or `None`.
        later_grads: gradients `[..., D]` to add to those of the sources, one for each source, or an empty list.
        query: `w * g`, `[D]`, float32.
        sources: n tensors `[..., D]`.
        statistics: from [`forward`].
        is_sum: whether the result was multiplied by n.
        needs_sources: whether the sources' gradients are needed.
    """
    shape, count = _require_rows(query, sources), len(sources)
    partial, grad_sources = outputs = _backward_outputs(
        grad, grad_weights, later_grads, query, sources, statistics, is_sum, needs_sources
    )
    contracted = _empty(query, (count, *shape[:-1]), torch.float32)
    _require(
        query.device,
        ([grad, *later_grads, *grad_sources], shape, sources[0].dtype),
        ([grad_weights, contracted], contracted.shape, torch.float32),
        ([statistics], (3, *contracted.shape), torch.float32),
        ([partial], (len(partial), query.numel()), torch.float32),
    )
    width, pointers = query.numel(), _pointers(sources)
    with torch.cuda.device_of(query):
        kernels().backward_kernel[(len(partial),)](
            grad, grad_weights, pointers, query, None, None, None, statistics, contracted, partial,
            _pointers(grad_sources) if needs_sources else None, _pointers(later_grads) if later_grads else None,
            grad.numel() // width, count, float(count if is_sum else 1), 0.0,
            HAS_KEY_NORM=False, HAS_NORM=False, HAS_GRAD_WEIGHTS=grad_weights is not None, NEEDS_SOURCES=needs_sources,
            HAS_LATER=len(later_grads) > 0, **sizes(len(pointers), width), **tile_of(width),
        )  # fmt: skip
    return outputs


def _phase_one_outputs(queries, eps, sources):
    shape = (len(queries), *sources[0].shape)
    mixtures, maxima, normalisers = (_empty(queries, size, torch.float32) for size in (shape, shape[:-1], shape[:-1]))
    return mixtures, maxima, normalisers


@_operator(_phase_one_outputs)
def _phase_one(queries: Tensor, eps: float, sources: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    shape = _require_rows(queries[0], sources)
    outputs = mixtures, *statistics = _phase_one_outputs(queries, eps, sources)
    number, width = queries.shape
    _require(
        queries.device,
        ([queries], (number, shape[-1]), torch.float32),
        ([mixtures], (number, *shape), torch.float32),
        (statistics, (number, *shape[:-1]), torch.float32),
    )
    pointers = _pointers(sources)
    tokens, columns = sources[0].numel() // width, _power_of_two(width)
    # A program computes as many queries as fit into its registers. Others read the sources again, from the cache.
    rows = min(_power_of_two(number), max(1, _QUERY_TILE // columns))
    groups = _cdiv(number, rows)
    if tokens:
        with torch.cuda.device_of(queries):
            kernels().phase_one_kernel[(tokens * groups,)](
                pointers, queries, *outputs, tokens, len(sources), eps, **sizes(len(pointers), width),
                NUMBER=number, GROUPS=groups, ROWS=rows, COLUMNS=columns, num_warps=_warps(rows * columns),
            )  # fmt: skip
    return outputs


def _read_outputs(query, eps, multiplier, sources, mixture, maximum, normaliser, dtype, norm_weight, norm_eps):
    return _empty(query, (mixture if mixture is not None else sources[0]).shape, dtype)


@_operator(_read_outputs)
def _read(
    query: Tensor,
    eps: float,
    multiplier: int,
    sources: Sequence[Tensor],
    mixture: Tensor | None,
    maximum: Tensor | None,
    normaliser: Tensor | None,
    dtype: torch.dtype,
    norm_weight: Tensor | None,
    norm_eps: float,
) -> Tensor:
    # The kernel takes at least one pointer. Without sources it gets the mixture's, and reads nothing through it.
    rows = sources or ([] if mixture is None else [mixture])
    shape = _require_rows(query, rows)
    result = _read_outputs(query, eps, multiplier, sources, mixture, maximum, normaliser, dtype, norm_weight, norm_eps)
    _require(
        query.device,
        ([mixture], shape, torch.float32),
        ([maximum, normaliser], shape[:-1], torch.float32),
        ([norm_weight], shape[-1:], dtype),
        ([result], shape, dtype),
    )
    width, pointers = query.numel(), _pointers(rows)
    tokens, tile = result.numel() // width, tile_of(width)
    if tokens:
        with torch.cuda.device_of(query):
            kernels().forward_kernel[(_cdiv(tokens, tile["TOKENS"]),)](
                pointers, query, None, mixture, maximum, normaliser, norm_weight, result, None, None,
                tokens, len(sources), float(multiplier), eps, norm_eps,
                HAS_KEY_NORM=False, HAS_PHASE=mixture is not None, HAS_NORM=norm_weight is not None,
                KEEPS_STATISTICS=False, **sizes(len(pointers), width), **tile,
            )  # fmt: skip
    return result


__all__ = [
    "DTYPES",
    "MAX_WIDTH",
    "backward",
    "backward_programs",
    "common_dtype",
    "forward",
    "kernels",
    "padded_number",
    "phase_one",
    "read_fused",
    "sizes",
    "tile_of",
    "why_no_kernels",
]
