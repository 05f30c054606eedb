"""The derivative of depth attention, around kernels: what autograd wants to know, in one place for all of them.

A backward pass runs a kernel. Where somebody differentiates that pass too (`create_graph=True`), PyTorch's operations
compute it again from the query and the sources, which is the same to rounding.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def differentiable(forward: Callable, backward: Callable) -> Callable[..., tuple[Tensor, Tensor, Sequence[Tensor]]]:
    """[`Implementation.run`] of two kernels, neither of which is differentiable by itself.

    Args:
        forward: `(query, sources, eps, is_sum) -> (h, a, saved)`, where `saved` is a tuple of tensors for `backward`.
        backward: `(grad, grad_weights, later_grads, query, sources, saved, eps, is_sum, needs_query, needs_sources)
            -> (grad_query, grad_sources)`. `grad` is that of `h`; `grad_weights` that of `a`, or `None`; `later_grads`,
            one for each source or `None`, are added to what is returned for it. `needs_sources` says for which sources
            a gradient is wanted: for the others, and for a query without `needs_query`, `None` is returned. The
            gradients may have any strides.
    """

    class DepthAttention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *arguments: Tensor | float | bool) -> tuple[Tensor, ...]:
            # Not in the signature: `torch.compile` counts parameters to see whether `ctx` is one of them, and with
            # `(ctx, query, eps, is_sum, *sources)` two sources make it think not.
            query, eps, is_sum, fuse_later_grads, *sources = arguments
            result, weights, saved = forward(query, sources, eps, is_sum)
            ctx.save_for_backward(query, *sources, *saved)
            ctx.eps, ctx.is_sum, ctx.count = eps, is_sum, len(sources)
            ctx.set_materialize_grads(False)
            if not fuse_later_grads:
                return result, weights
            ctx.mark_non_differentiable(*(s for s, needed in zip(sources, ctx.needs_input_grad[4:]) if not needed))
            return result, weights, *sources

        @staticmethod
        def backward(ctx, grad: Tensor | None, grad_weights: Tensor | None, *later_grads: Tensor | None):
            query, *tensors = ctx.saved_tensors
            sources, saved = tensors[: ctx.count], tensors[ctx.count :]
            later_grads = list(later_grads) or [None] * ctx.count
            needs_query, needs_sources = ctx.needs_input_grad[0], ctx.needs_input_grad[4:]
            if grad is None:
                grad = torch.zeros_like(sources[0])
            elif grad.is_sparse:
                grad = grad.to_dense()
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                grad_query, grad_sources = _differentiable_backward(
                    grad, grad_weights, query, sources, ctx.eps, ctx.is_sum, needs_query, needs_sources
                )
                grad_sources = [_sum(*both) for both in zip(grad_sources, later_grads)]
            else:
                grad_query, grad_sources = backward(
                    grad, grad_weights, later_grads, query, sources, saved, ctx.eps, ctx.is_sum, needs_query,
                    needs_sources,
                )  # fmt: skip
            return grad_query, None, None, None, *grad_sources

    def run(
        query: Tensor, sources: Sequence[Tensor], eps: float, is_sum: bool, fuse_later_grads: bool = False
    ) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        if not torch.is_grad_enabled():
            result, weights, _ = forward(query, sources, eps, is_sum)
            return result, weights, sources
        result, weights, *later = DepthAttention.apply(query, eps, is_sum, fuse_later_grads, *sources)
        return result, weights, tuple(later) or sources

    return run


def depth_attention_in_operations(
    query: Tensor, sources: Sequence[Tensor], eps: float, is_sum: bool
) -> tuple[Tensor, Tensor]:
    """`h` and `a` by PyTorch's operations, each of which is differentiable any number of times."""
    values = torch.stack([source.to(query.dtype) for source in sources])  # (n, ..., D)
    logits = (values * query).sum(-1) * (values.square().mean(-1) + eps).rsqrt()  # (n, ...)
    weights = logits.softmax(0)
    result = (weights.unsqueeze(-1) * values).sum(0)
    return (result * len(sources) if is_sum else result).to(sources[0].dtype), weights


def _differentiable_backward(
    grad: Tensor,
    grad_weights: Tensor | None,
    query: Tensor,
    sources: Sequence[Tensor],
    eps: float,
    is_sum: bool,
    needs_query: bool,
    needs_sources: Sequence[bool],
) -> tuple[Tensor | None, list[Tensor | None]]:
    # Views, since one source may have been computed from another: only what goes through this read is ours.
    leaves = [tensor.view_as(tensor) for tensor in (query, *sources)]
    needed = [needs_query, *needs_sources]
    outputs = depth_attention_in_operations(leaves[0], leaves[1:], eps, is_sum)
    outputs, grads = zip(*[pair for pair in zip(outputs, (grad, grad_weights)) if pair[1] is not None])
    wanted = [leaf for leaf, is_needed in zip(leaves, needed) if is_needed]
    found = iter(torch.autograd.grad(outputs, wanted, grads, create_graph=True))
    grad_query, *grad_sources = [next(found) if is_needed else None for is_needed in needed]
    return grad_query, grad_sources


def _sum(ours: Tensor | None, later: Tensor | None) -> Tensor | None:
    return ours if later is None or ours is None else ours + later


__all__ = ["depth_attention_in_operations", "differentiable"]
