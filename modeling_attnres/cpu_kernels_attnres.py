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
_PLAIN = (Tensor, nn.Parameter)  # and no subclass: those of other devices, distributed or quantised tensors


@cache
def has_numba() -> bool:
    """Whether it is installed, without importing it."""
    return find_spec("numba") is not None


@cache
def loops() -> Callable[..., None] | None:
    """Runs the compiled loops; `None` where `numba` is not installed. Importing it takes a while: at first use."""
    if not has_numba():
        return None
    try:
        from .cpu_loops_attnres import run
    except ImportError as error:
        logger.warning("Depth attention does without `numba`, which is installed but cannot be imported: %s", error)
        return None
    return run


def cpu_kernels_serve(query: Tensor, sources: Sequence[Tensor]) -> bool:
    """Whether the kernels compute this: plain tensors in memory, sources all of float32 or all of bfloat16; `numba`."""
    if torch.compiler.is_compiling() or type(query) not in _PLAIN or query.dtype == torch.float64 or not query.is_cpu:
        return False  # compiled, operations are fused
    if not all(kernels_take(source, sources) for source in sources):
        return False
    return is_computed_now() and loops() is not None


def kernels_take(source: Tensor, sources: Sequence[Tensor]) -> bool:
    """Whether the kernels take one of the `sources`."""
    dtype = sources[0].dtype
    if type(source) not in _PLAIN or source.dtype is not dtype or dtype not in _SERVED or not source.is_cpu:
        return False
    return source.shape[-1] >= _WIDE or len(sources) * source.numel() >= _MANY


def is_computed_now() -> bool:
    """Whether tensors have numbers: not where `torch.func` or a tracer look at the operations alone."""
    return torch._C._functorch.maybe_current_level() is None and torch._C._get_tracing_state() is None


def norm_served(weight: Tensor, sources: Sequence[Tensor]) -> bool:
    """Whether the kernels compute a plain norm (`plain_attnres`) with this weight too: it has to be as the sources."""
    return type(weight) in _PLAIN and weight.dtype is sources[0].dtype and weight.is_cpu and weight.is_contiguous()


def depth_attention_on_cpu(
    query: Tensor,
    key_norm_weight: Tensor | None,
    eps: float,
    is_sum: bool,
    sources: Sequence[Tensor],
    norm: nn.Module | None = None,
    passes_on: bool = False,
) -> tuple[Tensor, Tensor | None, Sequence[Tensor]]:
    """The result `[..., D]` in the sources' dtype and the weights `[n, ...]` in float32; or its `norm`, and `None`.

    Third, the sources: those given or, if it `passes_on`, such that what is computed of them has its gradient added
    to ours by the kernel as it writes that, and not by a pass of its own.
    """
    norm_weight, norm_eps = (None, 0.0) if norm is None else (norm.weight, norm.variance_epsilon)
    if not torch.is_grad_enabled():
        return *_forward(query, key_norm_weight, eps, is_sum, norm_weight, norm_eps, sources), sources
    query = query.float() if key_norm_weight is None else query.float() * key_norm_weight.float()
    result, weights, *later = _DepthAttentionOnCpu.apply(query, eps, is_sum, norm_weight, norm_eps, passes_on, *sources)
    return result, weights, tuple(later) or sources


def phase_one_on_cpu(queries: Tensor, eps: float, sources: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The queries of several sublayers, `w * g`, `[G, D]` in float32, against sources that all of them read.

        m_q = max_i l_qi,   z_q = sum_i exp(l_qi - m_q),   u_q = sum_i exp(l_qi - m_q) s_i,   l_qi = q . RMSNorm(s_i)

    Returns:
        `u` `[G, ..., D]`, and `(m, z)` `[G, ..., 2]`, in float32; an entry of each is what `phase_two_on_cpu` takes.
    """
    shape = sources[0].shape
    sums, statistics = torch.empty(len(queries), *shape), torch.empty(len(queries), *shape[:-1], 2)
    tensors = [_vector(queries), sums, statistics, *(source.contiguous() for source in sources)]
    _run("phase one", sources[0], len(sources), len(queries), _addresses(tensors), eps)
    return sums, statistics


def run_forward(
    result: Tensor,
    multiplier: int,
    query: int,
    phase: tuple[int, int],
    sources: Sequence[int],
    eps: float,
    norm_weight: int,
    norm_eps: float,
) -> None:
    """Write the `result` `[..., D]`, or what a norm makes of it.

    Args:
        multiplier: the number of all sources for the scale `sum`, one for `mean`.
        query: address of `w * g`, `[D]` in float32.
        phase: addresses of the query's part of what phase one returned for other sources; zeros without.
        sources: addresses of the sources that are read here.
        norm_weight: address of the weight of a plain RMSNorm, `[D]`, of numbers like the result's; zero without.
    """
    addresses = (query, result.data_ptr(), 0, 0, norm_weight, *phase, *sources)
    _run("forward", result, len(sources), multiplier, addresses, eps, norm_eps)


class _DepthAttentionOnCpu(torch.autograd.Function):
    """Keeps nothing but the sources: all statistics are computed again from a row that has to be read anyway."""

    @staticmethod
    def forward(
        ctx,
        query: Tensor,
        eps: float,
        is_sum: bool,
        norm_weight: Tensor | None,
        norm_eps: float,
        passes_on: bool,
        *sources: Tensor,
    ):
        ctx.save_for_backward(query, norm_weight, *sources)
        ctx.eps, ctx.is_sum, ctx.norm_eps = eps, is_sum, norm_eps
        ctx.set_materialize_grads(False)
        result = _forward(query, None, eps, is_sum, norm_weight, norm_eps, sources)
        if not passes_on:
            return result
        ctx.mark_non_differentiable(*(s for s, wanted in zip(sources, ctx.needs_input_grad[6:]) if not wanted))
        return *result, *sources

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor | None, grad_weights: Tensor | None, *later_grads: Tensor | None):
        query, norm_weight, *sources = ctx.saved_tensors
        sources = [source.contiguous() for source in sources]
        grad = torch.zeros_like(sources[0]) if grad is None else grad.contiguous()
        grad_weights = None if grad_weights is None else grad_weights.contiguous()
        later_grads = [None if later is None else later.contiguous() for later in later_grads or [None] * len(sources)]
        grad_sources = [torch.empty_like(s) if wanted else None for s, wanted in zip(sources, ctx.needs_input_grad[6:])]
        # A row for each chunk, added up in order: the result does not depend on the number of threads.
        grad_query = torch.zeros(_chunks(_tokens(grad)), query.numel())
        grad_norm = None if norm_weight is None else torch.zeros_like(grad_query)
        tensors = [_vector(query), grad, grad_weights, grad_query, norm_weight, grad_norm]
        tensors += [*sources, *grad_sources, *later_grads]
        multiplier = len(sources) if ctx.is_sum else 1
        _run("backward", grad, len(sources), multiplier, _addresses(tensors), ctx.eps, ctx.norm_eps)
        if grad_norm is not None:
            grad_norm = grad_norm.sum(0).to(norm_weight.dtype)
        return grad_query.sum(0).view(query.shape), None, None, grad_norm, None, None, *grad_sources


def _forward(
    query: Tensor,
    key_norm_weight: Tensor | None,
    eps: float,
    is_sum: bool,
    norm_weight: Tensor | None,
    norm_eps: float,
    sources: Sequence[Tensor],
) -> tuple[Tensor, Tensor | None]:
    first, key_norm = sources[0], None if key_norm_weight is None else _vector(key_norm_weight)
    result = torch.empty_like(first, memory_format=torch.contiguous_format)
    weights = torch.empty(len(sources), *first.shape[:-1]) if norm_weight is None else None
    n, sources = len(sources), [source.contiguous() for source in sources]
    tensors = [_vector(query), result, weights, key_norm, norm_weight, None, None, *sources]
    _run("forward", first, n, n if is_sum else 1, _addresses(tensors), eps, norm_eps)
    return result, weights


def _vector(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float32 and tensor.is_contiguous() else tensor.float().contiguous()


def _addresses(tensors: Sequence[Tensor | None]) -> list[int]:
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


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
    addresses: Sequence[int],
    eps: float,
    norm_eps: float = 0.0,
) -> None:
    """Run a loop on rows like those of `rows`, with so many sources, and a number that the loop knows."""
    tokens, width, is_half = _tokens(rows), rows.shape[-1], rows.dtype == torch.bfloat16
    # One argument: to look at the types of many takes longer than a token's depth attention.
    arguments = array("q", (tokens, width, sources, number, width * (2 if is_half else 4), *addresses))
    loops()(loop, _chunks(tokens), arguments.buffer_info()[0], eps, norm_eps, is_half)


__all__ = [
    "cpu_kernels_serve",
    "depth_attention_on_cpu",
    "has_numba",
    "is_computed_now",
    "kernels_take",
    "loops",
    "norm_served",
    "phase_one_on_cpu",
    "run_forward",
]
