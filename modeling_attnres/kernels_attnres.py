"""Depth attention as Triton kernels: what `functional_attnres` computes, each source read once and never stacked.

- `fused_depth_attention`, for training: one pass over the sources by online softmax. The backward pass reads them once
  more (and once from the cache) and writes their gradients; the query's is summed in two steps, in a fixed order.
- `phase_one`, `phase_two`, for inference: all queries of a block against the finished blocks in one pass over these,
  then one merge with the partial sum for each sublayer.

Everything is computed in float32 and rounded once, on writing. `query` is `w * g` throughout: the pseudo-query times
the key norm's weight. The sources are separate tensors, so their pointers are a tuple among the kernel's arguments, and
each number of sources is a kernel of its own. Triton is optional: `kernels_available` says whether the kernels run.
"""

from __future__ import annotations  # the kernels' name Triton's types, which may be absent

import functools
import re
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except Exception:  # not installed, or it does not load here
    triton = tl = None

MAX_WIDTH = 16384
MAX_SOURCES = 128
# Not measured on a GPU yet: elements of a tile for each thread, programs that share the sum of the query's gradient,
# sources on their way ahead of the one at hand, and up to how many tokens latency is what counts.
_TILE, _PER_THREAD, _PROGRAMS, _AHEAD, _AHEAD_FEW, _FEW_TOKENS, _QUERY_TILE = 1024, 16, 1024, 2, 8, 256, 16384

_jit: Callable = (lambda kernel: kernel) if triton is None else triton.jit


def kernels_available(device: torch.device | str, width: int = 1) -> bool:
    """Whether the kernels run on this device for sources of this width: a small one is tried, once.

    No without Triton, without a GPU, with a driver too old for it, or without the C compiler that it needs.
    """
    device = torch.device(device)
    return triton is not None and device.type == "cuda" and width <= MAX_WIDTH and _trial(device)


@torch.compiler.assume_constant_result
@functools.cache
def _trial(device: torch.device) -> bool:
    if not torch.cuda.is_available():
        return False
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
        sources: at least one and at most `MAX_SOURCES`, each `[..., D]`, of any of bfloat16, float16 and float32.

    Returns:
        `h`, `[..., D]`, in the common dtype of the sources, and `a`, `[n, ...]` in float32.
    """
    return _FusedDepthAttention.apply(query, eps, is_sum, *sources)


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
    return _phase_one(queries, eps, list(sources), dtype or _common_dtype(sources))


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
    result, *updated = _phase_two(query, eps, is_sum, finished, *phase, partial, update)
    return result, updated[0] if updated else partial


class _FusedDepthAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments: Tensor | float | bool) -> tuple[Tensor, Tensor]:
        # Not in the signature: see `_DepthAttention`.
        query, eps, is_sum, *sources = arguments
        sources = [source.contiguous() for source in sources]
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


def _common_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    return functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors])


def _tile(width: int) -> dict[str, int]:
    """A tile of whole tokens: its tokens and its columns, powers of two, and the warps for it."""
    columns = triton.next_power_of_2(width)
    tokens = max(1, _TILE // columns) if columns > 16 else 32
    return {"TOKENS": tokens, "COLUMNS": columns, "num_warps": _warps(tokens * columns)}


def _warps(elements: int) -> int:
    return min(16, max(1, elements // (32 * _PER_THREAD)))


def _ahead(number: int, tokens: int) -> int:
    return min(number, _AHEAD_FEW if tokens <= _FEW_TOKENS else _AHEAD)


def _forward_outputs(query: Tensor, sources: Sequence[Tensor], eps: float, is_sum: bool):
    shape = sources[0].shape
    stats = [query.new_empty((len(sources), *shape[:-1]), dtype=torch.float32) for _ in range(3)]
    return sources[0].new_empty(shape, dtype=_common_dtype(sources)), *stats


@_operator(_forward_outputs)
def _forward(
    query: Tensor, sources: Sequence[Tensor], eps: float, is_sum: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result, and of each source and token the weight, the logit and the inverse RMS."""
    result, weights, logits, inverse_rms = outputs = _forward_outputs(query, sources, eps, is_sum)
    width = query.numel()
    tokens, tile = result.numel() // width, _tile(width)
    if tokens:
        with torch.cuda.device_of(result):
            _forward_kernel[(triton.cdiv(tokens, tile["TOKENS"]),)](
                tuple(sources), query.contiguous(), result, weights, logits, inverse_rms, tokens, eps,
                N=len(sources), FACTOR=len(sources) if is_sum else 1, WIDTH=width,
                AHEAD=_ahead(len(sources), tokens), **tile,
            )  # fmt: skip
    return outputs


@_jit
def _forward_kernel(
    sources, query, result, weights, logits, inverse_rms, tokens, eps,
    N: tl.constexpr, FACTOR: tl.constexpr, WIDTH: tl.constexpr, AHEAD: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, COLUMNS)
    is_token, is_column = token < tokens, column < WIDTH
    inside = is_token[:, None] & is_column[None, :]
    offset = token[:, None] * WIDTH + column[None, :]
    query_row = tl.load(query + column, mask=is_column, other=0.0)[None, :]
    coming, seen = (), ()
    for i in tl.static_range(AHEAD):
        coming += (tl.load(sources[i] + offset, mask=inside, other=0.0),)
    maximum = tl.zeros([TOKENS], tl.float32)
    normaliser = tl.zeros([TOKENS], tl.float32)
    mixture = tl.zeros([TOKENS, COLUMNS], tl.float32)
    for i in tl.static_range(N):
        source = coming[0].to(tl.float32)
        coming = coming[1:]
        if i + AHEAD < N:
            coming += (tl.load(sources[i + AHEAD] + offset, mask=inside, other=0.0),)
        rms = tl.rsqrt(tl.sum(source * source, 1) / WIDTH + eps)
        logit = tl.sum(source * query_row, 1) * rms
        if i == 0:
            maximum = logit
        highest = tl.maximum(maximum, logit)
        before, now = tl.exp(maximum - highest), tl.exp(logit - highest)
        normaliser = normaliser * before + now
        mixture = mixture * before[:, None] + now[:, None] * source
        maximum = highest
        tl.store(inverse_rms + i * tokens + token, rms, mask=is_token)
        tl.store(logits + i * tokens + token, logit, mask=is_token)
        seen += (logit,)
    # In this order `FACTOR` over the normaliser is exactly one at zero queries, and `sum` is the plain sum.
    mixture = mixture * tl.div_rn(tl.full([TOKENS], FACTOR, tl.float32), normaliser)[:, None]
    tl.store(result + offset, mixture.to(result.dtype.element_ty), mask=inside)
    for i in tl.static_range(N):
        tl.store(weights + i * tokens + token, tl.div_rn(tl.exp(seen[i] - maximum), normaliser), mask=is_token)


def _backward_outputs(grad, grad_weights, query, sources, weights, logits, inverse_rms, is_sum, needs_sources):
    width = query.numel()
    tiles = -(-(grad.numel() // width) // _tile(width)["TOKENS"])
    each = max(1, -(-tiles // _PROGRAMS))  # as many for every program
    partial = query.new_empty(max(1, -(-tiles // each)), width, dtype=torch.float32)
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
    width = query.numel()
    tile = _tile(width)
    with torch.cuda.device_of(grad):
        _backward_kernel[(len(partial),)](
            grad, grad_weights, tuple(sources), query.contiguous(), weights, logits, inverse_rms, partial,
            tuple(grad_sources) or None, grad.numel() // width,
            N=len(sources), FACTOR=len(sources) if is_sum else 1, WIDTH=width,
            HAS_GRAD_WEIGHTS=grad_weights is not None, NEEDS_SOURCES=needs_sources, **tile,
        )  # fmt: skip
    return outputs


@_jit
def _backward_kernel(
    grad, grad_weights, sources, query, weights, logits, inverse_rms, partial, grad_sources, tokens,
    N: tl.constexpr, FACTOR: tl.constexpr, WIDTH: tl.constexpr, HAS_GRAD_WEIGHTS: tl.constexpr,
    NEEDS_SOURCES: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, COLUMNS)
    is_column = column < WIDTH
    query_row = tl.load(query + column, mask=is_column, other=0.0)[None, :]
    grad_query = tl.zeros([COLUMNS], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(tokens, TOKENS), tl.num_programs(0)):
        token = tile * TOKENS + tl.arange(0, TOKENS).to(tl.int64)
        is_token = token < tokens
        inside = is_token[:, None] & is_column[None, :]
        offset = token[:, None] * WIDTH + column[None, :]
        grad_row = tl.load(grad + offset, mask=inside, other=0.0).to(tl.float32)
        # The incoming gradients, contracted with d h / d a_i and d a_i / d a_i, and their mean.
        contracted = ()
        mean = tl.zeros([TOKENS], tl.float32)
        for i in tl.static_range(N):
            source = tl.load(sources[i] + offset, mask=inside, other=0.0).to(tl.float32)
            similarity = tl.sum(grad_row * source, 1) * FACTOR
            if HAS_GRAD_WEIGHTS:
                similarity += tl.load(grad_weights + i * tokens + token, mask=is_token, other=0.0)
            mean += tl.load(weights + i * tokens + token, mask=is_token, other=0.0) * similarity
            contracted += (similarity,)
        for i in tl.static_range(N):
            source = tl.load(sources[i] + offset, mask=inside, other=0.0).to(tl.float32)
            weight = tl.load(weights + i * tokens + token, mask=is_token, other=0.0)
            logit = tl.load(logits + i * tokens + token, mask=is_token, other=0.0)
            rms = tl.load(inverse_rms + i * tokens + token, mask=is_token, other=0.0)
            along_query = weight * (contracted[i] - mean) * rms
            grad_query += tl.sum(along_query[:, None] * source, 0)
            if NEEDS_SOURCES:
                along_source = -along_query * logit * rms / WIDTH
                grad_source = (weight * FACTOR)[:, None] * grad_row + along_query[:, None] * query_row
                grad_source += along_source[:, None] * source
                tl.store(grad_sources[i] + offset, grad_source.to(grad_sources[i].dtype.element_ty), mask=inside)
    tl.store(partial + tl.program_id(0) * WIDTH + column, grad_query, mask=is_column)


def _phase_one_outputs(queries: Tensor, eps: float, sources: Sequence[Tensor], dtype: torch.dtype):
    shape = (len(queries), *sources[0].shape)
    stats = [queries.new_empty(shape[:-1], dtype=torch.float32) for _ in range(2)]
    return sources[0].new_empty(shape, dtype=dtype), *stats


@_operator(_phase_one_outputs)
def _phase_one(
    queries: Tensor, eps: float, sources: Sequence[Tensor], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    mixtures, maxima, normalisers = outputs = _phase_one_outputs(queries, eps, sources, dtype)
    number, width = queries.shape
    tokens, columns = sources[0].numel() // width, triton.next_power_of_2(width)
    # As many queries at once as a program can keep in registers; the others read the sources again, from the cache.
    rows = min(triton.next_power_of_2(number), max(1, _QUERY_TILE // columns))
    groups = triton.cdiv(number, rows)
    if tokens:
        with torch.cuda.device_of(mixtures):
            _phase_one_kernel[(tokens * groups,)](
                tuple(source.contiguous() for source in sources), queries.contiguous(), mixtures, maxima, normalisers,
                tokens, eps, N=len(sources), NUMBER=number, WIDTH=width, AHEAD=_ahead(len(sources), tokens),
                GROUPS=groups, ROWS=rows, COLUMNS=columns, num_warps=_warps(rows * columns),
            )  # fmt: skip
    return outputs


@_jit
def _phase_one_kernel(
    sources, queries, mixtures, maxima, normalisers, tokens, eps,
    N: tl.constexpr, NUMBER: tl.constexpr, WIDTH: tl.constexpr, AHEAD: tl.constexpr, GROUPS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) // GROUPS).to(tl.int64)
    row, column = tl.program_id(0) % GROUPS * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    is_row, is_column = row < NUMBER, column < WIDTH
    inside = is_row[:, None] & is_column[None, :]
    query_rows = tl.load(queries + row[:, None] * WIDTH + column[None, :], mask=inside, other=0.0)
    offset = token * WIDTH + column
    coming = ()
    for i in tl.static_range(AHEAD):
        coming += (tl.load(sources[i] + offset, mask=is_column, other=0.0),)
    maximum = tl.zeros([ROWS], tl.float32)
    normaliser = tl.zeros([ROWS], tl.float32)
    mixture = tl.zeros([ROWS, COLUMNS], tl.float32)
    for i in tl.static_range(N):
        source = coming[0].to(tl.float32)
        coming = coming[1:]
        if i + AHEAD < N:
            coming += (tl.load(sources[i + AHEAD] + offset, mask=is_column, other=0.0),)
        rms = tl.rsqrt(tl.sum(source * source, 0) / WIDTH + eps)
        logit = tl.sum(query_rows * source[None, :], 1) * rms
        if i == 0:
            maximum = logit
        highest = tl.maximum(maximum, logit)
        before, now = tl.exp(maximum - highest), tl.exp(logit - highest)
        normaliser = normaliser * before + now
        mixture = mixture * before[:, None] + now[:, None] * source[None, :]
        maximum = highest
    place = row.to(tl.int64) * tokens + token
    tl.store(maxima + place, maximum, mask=is_row)
    tl.store(normalisers + place, normaliser, mask=is_row)
    mixture = mixture.to(mixtures.dtype.element_ty)
    tl.store(mixtures + place[:, None] * WIDTH + column[None, :], mixture, mask=inside)


def _phase_two_outputs(query, eps, is_sum, finished, mixture, maximum, normaliser, partial, update):
    dtype = _common_dtype([mixture] if partial is None else [mixture, partial])
    return [mixture.new_empty(mixture.shape, dtype=dtype)] + ([] if update is None else [torch.empty_like(partial)])


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
    partial, update = (tensor if tensor is None else tensor.contiguous() for tensor in (partial, update))
    if tokens:
        with torch.cuda.device_of(mixture):
            _phase_two_kernel[(triton.cdiv(tokens, tile["TOKENS"]),)](
                mixture.contiguous(), maximum.contiguous(), normaliser.contiguous(), partial, update,
                query.contiguous(), outputs[0], outputs[-1], tokens, eps, FACTOR=number if is_sum else 1, WIDTH=width,
                HAS_PARTIAL=partial is not None, HAS_UPDATE=update is not None, **tile,
            )  # fmt: skip
    return outputs


@_jit
def _phase_two_kernel(
    mixtures, maxima, normalisers, partial, update, query, result, updated, tokens, eps,
    FACTOR: tl.constexpr, WIDTH: tl.constexpr, HAS_PARTIAL: tl.constexpr, HAS_UPDATE: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, COLUMNS)
    is_token, is_column = token < tokens, column < WIDTH
    inside = is_token[:, None] & is_column[None, :]
    offset = token[:, None] * WIDTH + column[None, :]
    mixture = tl.load(mixtures + offset, mask=inside, other=0.0).to(tl.float32)
    normaliser = tl.load(normalisers + token, mask=is_token, other=1.0)
    if HAS_PARTIAL:
        source = tl.load(partial + offset, mask=inside, other=0.0).to(tl.float32)
        if HAS_UPDATE:
            source += tl.load(update + offset, mask=inside, other=0.0).to(tl.float32)
            rounded = source.to(updated.dtype.element_ty)
            tl.store(updated + offset, rounded, mask=inside)
            source = rounded.to(tl.float32)
        query_row = tl.load(query + column, mask=is_column, other=0.0)[None, :]
        logit = tl.sum(source * query_row, 1) * tl.rsqrt(tl.sum(source * source, 1) / WIDTH + eps)
        maximum = tl.load(maxima + token, mask=is_token, other=0.0)
        highest = tl.maximum(maximum, logit)
        before, now = tl.exp(maximum - highest), tl.exp(logit - highest)
        normaliser = normaliser * before + now
        mixture = mixture * before[:, None] + now[:, None] * source
    mixture = mixture * tl.div_rn(tl.full([TOKENS], FACTOR, tl.float32), normaliser)[:, None]
    tl.store(result + offset, mixture.to(result.dtype.element_ty), mask=inside)


__all__ = ["MAX_SOURCES", "MAX_WIDTH", "fused_depth_attention", "kernels_available", "phase_one", "phase_two"]
