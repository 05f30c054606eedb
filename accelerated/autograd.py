"""Make kernels differentiable, in the same way for every implementation.

A backward pass runs a kernel. If that pass is differentiated itself (`create_graph=True`), PyTorch's operations compute
it from the query and the sources instead; the two are equal up to rounding.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class BackwardRequest(NamedTuple):
    """The inputs of one backward pass, and the gradients that are needed.

    Args:
        grad: gradient of `h`, `[..., D]`, of any strides.
        grad_weights: gradient of `a`, `[n, ...]`, or `None` for zeros.
        later_grads: for each source the gradient `[..., D]` from later reads, or `None` for zeros. The backward pass
            must add it to the gradient that it returns for the source.
        query: `w * g`, `[D]` in float32.
        sources: the n sources `[..., D]`.
        saved: tensors that the forward pass has saved.
        eps: epsilon of the key norm.
        is_sum: whether the result was multiplied by n.
        needs_query: whether the query's gradient is needed.
        needs_sources: for each source, whether its gradient is needed.
    """

    grad: Tensor
    grad_weights: Tensor | None
    later_grads: Sequence[Tensor | None]
    query: Tensor
    sources: Sequence[Tensor]
    saved: Sequence[Tensor]
    eps: float
    is_sum: bool
    needs_query: bool
    needs_sources: Sequence[bool]


# Gradients of the query and of each source; `None` for those that are not needed.
Gradients = tuple[Tensor | None, list[Tensor | None]]


def differentiable(
    forward: Callable[[Tensor, Sequence[Tensor], float, bool], tuple[Tensor, Tensor, tuple[Tensor, ...]]],
    backward: Callable[[BackwardRequest], Gradients],
) -> Callable[..., tuple[Tensor, Tensor, Sequence[Tensor]]]:
    """Make [`Implementation.run`] of two kernels, which autograd cannot differentiate.

    Args:
        forward: `(query, sources, eps, is_sum) -> (h, a, saved)`, where `saved` are tensors for `backward`.
        backward: `(request) -> (grad_query, grad_sources)`; see [`BackwardRequest`] and [`Gradients`].
    """

    class DepthAttentionFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *arguments: Any) -> tuple[Tensor, ...]:
            # Unpacked here, because `torch.compile` counts the parameters of the signature to see whether `ctx` is one
            # of them. It would mistake `(ctx, query, eps, is_sum, *sources)` with two sources for one without `ctx`.
            query, eps, is_sum, fuse_later_grads, *sources = arguments
            result, weights, saved = forward(query, sources, eps, is_sum)
            ctx.save_for_backward(query, *sources, *saved)
            ctx.eps, ctx.is_sum, ctx.count = eps, is_sum, len(sources)
            ctx.set_materialize_grads(False)  # missing gradients are `None`, not tensors of zeros
            if not fuse_later_grads:
                return result, weights
            return result, weights, *_sources_for_later_reads(ctx, sources, ctx.needs_input_grad[4:])

        @staticmethod
        def backward(ctx, grad: Tensor | None, grad_weights: Tensor | None, *later: Tensor | None):
            query, *tensors = ctx.saved_tensors
            sources, saved = tensors[: ctx.count], tensors[ctx.count :]
            later_grads = list(later) or [None] * ctx.count
            needs_query, needs_sources = ctx.needs_input_grad[0], ctx.needs_input_grad[4:]
            if grad is None:
                grad = torch.zeros_like(sources[0])
            elif grad.is_sparse:
                grad = grad.to_dense()
            request = BackwardRequest(
                grad, grad_weights, later_grads, query, sources, saved, ctx.eps, ctx.is_sum, needs_query, needs_sources
            )
            is_differentiated = torch.is_grad_enabled() and not torch.compiler.is_compiling()
            grad_query, grad_sources = (differentiable_backward if is_differentiated else backward)(request)
            return grad_query, None, None, None, *grad_sources

    apply_directly = _apply_untransformed(DepthAttentionFunction)

    def run(
        query: Tensor, sources: Sequence[Tensor], eps: float, is_sum: bool, fuse_later_grads: bool = False
    ) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        if not torch.is_grad_enabled():
            result, weights, _ = forward(query, sources, eps, is_sum)
            return result, weights, sources
        # Implementations that run outside a compiler have asked whether a transform of torch.func is active.
        apply = DepthAttentionFunction.apply if torch.compiler.is_compiling() else apply_directly
        result, weights, *later = apply(query, eps, is_sum, fuse_later_grads, *sources)
        return result, weights, tuple(later) or sources

    return run


def _apply_untransformed(function: type[torch.autograd.Function]) -> Callable:
    """Return `function.apply` for callers that know that no transform of torch.func is active.

    `apply` asks each argument whether a transform wraps it. For many sources that takes as long as all else it does.
    """
    # pyrefly: ignore[missing-attribute]  # the base is written in C++, and its stub lacks the method
    return super(torch.autograd.Function, function).apply


def _sources_for_later_reads(ctx: Any, sources: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor]:
    """Return aliases of the sources as outputs of this node.

    Later reads use them, so the node's backward pass receives those reads' gradients.

    Args:
        ctx: the context of the node's forward pass.
        sources: inputs of the node.
        needed: for each source, whether its gradient is needed.
    """
    # A node turns an input that is returned into a view of it, which takes longer than an alias.
    later = [*sources] if torch.compiler.is_compiling() else [*map(Tensor.detach, sources)]
    if not all(needed):
        ctx.mark_non_differentiable(*(source for source, is_needed in zip(later, needed) if not is_needed))
    return later


def depth_attention_in_operations(
    query: Tensor, sources: Sequence[Tensor], eps: float, is_sum: bool
) -> tuple[Tensor, Tensor]:
    """Compute `h` and `a` by PyTorch's operations, which can be differentiated any number of times.

    The models' `reference` computes the same. `accelerated` may not import it.

    Args:
        query: `w * g`, `[D]` in float32.
        sources: n tensors `[..., D]` of one shape.
        eps: epsilon of the key norm.
        is_sum: whether to multiply the result by n.

    Returns:
        `h` `[..., D]` in the sources' dtype, `a` `[n, ...]` in the query's.
    """
    values = torch.stack([source.to(query.dtype) for source in sources])  # (n, ..., D)
    logits = (values * query).sum(-1) * (values.square().mean(-1) + eps).rsqrt()  # (n, ...)
    weights = logits.softmax(0)
    result = (weights.unsqueeze(-1) * values).sum(0)
    return (result * len(sources) if is_sum else result).to(sources[0].dtype), weights


class FollowingNorm(NamedTuple):
    """An RMSNorm that a kernel applies to the result: `weight * (h * rsqrt(mean(h^2) + eps))`.

    Args:
        weight: `[D]`, in the dtype of the result.
        eps: epsilon of this norm.
    """

    weight: Tensor
    eps: float


def differentiable_backward(request: BackwardRequest) -> Gradients:
    """Compute the gradients by operations that can be differentiated in turn."""
    grad_query, grad_sources, _ = differentiable_grads(request)
    return grad_query, grad_sources


def differentiable_grads(
    request: BackwardRequest, norm: FollowingNorm | None = None
) -> tuple[Tensor | None, list[Tensor | None], Tensor | None]:
    """Compute the gradients of the query, the sources and a following norm's weight, to be differentiated in turn.

    Args:
        request: its `grad` is that of the norm's result, if there is a norm.
        norm: the norm. The gradient of its weight is computed if the weight needs one.
    """
    # One source may have been computed from another. Views keep the gradient to what flows through this read.
    weight = () if norm is None else (norm.weight,)
    leaves = [tensor.view_as(tensor) for tensor in (request.query, *request.sources, *weight)]
    count = 1 + len(request.sources)
    needed = [request.needs_query, *request.needs_sources, *(tensor.requires_grad for tensor in weight)]
    result, weights = depth_attention_in_operations(leaves[0], leaves[1:count], request.eps, request.is_sum)
    if norm is not None:
        result = rms_norm_in_operations(result, FollowingNorm(leaves[count], norm.eps))
    pairs = [pair for pair in zip((result, weights), (request.grad, request.grad_weights)) if pair[1] is not None]
    outputs, grads = zip(*pairs)
    needed_leaves = [leaf for leaf, is_needed in zip(leaves, needed) if is_needed]
    computed = iter(torch.autograd.grad(outputs, needed_leaves, grads, create_graph=True))
    grad_query, *others = [next(computed) if is_needed else None for is_needed in needed]
    grad_sources = [add_later_grad(*both) for both in zip(others[: count - 1], request.later_grads)]
    return grad_query, grad_sources, others[-1] if weight else None


def rms_norm_in_operations(x: Tensor, norm: FollowingNorm) -> Tensor:
    """Compute the norm of `x` `[..., D]` by PyTorch's operations, with the roundings of the norms of `transformers`."""
    wide = x.to(torch.float32)
    return norm.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)).to(x.dtype)


def norm_grads_in_operations(grad: Tensor, x: Tensor, norm: FollowingNorm) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `x` `[..., D]` and of the norm's weight `[D]`, each in its dtype."""
    wide, grad = x.to(torch.float32), grad.to(torch.float32)
    inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    normed = wide * inverse_rms
    grad_weight = (grad * normed.to(x.dtype)).reshape(-1, x.shape[-1]).sum(0)
    scaled = grad * norm.weight
    grad_x = inverse_rms * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    return grad_x.to(x.dtype), grad_weight.to(norm.weight.dtype)


def add_later_grad(grad: Tensor | None, later: Tensor | None) -> Tensor | None:
    """Add the gradient from later reads to a source's gradient; return `None` if the latter is not needed."""
    return grad if later is None or grad is None else grad + later


__all__ = [
    "BackwardRequest",
    "FollowingNorm",
    "Gradients",
    "add_later_grad",
    "depth_attention_in_operations",
    "differentiable",
    "differentiable_backward",
    "differentiable_grads",
    "norm_grads_in_operations",
    "rms_norm_in_operations",
]
