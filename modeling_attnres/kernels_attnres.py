"""Depth attention as Triton kernels: what `functional_attnres` computes, each source read once and never stacked.

- `fused_depth_attention`, for training: one pass over the sources by online softmax. The backward pass reads them once
  more (and once from the cache) and writes their gradients, to which it adds those of later readers of what was passed
  on; the query's is summed in two steps, in a fixed order.
- `phase_one`, for inference: the queries of several sublayers against the sources that all of them read, in one pass.
- `read_fused`, for inference: what one sublayer reads, begun by phase one or not, and the norm that follows, in one.

Everything is computed in float32 and rounded once, on writing; a norm rounds where its module does. `query` is `w * g`
throughout: the pseudo-query times the key norm's weight. Triton is optional: `kernels_available` says whether the
kernels, in `triton_attnres`, run.
"""

import functools
import re
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

try:
    from .triton_attnres import backward_kernel, forward_kernel, phase_one_kernel
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
        result, *_ = fused_depth_attention(ones[0], 1e-6, True, ones, ones)
        phase = tuple(tensor[0] for tensor in phase_one(ones[:1], 1e-6, ones, ones))
        normed = read_fused(ones[0], 1e-6, 3, [ones], phase, norm_weight=2 * ones[0], norm_eps=1e-6)
        return bool((result == 2).all() and (normed.round() == 2).all())
    except Exception as error:
        warnings.warn(f"the Triton kernels do not run on {device}, so PyTorch's are used: {error}", stacklevel=2)
        return False


def fused_depth_attention(
    query: Tensor, eps: float, is_sum: bool, *sources: Tensor, passes_on: bool = False
) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    """`h = sum_i a_i s_i`, `a = softmax_i(query . RMSNorm(s_i))`; differentiable in the query and the sources.

    Args:
        query: `w * g`, `[D]`, float32; `D <= MAX_WIDTH`.
        eps: epsilon of the key norm.
        is_sum: multiply `h` by the number of sources.
        sources: at least one, each `[..., D]`, in bfloat16, float16 or float32.
        passes_on: return sources to go on with, if the kernel can add what gradients they get to ours.

    Returns:
        `h`, `[..., D]`, in the common dtype of the sources; `a`, `[n, ...]` in float32; and the sources: those given
        or, if it `passes_on`, such that what is computed of them has its gradient added to ours by the kernel as it
        writes that, and not by a pass of its own.
    """
    dtype = common_dtype(sources)
    # Sources that are cast would go on in another dtype.
    passes_on = passes_on and torch.is_grad_enabled() and all(source.dtype == dtype for source in sources)
    cast = [source.to(dtype) for source in sources]
    result, weights, *later = _FusedDepthAttention.apply(query, eps, is_sum, passes_on, *cast)
    return result, weights, tuple(later) or sources


def phase_one(queries: Tensor, eps: float, *sources: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The queries of several sublayers, against sources that all of them read. Not differentiable.

        m_q = max_i l_qi,   z_q = sum_i exp(l_qi - m_q),   u_q = sum_i exp(l_qi - m_q) s_i,   l_qi = q . RMSNorm(s_i)

    Args:
        queries: `w * g` of the S sublayers, `[S, D]`, float32.
        sources: at least one, each `[..., D]`.

    Returns:
        `u` `[S, ..., D]`, `m` and `z` `[S, ...]`, in float32; an entry of each is what `read_fused` begins from.
    """
    dtype = common_dtype(sources)
    return _phase_one(queries.contiguous(), eps, [source.to(dtype).contiguous() for source in sources])


def read_fused(
    query: Tensor,
    eps: float,
    multiplier: int,
    sources: Sequence[Tensor],
    phase: tuple[Tensor, Tensor, Tensor] | None = None,
    dtype: torch.dtype | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
) -> Tensor:
    """What one sublayer reads: `h` of phase one's sources and of its own, or the RMSNorm of `h`. Not differentiable.

        h = k (exp(m - t) u + sum_i exp(l_i - t) s_i) / (exp(m - t) z + sum_i exp(l_i - t)),   t = max(m, l_1, l_2, ...)

    Args:
        query: `w * g`, `[D]`, float32; `D <= MAX_WIDTH`.
        eps: epsilon of the key norm.
        multiplier: `k`: the number of all sources, phase one's too, for the scale `sum`; one for `mean`.
        sources: those that phase one did not see, each `[..., D]`; at least one if there is no phase.
        phase: an entry of what `phase_one` returned: `u` `[..., D]`, `m` and `z` `[...]`, in float32.
        dtype: of the result; by default the common one of `sources`, or that of `u`.
        norm_weight: weight `[D]` of a norm as Llama's, in the dtype of the result; no norm if `None`.
        norm_eps: epsilon of this norm.

    Returns:
        `h`, or `norm_weight * (h * rsqrt(mean(h^2) + norm_eps))`, `[..., D]`; rounded where the norm's module rounds.
    """
    if sources:
        common = common_dtype(sources)
        sources = [source.to(common).contiguous() for source in sources]
    begun = (None, None, None) if phase is None else [tensor.contiguous() for tensor in phase]
    dtype = dtype or (sources[0] if sources else begun[0]).dtype
    norm_weight = None if norm_weight is None else norm_weight.contiguous()
    return _read(query.contiguous(), eps, multiplier, sources, *begun, dtype, norm_weight, norm_eps)


class _FusedDepthAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments: Tensor | float | bool) -> tuple[Tensor, ...]:
        # Not in the signature: see `_DepthAttention`.
        query, eps, is_sum, passes_on, *given = arguments
        query, sources = query.contiguous(), [source.contiguous() for source in given]
        result, weights, logits, inverse_rms = _forward(query, sources, eps, is_sum)
        ctx.save_for_backward(query, weights, logits, inverse_rms, *sources)
        ctx.is_sum = is_sum
        ctx.set_materialize_grads(False)
        if not passes_on:
            return result, weights
        ctx.mark_non_differentiable(*(s for s, needed in zip(given, ctx.needs_input_grad[4:]) if not needed))
        return result, weights, *given

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor | None, grad_weights: Tensor | None, *later_grads: Tensor | None):
        query, weights, logits, inverse_rms, *sources = ctx.saved_tensors
        needs_query, needs_sources = ctx.needs_input_grad[0], any(ctx.needs_input_grad[4:])
        if grad is None:
            grad = torch.zeros_like(sources[0])
        if grad_weights is not None:
            grad_weights = grad_weights.contiguous()
        partial, grad_sources = _backward(
            grad.contiguous(), grad_weights, query, sources, weights, logits, inverse_rms, ctx.is_sum, needs_sources,
            _all_or_none(later_grads),
        )  # fmt: skip
        grad_sources = [grad_sources[i] if needed else None for i, needed in enumerate(ctx.needs_input_grad[4:])]
        return partial.sum(0) if needs_query else None, None, None, None, *grad_sources


def _all_or_none(grads: Sequence[Tensor | None]) -> list[Tensor]:
    """The gradients, one tensor of zeros in place of each that is missing; nothing if all are."""
    present = [grad for grad in grads if grad is not None]
    if len(present) == len(grads) or not present:
        return [grad.contiguous() for grad in present]
    zeros = torch.zeros_like(present[0], memory_format=torch.contiguous_format)
    return [zeros if grad is None else grad.contiguous() for grad in grads]


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
                pointers, query, None, None, None, None, *outputs,
                tokens, count, float(count if is_sum else 1), eps, 0.0,
                HAS_PHASE=False, HAS_NORM=False, KEEPS_STATISTICS=True, **_sizes(pointers, width), **tile,
            )  # fmt: skip
    return outputs


def _backward_outputs(
    grad, grad_weights, query, sources, weights, logits, inverse_rms, is_sum, needs_sources, later_grads
):
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
    later_grads: Sequence[Tensor],
) -> tuple[Tensor, list[Tensor]]:
    """The query's gradient in parts, `[programs, D]`, and the sources' if they are needed, `later_grads` included."""
    partial, grad_sources = outputs = _backward_outputs(
        grad, grad_weights, query, sources, weights, logits, inverse_rms, is_sum, needs_sources, later_grads
    )
    count, width, pointers = len(sources), query.numel(), _pointers(sources)
    with torch.cuda.device_of(query):
        backward_kernel[(len(partial),)](
            grad, grad_weights, pointers, query, weights, logits, inverse_rms, torch.empty_like(weights), partial,
            _pointers(grad_sources) if needs_sources else None, _pointers(later_grads) if later_grads else None,
            grad.numel() // width, count, float(count if is_sum else 1),
            HAS_GRAD_WEIGHTS=grad_weights is not None, NEEDS_SOURCES=needs_sources, HAS_LATER=len(later_grads) > 0,
            **_sizes(pointers, width), **_tile(width),
        )  # fmt: skip
    return outputs


def _phase_one_outputs(queries, eps, sources):
    shape = (len(queries), *sources[0].shape)
    return tuple(queries.new_empty(size, dtype=torch.float32) for size in (shape, shape[:-1], shape[:-1]))


@_operator(_phase_one_outputs)
def _phase_one(queries: Tensor, eps: float, sources: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    outputs = _phase_one_outputs(queries, eps, sources)
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


def _read_outputs(query, eps, multiplier, sources, mixture, maximum, normaliser, dtype, norm_weight, norm_eps):
    return torch.empty_like(mixture if mixture is not None else sources[0], dtype=dtype)


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
    result = _read_outputs(query, eps, multiplier, sources, mixture, maximum, normaliser, dtype, norm_weight, norm_eps)
    # The kernel takes one pointer at least, of which it uses nothing where no source counts.
    width, pointers = query.numel(), _pointers(sources or [mixture])
    tokens, tile = result.numel() // width, _tile(width)
    if tokens:
        with torch.cuda.device_of(query):
            forward_kernel[(_cdiv(tokens, tile["TOKENS"]),)](
                pointers, query, mixture, maximum, normaliser, norm_weight, result, None, None, None,
                tokens, len(sources), float(multiplier), eps, norm_eps,
                HAS_PHASE=mixture is not None, HAS_NORM=norm_weight is not None, KEEPS_STATISTICS=False,
                **_sizes(pointers, width), **tile,
            )  # fmt: skip
    return result


__all__ = ["MAX_WIDTH", "common_dtype", "fused_depth_attention", "kernels_available", "phase_one", "read_fused"]
