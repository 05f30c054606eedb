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
_IS_HALF = {torch.float32: False, torch.bfloat16: True}
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
    if dtype not in _IS_HALF or query.dtype == torch.float64:
        return False
    if (first.shape[-1] < _WIDE and len(sources) * first.numel() < _MANY) or loops() is None:
        return False
    for tensor in (*sources, query):
        if type(tensor) not in _PLAIN or not tensor.is_cpu or (tensor.dtype != dtype and tensor is not query):
            return False
    return torch._C._functorch.maybe_current_level() is None  # the tensors of `torch.func` have no address


def depth_attention_on_cpu(
    query: Tensor, key_norm_weight: Tensor | None, eps: float, is_sum: bool, sources: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """The result `[..., D]` in the sources' dtype, and the weights `[n, ...]` in float32."""
    if not torch.is_grad_enabled():
        return _forward(_vector(query), key_norm_weight, eps, is_sum, sources)
    query = query.float() if key_norm_weight is None else query.float() * key_norm_weight.float()
    return _DepthAttentionOnCpu.apply(_vector(query), eps, is_sum, *sources)


class _DepthAttentionOnCpu(torch.autograd.Function):
    """Keeps nothing but the sources: all statistics are computed again from a row that has to be read anyway."""

    @staticmethod
    def forward(ctx, query: Tensor, eps: float, is_sum: bool, *sources: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(query, *sources)
        ctx.eps, ctx.is_sum = eps, is_sum
        ctx.set_materialize_grads(False)
        return _forward(query, None, eps, is_sum, sources)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor | None, grad_weights: Tensor | None):
        query, *sources = (tensor.contiguous() for tensor in ctx.saved_tensors)
        grad = torch.zeros_like(sources[0]) if grad is None else grad.contiguous()
        grad_weights = None if grad_weights is None else grad_weights.contiguous()
        grad_sources = [torch.empty_like(s) if wanted else None for s, wanted in zip(sources, ctx.needs_input_grad[3:])]
        # A row for each chunk, added up in order: the result does not depend on the number of threads.
        grad_query = torch.zeros(_chunks(_tokens(grad)), len(query))
        tensors = [query, grad, grad_weights, grad_query, *sources, *grad_sources]
        _run(False, _tokens(grad), ctx.eps, ctx.is_sum, len(sources), tensors)
        return grad_query.sum(0), None, None, *grad_sources


def _forward(
    query: Tensor, key_norm_weight: Tensor | None, eps: float, is_sum: bool, sources: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    # In decoding these few lines, and no loop, are what a token costs: nothing here that is not needed.
    first, norm = sources[0], None if key_norm_weight is None else _vector(key_norm_weight)
    result, weights = torch.empty(first.shape, dtype=first.dtype), torch.empty(len(sources), *first.shape[:-1])
    tensors = [query, result, weights, norm, *(source.contiguous() for source in sources)]
    _run(True, _tokens(first), eps, is_sum, len(sources), tensors)
    return result, weights


def _vector(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float32 and tensor.is_contiguous() else tensor.float().contiguous()


def _tokens(rows: Tensor) -> int:
    return rows.numel() // max(1, rows.shape[-1])


def _chunks(tokens: int) -> int:
    """Parts of the tokens that threads take one after another; one, or none, is done without them."""
    return min(64, -(-tokens // _TOKENS_IN_PARALLEL))


def _run(is_forward: bool, tokens: int, eps: float, is_sum: bool, n: int, tensors: list[Tensor | None]) -> None:
    query, rows, chunks = tensors[0], tensors[1], _chunks(tokens)
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    # One argument: to look at the types of many takes longer than a token's depth attention.
    arguments = array("q", [tokens, len(query), n, is_sum, _IS_HALF[rows.dtype], *addresses])
    loops()(is_forward, chunks, arguments.buffer_info()[0], eps)


__all__ = ["cpu_kernels_serve", "depth_attention_on_cpu"]
