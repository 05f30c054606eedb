"""A read in training, with the norm that a sublayer begins with, as one node of autograd.

    y = g' h / sqrt(mean(h^2) + eps'),   h = sum_i a_i s_i

The norm takes about twenty operations of PyTorch forward and backward. In a narrow model these take longer than the
read. Here the norm is computed while the rows of a token are in the processor's cache, and nothing of it is kept but
one number of each token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..autograd import BackwardRequest, FollowingNorm, differentiable_grads
from ..plain import Read
from ..training_plan import TrainingPlan, make_training_plan
from . import call, kernels, support


def training_plan(reads: Sequence[Read]) -> TrainingPlan | None:
    """Make a plan that reads by the loops in a pass with gradients; see [`Implementation`]."""
    return make_training_plan(reads, read) if reads[0][0].weight.is_cpu else None


def read(
    query: Tensor,
    sources: Sequence[Tensor],
    key_norm_weight: Tensor,
    eps: float,
    is_sum: bool,
    fuse_later_grads: bool,
    norm: FollowingNorm | None,
) -> tuple[Tensor, None, tuple[Tensor, ...]] | None:
    """Compute a read, and a plain RMSNorm of it, by the compiled loops; see [`TrainingPlan`].

    Args:
        query: `w`, `[1, D]`.
        sources: n >= 1 tensors `[..., D]`.
        key_norm_weight: `g` `[D]`.
        eps: epsilon of the key norm.
        is_sum: whether to multiply the result by n.
        fuse_later_grads: always true: the backward pass adds the gradients of later reads, which must take the
            returned sources.
        norm: the norm, or `None`.

    Returns:
        The result `[..., D]`, normed if a norm is given; `None` for the depth weights, which are not kept; and the
        sources for the next read. `None` if the loops do not take the tensors as they are.
    """
    shape, dtype = sources[0].shape, sources[0].dtype
    width = shape[-1:]
    if not support.pays(query, sources) or any(source.shape != shape for source in sources):
        return None
    weights = [(query, (1, *width)), (key_norm_weight, width)]
    if norm is not None:
        if norm.weight.dtype is not dtype:
            return None
        weights.append((norm.weight, width))
    for weight, expected in weights:
        if weight.shape != expected or weight.dtype not in call.DTYPES or call.why_unfit(weight) is not None:
            return None
        if not weight.is_contiguous():
            return None
    if support.supports(query.detach().view(-1).to(torch.float32), sources) is not None:
        return None
    norm_weight, norm_eps = norm or (None, 0.0)
    # One argument for all that is no tensor, because autograd looks at each.
    result, *later = _Read.apply((eps, norm_eps, is_sum), query, key_norm_weight, norm_weight, *sources)
    return result, None, tuple(later)


class _Read(torch.autograd.Function):
    """A read, and the norm after it if there is one. It saves its inputs, and `3 n + 1` numbers of each token."""

    @staticmethod
    def forward(
        ctx,
        numbers: tuple[float, float, bool],
        query: Tensor,
        key_norm_weight: Tensor,
        norm_weight: Tensor | None,
        *sources: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the result and the sources."""
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
            norm = None if norm_weight is None else FollowingNorm(norm_weight, norm_eps)
            grad_folded, grad_sources, grad_norm = differentiable_grads(request, norm)
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


__all__ = ["read", "training_plan"]
