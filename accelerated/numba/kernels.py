"""Depth attention on a CPU in one pass: every source is read from memory once, and every result is written once.

The rows of one token fit into the cache next to the core, and all else happens there. PyTorch's operations would each
read all tokens of a source from memory. Every allocation names its dtype and device, because a program may have set
other defaults.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..autograd import BackwardRequest, Gradients
from ..tensors import packed
from . import call

_CPU = torch.device("cpu")  # faster to pass than the name


def forward(
    query: Tensor, sources: Sequence[Tensor], eps: float, is_sum: bool
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Compute the result `[..., D]` in the sources' dtype, and the weights `[n, ...]` in float32.

    Args:
        query: `w * g`, `[D]`.
        sources: n >= 1 tensors `[..., D]` of one shape and dtype.
        eps: epsilon of the key norm.
        is_sum: whether to multiply the result by n.

    Returns:
        The result, the weights, and what [`backward`] needs of each token: `[..., 3 n + 1]` in float32.
    """
    checked = call.checked(sources)
    shape, n = checked.shape, len(sources)
    result, weights = _empty(shape, checked.dtype), _empty((n, *shape[:-1]), torch.float32)
    kept = _empty((*shape[:-1], call.kept_size(n)), torch.float32)
    call.forward(_vector(query), checked, result, weights, n if is_sum else 1, eps, kept=kept)
    return result, weights, (kept,)


def forward_with_norm(
    query: Tensor, sources: Sequence[Tensor], eps: float, is_sum: bool, norm_weight: Tensor | None, norm_eps: float
) -> tuple[Tensor, Tensor]:
    """Compute the result `[..., D]`, with a norm applied to it if one is given.

    Args:
        query: as for [`forward`].
        sources: as for [`forward`].
        eps: as for [`forward`].
        is_sum: as for [`forward`].
        norm_weight: weight `[D]` of the norm, in the dtype of the sources; `None` for no norm.
        norm_eps: epsilon of the norm.

    Returns:
        The result, and what [`backward`] needs of each token.
    """
    checked = call.checked(sources)
    shape, n = checked.shape, len(sources)
    result = _empty(shape, checked.dtype)
    kept = _empty((*shape[:-1], call.kept_size(n)), torch.float32)
    call.forward(_vector(query), checked, result, None, n if is_sum else 1, eps, norm_weight, norm_eps, kept=kept)
    return result, kept


def backward(request: BackwardRequest) -> Gradients:
    """Compute the gradients that are needed; see [`BackwardRequest`]."""
    grad_query, _, grad_sources = backward_with_norm(request, None)
    return grad_query if request.needs_query else None, grad_sources


def backward_with_norm(
    request: BackwardRequest, norm_weight: Tensor | None
) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
    """Compute the gradients of the query, of the norm's weight, both `[D]` in float32, and of the sources.

    Args:
        request: as for [`backward`].
        norm_weight: the weight that [`forward_with_norm`] got; `None` after [`forward`].
    """
    checked = call.checked(request.sources)
    grad_sources = [_empty(checked.shape, checked.dtype) if needed else None for needed in request.needs_sources]
    # One row for each chunk of tokens, and a sum in their order, so that the result does not depend on the number of
    # threads.
    parts = 1 if norm_weight is None else 2
    rows = torch.zeros(parts, call.chunks(checked.shape), checked.shape[-1], dtype=torch.float32, device=_CPU)
    grad_query, grad_norm = rows[0], None if norm_weight is None else rows[1]
    call.backward(
        _vector(request.query),
        packed(request.grad),
        None if request.grad_weights is None else packed(request.grad_weights),
        grad_query,
        checked,
        grad_sources,
        [None if later is None else packed(later) for later in request.later_grads],
        len(request.sources) if request.is_sum else 1,
        request.saved[0],
        norm_weight,
        grad_norm,
    )
    sums = rows.sum(1)
    return sums[0], None if norm_weight is None else sums[1], grad_sources


def phase_one(queries: Tensor, eps: float, sources: call.CheckedSources) -> tuple[Tensor, Tensor]:
    """Compute phase 1: the queries of several sublayers against the sources that all of them read.

        m_q = max_i l_qi,   z_q = sum_i exp(l_qi - m_q),   u_q = sum_i exp(l_qi - m_q) s_i,   l_qi = q . RMSNorm(s_i)

    Args:
        queries: `w * g` of G sublayers, `[G, D]` in float32.
        eps: epsilon of the key norm.
        sources: the checked sources.

    Returns:
        `u` `[G, ..., D]`, and `(m, z)` `[G, ..., 2]`, in float32. `call.forward` continues from one entry of each.
    """
    sums = _empty((len(queries), *sources.shape), torch.float32)
    statistics = _empty((len(queries), *sources.shape[:-1], 2), torch.float32)
    call.phase_one(_vector(queries), sources, sums, statistics, eps)
    return sums, statistics


def trial(dtype: torch.dtype) -> None:
    """Compile the loops and run them once: the sum of two sources of ones must be two.

    Args:
        dtype: dtype of the sources.

    Raises:
        RuntimeError: the numbers are wrong.
    """
    ones = torch.ones(3, 5, dtype=dtype, device="cpu")
    query = torch.ones(5, dtype=torch.float32, device="cpu")
    result, weights, _ = forward(query, [ones, ones], 1e-6, True)
    if not (result == 2).all() or not (weights == 0.5).all():
        raise RuntimeError("the first call returned wrong numbers")


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=_CPU)


def _vector(tensor: Tensor) -> Tensor:
    """Return queries in float32, contiguous and without a pending negation."""
    is_ready = tensor.dtype is torch.float32 and tensor.is_contiguous() and not tensor.is_neg()
    return tensor if is_ready else packed(tensor.to(torch.float32))


__all__ = ["backward", "backward_with_norm", "forward", "forward_with_norm", "phase_one", "trial"]
