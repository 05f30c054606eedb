"""Depth attention on a CPU in one pass: every source is read from memory once, and every result written once.

A token's rows fit into the cache next to the core, where all else happens; PyTorch's operations would each read all
tokens of a source from memory. All that is allocated here says of which dtype and where: a program's defaults may be
others.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from . import call

_CPU = torch.device("cpu")  # quicker than its name


def forward(
    query: Tensor, sources: Sequence[Tensor], eps: float, is_sum: bool
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """The result `[..., D]` in the sources' dtype and the weights `[n, ...]` in float32.

    Nothing is saved for the backward pass: all statistics are computed again from rows that have to be read anyway.
    """
    rows = call.checked(sources)
    result, weights = _empty(rows.shape, rows.dtype), _empty((len(sources), *rows.shape[:-1]), torch.float32)
    call.forward(_vector(query), rows, result, weights, len(sources) if is_sum else 1, eps)
    return result, weights, ()


def backward(
    grad: Tensor,
    grad_weights: Tensor | None,
    later_grads: Sequence[Tensor | None],
    query: Tensor,
    sources: Sequence[Tensor],
    saved: Sequence[Tensor],
    eps: float,
    is_sum: bool,
    needs_query: bool,
    needs_sources: Sequence[bool],
) -> tuple[Tensor | None, list[Tensor | None]]:
    """The gradients, as [`autograd.differentiable`] wants them."""
    rows = call.checked(sources)
    grad_sources = [_empty(rows.shape, rows.dtype) if needed else None for needed in needs_sources]
    # A row for each chunk, added up in order: the result does not depend on the number of threads.
    grad_query = torch.zeros(call.chunks(rows.shape), rows.shape[-1], dtype=torch.float32, device="cpu")
    call.backward(
        _vector(query),
        _packed(grad),
        None if grad_weights is None else _packed(grad_weights),
        grad_query,
        rows,
        grad_sources,
        [None if later is None else _packed(later) for later in later_grads],
        len(sources) if is_sum else 1,
        eps,
    )
    return grad_query.sum(0) if needs_query else None, grad_sources


def phase_one(queries: Tensor, eps: float, rows: call.Sources) -> tuple[Tensor, Tensor]:
    """The queries of several sublayers, `w * g`, `[G, D]` in float32, against sources that all of them read.

        m_q = max_i l_qi,   z_q = sum_i exp(l_qi - m_q),   u_q = sum_i exp(l_qi - m_q) s_i,   l_qi = q . RMSNorm(s_i)

    Returns:
        `u` `[G, ..., D]`, and `(m, z)` `[G, ..., 2]`, in float32; an entry of each is what `call.forward` begins from.
    """
    sums = _empty((len(queries), *rows.shape), torch.float32)
    statistics = _empty((len(queries), *rows.shape[:-1], 2), torch.float32)
    call.phase_one(_vector(queries), rows, sums, statistics, eps)
    return sums, statistics


def trial(dtype: torch.dtype) -> None:
    """Compile and run: of two sources of ones the sum is two.

    Raises:
        RuntimeError: it is not.
    """
    ones = torch.ones(3, 5, dtype=dtype, device="cpu")
    query = torch.ones(5, dtype=torch.float32, device="cpu")
    result, weights, _ = forward(query, [ones, ones], 1e-6, True)
    if not (result == 2).all() or not (weights == 0.5).all():
        raise RuntimeError("a first call returned wrong numbers")


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=_CPU)


def _packed(tensor: Tensor) -> Tensor:
    return tensor.contiguous().resolve_neg()


def _vector(tensor: Tensor) -> Tensor:
    """Of float32, with its numbers in a row."""
    is_one = tensor.dtype is torch.float32 and tensor.is_contiguous() and not tensor.is_neg()
    return tensor if is_one else _packed(tensor.to(torch.float32))


__all__ = ["backward", "forward", "phase_one", "trial"]
