"""A read in training together with the norm that a sublayer begins with, as one node of autograd.

    y = g' h / sqrt(mean(h^2) + eps'),   h = sum_i a_i s_i

The norm takes about twenty operations of PyTorch forward and backward. In a narrow model these take longer than the
read. Here the norm is computed while the rows of a token are in the processor's cache, and nothing of it is kept but
one number of each token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..autograd import BackwardRequest, FollowingNorm, differentiable_grads
from . import call, kernels


def read_with_norm(
    query: Tensor,
    key_norm_weight: Tensor,
    norm_weight: Tensor,
    sources: Sequence[Tensor],
    eps: float,
    norm_eps: float,
    is_sum: bool,
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """Compute a read and a plain RMSNorm of it by the compiled loops.

    The backward pass adds the gradients of later reads, which must take the returned sources.

    Args:
        query: `w`, `[1, D]`.
        key_norm_weight: `g` `[D]`.
        norm_weight: weight `[D]` of the norm.
        sources: n >= 1 tensors `[..., D]` that `supports` accepts.
        eps: epsilon of the key norm.
        norm_eps: epsilon of the norm.
        is_sum: whether to multiply the result by n.

    Returns:
        The normed result `[..., D]`, and the sources for the next read; `None` for weights or sources that the loops do
        not take as they are.
    """
    shape, dtype = sources[0].shape, sources[0].dtype
    width = shape[-1:]
    if any(source.shape != shape for source in sources) or norm_weight.dtype is not dtype:
        return None
    if query.shape != (1, *width) or key_norm_weight.shape != width or norm_weight.shape != width:
        return None
    for weight in (query, key_norm_weight, norm_weight):
        if weight.dtype not in call.DTYPES or call.why_unfit(weight) is not None or not weight.is_contiguous():
            return None
    # One argument for all that is no tensor, because autograd looks at each.
    result, *later = _NormedRead.apply((eps, norm_eps, is_sum), query, key_norm_weight, norm_weight, *sources)
    return result, tuple(later)


class _NormedRead(torch.autograd.Function):
    """A read and the norm after it. It saves its inputs, and `3 n + 1` numbers of each token."""

    @staticmethod
    def forward(
        ctx,
        numbers: tuple[float, float, bool],
        query: Tensor,
        key_norm_weight: Tensor,
        norm_weight: Tensor,
        *sources: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the normed result and the sources."""
        eps, norm_eps, is_sum = ctx.numbers = numbers
        folded = _folded(query, key_norm_weight)
        result, kept = kernels.forward_with_norm(folded, sources, eps, is_sum, norm_weight, norm_eps)
        ctx.save_for_backward(query, key_norm_weight, norm_weight, kept, *sources)
        ctx.set_materialize_grads(False)  # missing gradients are `None`, not tensors of zeros
        # As outputs of this node, the sources bring the gradients of later reads to its backward pass.
        needed = ctx.needs_input_grad[4:]
        ctx.mark_non_differentiable(*(source for source, is_needed in zip(sources, needed) if not is_needed))
        return result, *sources

    @staticmethod
    def backward(ctx, grad: Tensor | None, *later_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of the query, of the weights of both norms, and of the sources."""
        if grad is None:  # only later reads have gradients
            return None, None, None, None, *later_grads
        query, key_norm_weight, norm_weight, kept, *sources = ctx.saved_tensors
        _, needs_query, needs_key_norm, needs_norm, *needs_sources = ctx.needs_input_grad
        eps, norm_eps, is_sum = ctx.numbers
        request = BackwardRequest(
            grad=grad.to_dense() if grad.is_sparse else grad,
            grad_weights=None,
            later_grads=later_grads,
            query=_folded(query, key_norm_weight),
            sources=sources,
            saved=(kept,),
            eps=eps,
            is_sum=is_sum,
            needs_query=needs_query or needs_key_norm,
            needs_sources=needs_sources,
        )
        if torch.is_grad_enabled():
            grad_folded, grad_sources, grad_norm = differentiable_grads(request, FollowingNorm(norm_weight, norm_eps))
        else:
            grad_folded, grad_norm, grad_sources = kernels.backward_with_norm(request, norm_weight)
        return (
            None,
            (grad_folded * key_norm_weight).to(query.dtype).view_as(query) if needs_query else None,
            (grad_folded * query.view(-1)).to(key_norm_weight.dtype) if needs_key_norm else None,
            grad_norm.to(norm_weight.dtype) if needs_norm and grad_norm is not None else None,
            *grad_sources,
        )


def _folded(query: Tensor, key_norm_weight: Tensor) -> Tensor:
    """Return `w * g` `[D]` in float32."""
    return query.view(-1).to(torch.float32) * key_norm_weight.to(torch.float32)


__all__ = ["read_with_norm"]
