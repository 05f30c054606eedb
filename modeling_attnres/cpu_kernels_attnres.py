"""Depth attention on a CPU in one pass: every source is read from memory once, and every result written once.

A token's rows fit into the cache next to the core, where all else happens; PyTorch's operations would each read all
tokens of a source from memory. Needs `numba`, which is optional (the extra `cpu`).
"""

from array import array
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from transformers.utils import logging

logger = logging.get_logger(__name__)

_TOKENS_IN_PARALLEL = 16  # fewer are not worth waking other threads
# A toy is not worth the seconds that the loops take to load. By size alone: the same call gives the same bits.
_WIDE, _MANY = 256, 1 << 15  # numbers in a row, and in all sources
_SERVED = (torch.float32, torch.bfloat16)
Phase = tuple[Tensor, Tensor]  # what `phase_one_on_cpu` returns
_PLAIN = (Tensor, nn.Parameter)  # and no subclass: those of other devices, distributed or quantised tensors


@cache
def loops() -> Callable[..., None] | None:
    """Runs the compiled loops; `None` where `numba` is not installed. Importing it takes a while: at first use."""
    if find_spec("numba") is None:
        return None
    try:
        from .cpu_loops_attnres import run
    except ImportError as error:
        logger.warning("Depth attention does without `numba`, which is installed but cannot be imported: %s", error)
        return None
    return run


def cpu_kernels_serve(query: Tensor, sources: Sequence[Tensor]) -> bool:
    """Whether the kernels compute this: plain tensors in memory, sources all of float32 or all of bfloat16; `numba`."""
    if torch.compiler.is_compiling():
        return False  # operations are fused then
    first, dtype = sources[0], sources[0].dtype
    if dtype not in _SERVED or query.dtype == torch.float64:
        return False
    if (first.shape[-1] < _WIDE and len(sources) * first.numel() < _MANY) or loops() is None:
        return False
    for tensor in (*sources, query):
        if type(tensor) not in _PLAIN or not tensor.is_cpu or (tensor.dtype != dtype and tensor is not query):
            return False
    return torch._C._functorch.maybe_current_level() is None  # the tensors of `torch.func` have no address


def norm_served(norm: nn.Module, sources: Sequence[Tensor]) -> bool:
    """Whether the kernels compute this plain norm (`norms_attnres`) too: its weight has to be as the sources are."""
    weight = norm.weight
    return type(weight) in _PLAIN and weight.dtype == sources[0].dtype and weight.is_contiguous()


def depth_attention_on_cpu(
    query: Tensor,
    key_norm_weight: Tensor | None,
    eps: float,
    is_sum: bool,
    sources: Sequence[Tensor],
    norm: nn.Module | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The result `[..., D]` in the sources' dtype and the weights `[n, ...]` in float32; or its `norm`, and `None`."""
    norm_weight, norm_eps = (None, 0.0) if norm is None else (norm.weight, norm.variance_epsilon)
    if not torch.is_grad_enabled():
        return _forward(query, key_norm_weight, eps, is_sum, norm_weight, norm_eps, sources)
    query = query.float() if key_norm_weight is None else query.float() * key_norm_weight.float()
    return _DepthAttentionOnCpu.apply(query, eps, is_sum, norm_weight, norm_eps, *sources)


def phase_one_on_cpu(queries: Tensor, eps: float, sources: Sequence[Tensor]) -> Phase:
    """The queries of several sublayers, `w * g`, `[G, D]` in float32, against sources that all of them read.

        m_q = max_i l_qi,   z_q = sum_i exp(l_qi - m_q),   u_q = sum_i exp(l_qi - m_q) s_i,   l_qi = q . RMSNorm(s_i)

    Returns:
        `u` `[G, ..., D]`, and `(m, z)` `[G, ..., 2]`, in float32; an entry of each is what `phase_two_on_cpu` takes.
    """
    shape = sources[0].shape
    sums, statistics = torch.empty(len(queries), *shape), torch.empty(len(queries), *shape[:-1], 2)
    tensors = [_vector(queries), sums, statistics, *(source.contiguous() for source in sources)]
    _run("phase one", sources[0], len(sources), len(queries), tensors, eps)
    return sums, statistics


def phase_two_on_cpu(
    query: Tensor,
    eps: float,
    multiplier: int,
    phase: Phase,
    dtype: torch.dtype,
    fresh: Sequence[Tensor],
    norm: nn.Module | None,
) -> Tensor:
    """The result `[..., D]`, or its `norm`, of one of phase one's queries `[D]`: of the sources there and the `fresh`.

    `multiplier` is the number of all of them for the scale `sum`, and one for `mean`.
    """
    norm_weight, norm_eps = (None, 0.0) if norm is None else (norm.weight, norm.variance_epsilon)
    result = torch.empty(phase[0].shape, dtype=dtype)
    tensors = [query, result, None, None, norm_weight, *phase, *(source.contiguous() for source in fresh)]
    _run("forward", result, len(fresh), multiplier, tensors, eps, norm_eps)
    return result


class _DepthAttentionOnCpu(torch.autograd.Function):
    """Keeps nothing but the sources: all statistics are computed again from a row that has to be read anyway."""

    @staticmethod
    def forward(ctx, query: Tensor, eps: float, is_sum: bool, norm_weight: Tensor | None, norm_eps: float, *sources):
        ctx.save_for_backward(query, norm_weight, *sources)
        ctx.eps, ctx.is_sum, ctx.norm_eps = eps, is_sum, norm_eps
        ctx.set_materialize_grads(False)
        return _forward(query, None, eps, is_sum, norm_weight, norm_eps, sources)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor | None, grad_weights: Tensor | None):
        query, norm_weight, *sources = ctx.saved_tensors
        sources = [source.contiguous() for source in sources]
        grad = torch.zeros_like(sources[0]) if grad is None else grad.contiguous()
        grad_weights = None if grad_weights is None else grad_weights.contiguous()
        grad_sources = [torch.empty_like(s) if wanted else None for s, wanted in zip(sources, ctx.needs_input_grad[5:])]
        # A row for each chunk, added up in order: the result does not depend on the number of threads.
        grad_query = torch.zeros(_chunks(_tokens(grad)), query.numel())
        grad_norm = None if norm_weight is None else torch.zeros_like(grad_query)
        tensors = [_vector(query), grad, grad_weights, grad_query, norm_weight, grad_norm, *sources, *grad_sources]
        _run("backward", grad, len(sources), len(sources) if ctx.is_sum else 1, tensors, ctx.eps, ctx.norm_eps)
        if grad_norm is not None:
            grad_norm = grad_norm.sum(0).to(norm_weight.dtype)
        return grad_query.sum(0).view(query.shape), None, None, grad_norm, None, *grad_sources


def _forward(
    query: Tensor,
    key_norm_weight: Tensor | None,
    eps: float,
    is_sum: bool,
    norm_weight: Tensor | None,
    norm_eps: float,
    sources: Sequence[Tensor],
) -> tuple[Tensor, Tensor | None]:
    # In decoding these few lines, and no loop, are what a token costs: nothing here that is not needed.
    first, key_norm = sources[0], None if key_norm_weight is None else _vector(key_norm_weight)
    result = torch.empty_like(first, memory_format=torch.contiguous_format)
    weights = torch.empty(len(sources), *first.shape[:-1]) if norm_weight is None else None
    n, sources = len(sources), [source.contiguous() for source in sources]
    tensors = [_vector(query), result, weights, key_norm, norm_weight, None, None, *sources]
    _run("forward", first, n, n if is_sum else 1, tensors, eps, norm_eps)
    return result, weights


def _vector(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float32 and tensor.is_contiguous() else tensor.float().contiguous()


def _tokens(rows: Tensor) -> int:
    return rows.numel() // max(1, rows.shape[-1])


def _chunks(tokens: int) -> int:
    """Parts of the tokens that threads take one after another; one, or none, is done without them."""
    return min(64, -(-tokens // _TOKENS_IN_PARALLEL))


def _run(
    loop: str,
    rows: Tensor,
    sources: int,
    number: int,
    tensors: list[Tensor | None],
    eps: float,
    norm_eps: float = 0.0,
) -> None:
    """Run a loop on rows like those of `rows`, with so many sources, and a number that the loop knows."""
    tokens, width, is_half = _tokens(rows), rows.shape[-1], rows.dtype == torch.bfloat16
    # One argument: to look at the types of many takes longer than a token's depth attention.
    header = [tokens, width, sources, number, width * (2 if is_half else 4)]
    arguments = array("q", header + [0 if tensor is None else tensor.data_ptr() for tensor in tensors])
    loops()(loop, _chunks(tokens), arguments.buffer_info()[0], eps, norm_eps, is_half)


__all__ = ["cpu_kernels_serve", "depth_attention_on_cpu", "norm_served", "phase_one_on_cpu", "phase_two_on_cpu"]
