"""Depth attention: one sublayer's softmax attention over the outputs of earlier layers.

    h = sum_i a_i s_i,   a = softmax_i( w . (g * RMSNorm(s_i)) )                              (AttnRes, section 3)

`reference` is the equation line by line. `eager` computes the same in PyTorch without ever writing normalised keys.
[`DEPTH_ATTENTION`] holds all implementations by name; an installed `attnres.accelerated` adds faster ones.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.utils import logging
from transformers.utils.generic import GeneralInterface, maybe_autocast

try:
    import attnres.accelerated as accelerated
except ModuleNotFoundError:
    accelerated = None
# A copy of this file beside a checkpoint may be older or newer than the installed package. Both must have this number.
INTERFACE = 5
if accelerated is not None and accelerated.INTERFACE != INTERFACE:
    logging.get_logger(__name__).warning(
        f"The installed `attnres` has interface {accelerated.INTERFACE}, the model's code needs {INTERFACE}: it runs "
        "in plain PyTorch. Install the version that the checkpoint was saved with."
    )
    accelerated = None

# Result `[..., D]`, depth weights `[n, ...]`, and the sources for the next read.
Attended = tuple[Tensor, Tensor, Sequence[Tensor]]


def reference(
    query: Tensor, sources: Sequence[Tensor], key_norm_weight: Tensor | None, eps: float, is_sum: bool
) -> tuple[Tensor, Tensor]:
    """Compute depth attention by the equation, line by line.

    Args:
        query: `w` `[D]`.
        sources: n >= 1 tensors `[..., D]` of one shape.
        key_norm_weight: `g` `[D]`, or `None` for ones.
        eps: epsilon of the key norm.
        is_sum: whether to multiply the result by n (scale "sum").

    Returns:
        `h` `[..., D]` in the common dtype of the sources, and `a` `[n, ...]` in float32 or wider.
    """
    dtype, stat_dtype = dtypes_of(sources)
    values = torch.stack([source.to(stat_dtype) for source in sources])  # (n, ..., D)
    key_norm_weight = None if key_norm_weight is None else key_norm_weight.to(stat_dtype)
    keys = F.rms_norm(values, values.shape[-1:], key_norm_weight, eps)
    weights = (keys * query.to(stat_dtype)).sum(-1).softmax(0)  # (n, ...)
    result = (weights.unsqueeze(-1) * values).sum(0)
    return (result * len(sources) if is_sum else result).to(dtype), weights


def attend(
    query: Tensor,
    sources: Sequence[Tensor],
    key_norm_weight: Tensor | None,
    eps: float,
    is_sum: bool,
    implementation: str = "auto",
    fuse_later_grads: bool = False,
) -> Attended:
    """Compute [`reference`] by a named implementation.

    Args:
        query: `w`, D elements in any shape.
        sources: n >= 1 tensors `[..., D]`, which broadcast.
        key_norm_weight: `g` `[D]`, or `None` for ones.
        eps: epsilon of the key norm.
        is_sum: whether to multiply the result by n (scale "sum").
        implementation: a name of [`DEPTH_ATTENTION`].
        fuse_later_grads: whether the backward pass may add up the gradients of later reads of the returned sources.

    Returns:
        `h` `[..., D]`, `a` `[n, ...]`, and the sources for the next read, with the same values.

    Raises:
        ValueError: the query has another width; the implementation is unknown or cannot run here.
    """
    attended = attend_directly(query, sources, key_norm_weight, eps, is_sum, implementation, fuse_later_grads)
    if attended is not None:
        return attended
    return attend_generally(query, sources, key_norm_weight, eps, is_sum, implementation, fuse_later_grads)


def attend_generally(
    query: Tensor,
    sources: Sequence[Tensor],
    key_norm_weight: Tensor | None,
    eps: float,
    is_sum: bool,
    implementation: str,
    fuse_later_grads: bool = False,
) -> Attended:
    """Compute [`attend`] for tensors of any kind, after [`attend_directly`] has not taken them."""
    if any(source.shape != sources[0].shape for source in sources):
        sources = torch.broadcast_tensors(*sources)
    width = sources[0].shape[-1]
    if query.numel() != width:
        raise ValueError(f"the sources have width {width}, but the pseudo-query has {query.numel()} (`hidden_size`).")
    dtype, stat_dtype = dtypes_of(sources)
    query = query.flatten().to(stat_dtype)
    if key_norm_weight is not None:
        # (w . (g * k)) = ((w * g) . k): the norm's weight never touches a source.
        query = query * key_norm_weight.to(stat_dtype)
    result, weights, sources = DEPTH_ATTENTION[implementation](query, sources, eps, is_sum, fuse_later_grads)
    return result.to(dtype), weights, sources


def attend_directly(
    query: Tensor,
    sources: Sequence[Tensor],
    key_norm_weight: Tensor | None,
    eps: float,
    is_sum: bool,
    implementation: str,
    fuse_later_grads: bool = False,
    needs_weights: bool = True,
) -> Attended | None:
    """Compute [`attend`] by a path with fewer checks, which takes only the most common tensors.

    `attnres.accelerated` adds such a path as an attribute `direct` of an implementation.

    Returns:
        The result of [`attend`], with `None` for weights that are not needed; `None` if there is no such path, or if it
        does not take these tensors.

    Raises:
        ValueError: the implementation is unknown.
    """
    try:  # which takes half the time of asking first
        direct = getattr(DEPTH_ATTENTION[implementation], "direct", None)
    except KeyError:
        known = ", ".join(DEPTH_ATTENTION)
        message = f"{implementation!r} is not an implementation of depth attention: use one of {known}."
        raise ValueError(message) from None
    if direct is None or key_norm_weight is None:
        return None
    return direct(query, sources, key_norm_weight, eps, is_sum, fuse_later_grads, needs_weights=needs_weights)


def eager(
    query: Tensor, sources: Sequence[Tensor], eps: float, is_sum: bool, fuse_later_grads: bool = False
) -> Attended:
    """Compute depth attention in PyTorch's operations.

    Args:
        query: `w * g` `[D]`, in float32 or wider.
        sources: n >= 1 tensors `[..., D]` of one shape.
        eps: epsilon of the key norm.
        is_sum: whether to multiply the result by n (scale "sum").
        fuse_later_grads: unused here; other implementations take it.

    Returns:
        `h` `[..., D]` in the query's dtype or wider, `a` `[n, ...]`, and the same sources.
    """
    is_inference = not torch.is_grad_enabled()
    # Transforms and tracers need plain operations, and a compiler fuses them by itself.
    is_transformed = torch.autograd.forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()
    if is_transformed or torch.jit.is_tracing() or (torch.compiler.is_compiling() and is_inference):
        return *reference(query, sources, None, eps, is_sum), sources
    # Under autocast the products would fall to half precision.
    with maybe_autocast(query.device.type, enabled=False):
        if not is_inference or sources[0].numel() > 8 * len(query):
            return *_DepthAttention.apply(query, eps, is_sum, *sources), sources
        # For the few tokens of a decoding step, launches cost more than memory: stacked sources need fewer of them.
        # Not in training, where the recomputation of a checkpointed layer must give the same bits.
        shape, n = sources[0].shape, len(sources)
        stacked = torch.stack([source.to(query.dtype) for source in sources]).view(n, -1, shape[-1])  # (n, tokens, D)
        weights = (stacked @ query).mul_(inverse_rms(stacked, eps, query.dtype)).softmax(0)  # (n, tokens)
        result = torch.bmm(weights.t().unsqueeze(1), stacked.transpose(0, 1)).view(shape)
        return (result.mul_(n) if is_sum else result), weights.view(n, *shape[:-1]), sources


class _DepthAttention(torch.autograd.Function):
    """Depth attention with its own backward pass: it keeps logits and `1 / rms`, but no normalised keys.

    With `r_i = 1 / sqrt(mean(s_i^2) + eps)` the logits are `r_i (query . s_i)`.
    """

    @staticmethod
    def forward(ctx, *arguments: Any) -> tuple[Tensor, Tensor]:
        # Not `(ctx, query, eps, is_sum, *sources)`: with two sources, `torch.compile` would mistake it for a signature
        # without `ctx`.
        query, eps, is_sum, *sources = arguments
        inverse = torch.stack([inverse_rms(source, eps, query.dtype) for source in sources])  # (n, ...)
        logits = torch.stack([source.to(query.dtype) @ query for source in sources]) * inverse
        exp = (logits - logits.amax(0)).exp()
        normaliser = exp.sum(0)
        weights = exp / normaliser
        # Not `weights * n`: this is exactly one at zero queries, where `sum` is the plain sum of the sources.
        mixing = exp * len(sources) / normaliser if is_sum else weights
        coefficients = mixing.unsqueeze(-1).unbind()  # n of (..., 1)
        result = coefficients[0] * sources[0].to(query.dtype)
        for coefficient, source in zip(coefficients[1:], sources[1:]):
            result.addcmul_(coefficient, source)
        ctx.save_for_backward(query, logits, inverse, weights, mixing, *sources)
        ctx.eps, ctx.is_sum = eps, is_sum
        ctx.set_materialize_grads(False)
        return result, weights

    @staticmethod
    def backward(ctx, grad: Tensor | None, grad_weights: Tensor | None):
        query, logits, inverse, weights, mixing, *sources = ctx.saved_tensors
        grad = torch.zeros_like(sources[0], dtype=query.dtype) if grad is None else grad
        with maybe_autocast(grad.device.type, enabled=False):
            if torch.is_grad_enabled():  # second derivatives are those of the reference
                # pyrefly: ignore[bad-unpacking]  # three results only with `has_aux`
                (result, _), derivative = torch.func.vjp(
                    lambda query, *sources: reference(query, sources, None, ctx.eps, ctx.is_sum), query, *sources
                )
                grad_weights = torch.zeros_like(weights) if grad_weights is None else grad_weights
                grad_query, *grad_sources = derivative((grad.to(result.dtype), grad_weights))
                return grad_query, None, None, *grad_sources
            # Softmax: dL/dlogit_i = m_i (grad . s_i - sum_j a_j (grad . s_j)).
            similarity = torch.stack([(grad * source).sum(-1) for source in sources])  # (n, ...)
            grad_logits = mixing * (similarity - (weights * similarity).sum(0))
            if grad_weights is not None:
                grad_logits = grad_logits + weights * (grad_weights - (weights * grad_weights).sum(0))
            # Logit_i = r_i (query . s_i), and dr_i/ds_i = -r_i^3 s_i / D: a source gets gradient along the query and
            # along itself.
            along_query = grad_logits * inverse
            along_source = -grad_logits * logits * inverse.square() / query.numel()
            needs_query, _, _, *needs_source = ctx.needs_input_grad
            grad_query, grad_sources = torch.zeros_like(query), [None] * len(sources)
            for i, source in enumerate(sources):
                if needs_query:
                    grad_query += along_query[i].flatten() @ source.reshape(-1, query.numel()).to(query.dtype)
                if needs_source[i]:
                    grad_source = mixing[i].unsqueeze(-1) * grad
                    grad_source.addcmul_(along_query[i].unsqueeze(-1), query)
                    grad_source.addcmul_(along_source[i].unsqueeze(-1), source)
                    grad_sources[i] = grad_source.to(source.dtype)
        return grad_query, None, None, *grad_sources


class DepthAttentionInterface(GeneralInterface):
    """Mapping from the name of an implementation to a function with the arguments of [`eager`].

    `attnres.accelerated` adds others, which raise ValueError where they cannot run, and an `auto` that chooses the
    fastest that runs.
    """

    _global_mapping = {"auto": eager, "eager": eager}


DEPTH_ATTENTION = DepthAttentionInterface()
if accelerated is not None:
    accelerated.register(DEPTH_ATTENTION)


def inverse_rms(x: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Compute `1 / sqrt(mean(x^2) + eps)` over the last dimension, without a squared copy of `x`.

    Args:
        x: `[..., D]`.
        eps: epsilon of the norm.
        dtype: dtype of the computation and of the result.

    Returns:
        `[...]`. Applied after a projection, it also needs no normed copy of `x`.
    """
    norm = torch.linalg.vector_norm(x, dim=-1, dtype=dtype)
    return (norm.square() / x.shape[-1] + eps).rsqrt()


def dtypes_of(sources: Sequence[Tensor]) -> tuple[torch.dtype, torch.dtype]:
    """Return the common dtype of the sources, and the dtype of statistics: the same, but at least float32."""
    dtype = sources[0].dtype
    for source in sources[1:]:
        dtype = torch.promote_types(dtype, source.dtype)
    return dtype, torch.promote_types(dtype, torch.float32)
