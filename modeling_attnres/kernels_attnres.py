"""Depth attention as Triton kernels: what `functional_attnres` computes, each source read once and never stacked.

- `fused_depth_attention`, for training: one pass over the sources by online softmax. The backward pass reads them once
  more (and once from the cache) and writes their gradients; the query's is summed in two steps, in a fixed order.
- `phase_one`, `phase_two`, for inference: all queries of a block against the finished blocks in one pass over these,
  then one merge with the partial sum for each sublayer.

Everything is computed in float32 and rounded once, on writing. `query` is `w * g` throughout: the pseudo-query times
the key norm's weight. Triton is optional: `kernels_available` says whether the kernels, in `triton_attnres`, run.
"""

import functools
import re
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

try:
    from .triton_attnres import backward_kernel, forward_kernel, phase_one_kernel, phase_two_kernel
except Exception:  # Triton is not installed, or does not load here
    forward_kernel = None

MAX_WIDTH = 16384
# Chosen by what compiles without spilling registers, not yet by measurement on a GPU.
_TILE = 1024  # elements in a tile, as far as whole tokens allow
_PER_THREAD = 16  # of these
_QUERY_TILE = 16384  # elements of the queries that a program keeps
_CHUNK = 8  # pointers among which a loop picks
_PROGRAMS = 1024  # at most, that share the sum of the query's gradient


def kernels_available(device: torch.device | str, width: int = 1) -> bool:
    """Whether the kernels run on this device for sources of this width: a small one is tried, once.

    No without Triton, without a GPU, with a driver too old for it, or without the C compiler that it needs.
    """
    device = torch.device(device)
    is_possible = forward_kernel is not None and device.type == "cuda" and width <= MAX_WIDTH
    return is_possible and torch.cuda.is_available() and _run_on(device)


@torch.compiler.assume_constant_result
def _run_on(device: torch.device) -> bool:
    return _trial(device)  # apart, since `torch.compile` looks through a cache


@functools.cache
def _trial(device: torch.device) -> bool:
    try:
        ones = torch.ones(2, 5, device=device)
        result, _ = fused_depth_attention(ones[0], 1e-6, True, ones, ones)
        return bool((result == 2).all())
    except Exception as error:
        warnings.warn(f"the Triton kernels do not run on {device}, so PyTorch's are used: {error}", stacklevel=2)
        return False


def fused_depth_attention(query: Tensor, eps: float, is_sum: bool, *sources: Tensor) -> tuple[Tensor, Tensor]:
    """`h = sum_i a_i s_i`, `a = softmax_i(query . RMSNorm(s_i))`; differentiable in the query and the sources.

    Args:
        query: `w * g`, `[D]`, float32; `D <= MAX_WIDTH`.
        eps: epsilon of the key norm.
        is_sum: multiply `h` by the number of sources.
        sources: at least one, each `[..., D]`, in bfloat16, float16 or float32.

    Returns:
        `h`, `[..., D]`, in the common dtype of the sources, and `a`, `[n, ...]` in float32.
    """
    dtype = common_dtype(sources)
    return _FusedDepthAttention.apply(query, eps, is_sum, *[source.to(dtype) for source in sources])


def phase_one(
    queries: Tensor, eps: float, *sources: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """All queries of a block against the finished blocks, for `phase_two` to complete. Not differentiable.

        m_q = max_i l_qi,   z_q = sum_i exp(l_qi - m_q),   u_q = sum_i exp(l_qi - m_q) s_i,   l_qi = q . RMSNorm(s_i)

    Args:
        queries: `w * g` of the S sublayers, `[S, D]`, float32.
        sources: the finished blocks, each `[..., D]`.
        dtype: of `u`; by default the sources' common one.

    Returns:
        `u` `[S, ..., D]`; `m` and `z`, `[S, ...]` in float32.
    """
    common = common_dtype(sources)
    return _phase_one(
        queries.contiguous(), eps, [source.to(common).contiguous() for source in sources], dtype or common
    )


def phase_two(
    query: Tensor,
    eps: float,
    is_sum: bool,
    finished: int,
    phase: tuple[Tensor, Tensor, Tensor],
    partial: Tensor | None = None,
    update: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """A sublayer's input, from its part of phase one and the partial sum. Not differentiable.

        h = (exp(m - t) u + exp(l - t) p) / (exp(m - t) z + exp(l - t)),   t = max(m, l),   l = query . RMSNorm(p)

    Args:
        query: `w * g` of the sublayer, `[D]`, float32.
        is_sum: multiply `h` by the number of sources.
        finished: the number of finished blocks, which phase one was given.
        phase: `(u[q], m[q], z[q])`: `[..., D]`, `[...]`, `[...]`.
        partial: the partial sum `[..., D]`; `None` if the block is empty.
        update: the last sublayer's output, added to the partial sum first, in its dtype, on the same pass.

    Returns:
        `h`, `[..., D]`, in the common dtype of `u` and the partial sum, and the partial sum with the update.
    """
    if partial is None:
        partial, update = update, None
    tensors = [tensor if tensor is None else tensor.contiguous() for tensor in (*phase, partial, update)]
    result, *updated = _phase_two(query.contiguous(), eps, is_sum, finished, *tensors)
    return result, updated[0] if updated else partial


class _FusedDepthAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments: Tensor | float | bool) -> tuple[Tensor, Tensor]:
        # Not in the signature: see `_DepthAttention`.
        query, eps, is_sum, *sources = arguments
        query, sources = query.contiguous(), [source.contiguous() for source in sources]
        result, weights, logits, inverse_rms = _forward(query, sources, eps, is_sum)
        ctx.save_for_backward(query, weights, logits, inverse_rms, *sources)
        ctx.is_sum = is_sum
        ctx.set_materialize_grads(False)
        return result, weights

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor | None, grad_weights: Tensor | None):
        query, weights, logits, inverse_rms, *sources = ctx.saved_tensors
        needs_query, needs_sources = ctx.needs_input_grad[0], any(ctx.needs_input_grad[3:])
        if grad is None:
            grad = torch.zeros_like(sources[0])
        if grad_weights is not None:
            grad_weights = grad_weights.contiguous()
        partial, grad_sources = _backward(
            grad.contiguous(), grad_weights, query, sources, weights, logits, inverse_rms, ctx.is_sum, needs_sources
        )
        grad_sources = [grad_sources[i] if needed else None for i, needed in enumerate(ctx.needs_input_grad[3:])]
        return partial.sum(0) if needs_query else None, None, None, *grad_sources


def _operator(allocate: Callable) -> Callable:
    """Make a function one operator for `torch.compile`, which cannot see through tuples of pointers.

    `allocate` gives the outputs, for the same arguments, without a value. Called directly where nothing is compiled: an
    operator's dispatch would cost more time than a small kernel takes.
    """

    def decorate(function: Callable) -> Callable:
        # A namespace for each copy of this file: one may be installed, and another have come with weights.
        name = f"{re.sub(r'[^0-9a-zA-Z_]', '_', __name__)}::{function.__name__.strip('_')}"
        operator = torch.library.custom_op(name, function, mutates_args=())
        operator.register_fake(allocate)

        @functools.wraps(function)
        def call(*args):
            return (operator if torch.compiler.is_compiling() else function)(*args)

        return call

    return decorate


def common_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    """The dtype that all promote to."""
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        if tensor.dtype != dtype:
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def _tile(width: int) -> dict[str, int]:
    """A tile of whole tokens: its tokens and its columns, powers of two, and the warps for it."""
    columns = _power_of_two(width)
    tokens = max(1, min(32, _TILE // columns))
    return {"TOKENS": tokens, "COLUMNS": columns, "num_warps": _warps(tokens * columns)}


def _warps(elements: int) -> int:
    return min(16, max(1, elements // (32 * _PER_THREAD)))


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _pointers(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors, padded by the first, so that there are few kernels: for 1, 2, 4, 8, 16, 24, ... of them."""
    number = len(tensors)
    padded = _power_of_two(number) if number <= _CHUNK else _CHUNK * _cdiv(number, _CHUNK)
    return (*tensors, *[tensors[0]] * (padded - number))


def _sizes(pointers: tuple[Tensor, ...], width: int) -> dict[str, int]:
    return {"N": len(pointers), "CHUNK": min(_CHUNK, len(pointers)), "WIDTH": width}


def _forward_outputs(query, sources, eps, is_sum):
    shape = sources[0].shape
    stats = [query.new_empty((len(sources), *shape[:-1]), dtype=torch.float32) for _ in range(3)]
    return torch.empty_like(sources[0]), *stats


@_operator(_forward_outputs)
def _forward(
    query: Tensor, sources: Sequence[Tensor], eps: float, is_sum: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result, and of each source and token the weight, the logit and the inverse RMS."""
    outputs = _forward_outputs(query, sources, eps, is_sum)
    count, width, pointers = len(sources), query.numel(), _pointers(sources)
    tokens, tile = sources[0].numel() // width, _tile(width)
    if tokens:
        with torch.cuda.device_of(query):
            forward_kernel[(_cdiv(tokens, tile["TOKENS"]),)](
                pointers, query, *outputs, tokens, count, float(count if is_sum else 1), eps,
                **_sizes(pointers, width), **tile,
            )  # fmt: skip
    return outputs


def _backward_outputs(grad, grad_weights, query, sources, weights, logits, inverse_rms, is_sum, needs_sources):
    width = query.numel()
    tiles = _cdiv(grad.numel() // width, _tile(width)["TOKENS"])
    each = max(1, _cdiv(tiles, _PROGRAMS))  # about as many for every program
    partial = query.new_empty((max(1, _cdiv(tiles, each)), width), dtype=torch.float32)
    return partial, [torch.empty_like(source) for source in sources] if needs_sources else []


@_operator(_backward_outputs)
def _backward(
    grad: Tensor,
    grad_weights: Tensor | None,
    query: Tensor,
    sources: Sequence[Tensor],
    weights: Tensor,
    logits: Tensor,
    inverse_rms: Tensor,
    is_sum: bool,
    needs_sources: bool,
) -> tuple[Tensor, list[Tensor]]:
    """The query's gradient in parts, `[programs, D]`, and the sources' if they are needed."""
    partial, grad_sources = outputs = _backward_outputs(
        grad, grad_weights, query, sources, weights, logits, inverse_rms, is_sum, needs_sources
    )
    count, width, pointers = len(sources), query.numel(), _pointers(sources)
    with torch.cuda.device_of(query):
        backward_kernel[(len(partial),)](
            grad, grad_weights, pointers, query, weights, logits, inverse_rms, torch.empty_like(weights), partial,
            _pointers(grad_sources) if needs_sources else None,
            grad.numel() // width, count, float(count if is_sum else 1),
            HAS_GRAD_WEIGHTS=grad_weights is not None, NEEDS_SOURCES=needs_sources,
            **_sizes(pointers, width), **_tile(width),
        )  # fmt: skip
    return outputs


def _phase_one_outputs(queries, eps, sources, dtype):
    shape = (len(queries), *sources[0].shape)
    stats = [queries.new_empty(shape[:-1], dtype=torch.float32) for _ in range(2)]
    return sources[0].new_empty(shape, dtype=dtype), *stats


@_operator(_phase_one_outputs)
def _phase_one(
    queries: Tensor, eps: float, sources: Sequence[Tensor], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    outputs = _phase_one_outputs(queries, eps, sources, dtype)
    pointers = _pointers(sources)
    number, width = queries.shape
    tokens, columns = sources[0].numel() // width, _power_of_two(width)
    # As many queries at once as a program can keep in registers; the others read the sources again, from the cache.
    rows = min(_power_of_two(number), max(1, _QUERY_TILE // columns))
    groups = _cdiv(number, rows)
    if tokens:
        with torch.cuda.device_of(queries):
            phase_one_kernel[(tokens * groups,)](
                pointers, queries, *outputs, tokens, len(sources), eps, **_sizes(pointers, width),
                NUMBER=number, GROUPS=groups, ROWS=rows, COLUMNS=columns, num_warps=_warps(rows * columns),
            )  # fmt: skip
    return outputs


def _phase_two_outputs(query, eps, is_sum, finished, mixture, maximum, normaliser, partial, update):
    dtype = common_dtype([mixture] if partial is None else [mixture, partial])
    return [torch.empty_like(mixture, dtype=dtype)] + ([] if update is None else [torch.empty_like(partial)])


@_operator(_phase_two_outputs)
def _phase_two(
    query: Tensor,
    eps: float,
    is_sum: bool,
    finished: int,
    mixture: Tensor,
    maximum: Tensor,
    normaliser: Tensor,
    partial: Tensor | None,
    update: Tensor | None,
) -> list[Tensor]:
    """The result, and the partial sum if it is a new one."""
    outputs = _phase_two_outputs(query, eps, is_sum, finished, mixture, maximum, normaliser, partial, update)
    width = query.numel()
    tokens, tile = mixture.numel() // width, _tile(width)
    number = finished + (partial is not None)
    if tokens:
        with torch.cuda.device_of(query):
            phase_two_kernel[(_cdiv(tokens, tile["TOKENS"]),)](
                mixture, maximum, normaliser, partial, update, query, outputs[0], outputs[-1],
                tokens, float(number if is_sum else 1), eps,
                WIDTH=width, HAS_PARTIAL=partial is not None, HAS_UPDATE=update is not None, **tile,
            )  # fmt: skip
    return outputs


__all__ = ["MAX_WIDTH", "common_dtype", "fused_depth_attention", "kernels_available", "phase_one", "phase_two"]
