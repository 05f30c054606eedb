"""Depth attention: one sublayer's softmax attention over the outputs of earlier layers.

    h = sum_i a_i s_i,   a = softmax_i( w . (g * RMSNorm(s_i)) )                              (AttnRes, section 3)

`depth_attention_reference` is the equation line by line; `depth_attention` is the same function, without ever stacking
the sources or writing normalised keys. Both take the same arguments and agree to rounding.
"""

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils.generic import maybe_autocast

from .cpu_kernels_attnres import cpu_kernels_serve, depth_attention_on_cpu, norm_served
from .kernels_attnres import common_dtype, fused_depth_attention, kernels_available


def depth_attention_reference(
    query: Tensor,
    sources: Sequence[Tensor],
    key_norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    scale: str = "mean",
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The readable form of [`depth_attention`]: same arguments, same result, no attention to cost."""
    _check(query, sources, key_norm_weight, scale)
    dtype, stat_dtype = _dtypes(sources)
    values = torch.stack([source.to(stat_dtype) for source in sources])  # (n, ..., D)
    key_norm_weight = None if key_norm_weight is None else key_norm_weight.to(stat_dtype)
    keys = F.rms_norm(values, values.shape[-1:], key_norm_weight, eps)
    logits = (keys * query.to(stat_dtype)).sum(-1)  # (n, ...)
    weights = logits.softmax(0)
    result = (weights.unsqueeze(-1) * values).sum(0)
    if scale == "sum":
        result = result * len(sources)
    return (result.to(dtype), weights) if return_weights else result.to(dtype)


def depth_attention(
    query: Tensor,
    sources: Sequence[Tensor],
    key_norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    scale: str = "mean",
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from one pseudo-query to the sources: `h = sum_i a_i s_i`, `a = softmax_i(w . (g * RMSNorm(s_i)))`.

    Keys are normalised, values are the raw sources, and there is no `1/sqrt(D)`. Statistics, logits and softmax are in
    float32, or in float64 if a source is.

    Args:
        query: pseudo-query `w`, `[D]`.
        sources: the `n >= 1` sources `s_i`, each `[..., D]`, all of one shape, any floating dtype.
        key_norm_weight: weight `g` of the key norm, `[D]`; ones if `None`.
        eps: epsilon of the key norm.
        scale: `"mean"` as above; `"sum"` multiplies the result by `n`: at `w = 0` the plain sum of the sources.
        return_weights: also return `a`, `[n, ...]` in the dtype of the statistics; it sums to one for either scale.

    Returns:
        `h`, `[..., D]`, in the common dtype of the sources; with `return_weights` the pair `(h, a)`.

    Raises:
        ValueError: no source, a shape that does not fit, or an unknown scale.
    """
    _check(query, sources, key_norm_weight, scale)
    result, weights, _ = attend(query, sources, key_norm_weight, eps, scale == "sum")
    return (result, weights) if return_weights else result


def attend(
    query: Tensor,
    sources: Sequence[Tensor],
    key_norm_weight: Tensor | None,
    eps: float,
    is_sum: bool,
    norm: nn.Module | None = None,
    passes_on: bool = False,
) -> tuple[Tensor, Tensor | None, Sequence[Tensor]]:
    """[`depth_attention`] of arguments that fit each other, with the weights, by what is fastest for them.

    Args:
        query: `[D]` or `[1, D]`.
        norm: a plain RMSNorm (`plain_attnres`) that the result goes through, for which the kernels need no pass of its
            own; the weights are `None` then.
        passes_on: the sources go on to be read by others, whose gradients the kernels may add to ours.

    Returns:
        The result, the weights, and the sources to go on with: the same values.
    """
    if cpu_kernels_serve(query, sources):
        fused = norm if norm is not None and norm_served(norm.weight, sources) else None
        read = depth_attention_on_cpu(query, key_norm_weight, eps, is_sum, sources, fused, passes_on)
    else:
        fused, read = None, _attend(query.flatten(), sources, key_norm_weight, eps, is_sum, passes_on)
    return read if norm is fused else (norm(read[0]), None, read[2])


def _attend(
    query: Tensor, sources: Sequence[Tensor], key_norm_weight: Tensor | None, eps: float, is_sum: bool, passes_on: bool
) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    dtype, stat_dtype = _dtypes(sources)
    query = query.to(stat_dtype)
    if key_norm_weight is not None:
        query = query * key_norm_weight.to(stat_dtype)
    if stat_dtype == torch.float32 and kernels_available(query.device, len(query)):
        return fused_depth_attention(query, eps, is_sum, *sources, passes_on=passes_on)
    # Under autocast the products would fall to half precision.
    with maybe_autocast(query.device.type, enabled=False):
        if not torch.is_grad_enabled() and torch.compiler.is_compiling():
            result, weights = _attend_fusible(query, eps, is_sum, sources)
        elif not torch.is_grad_enabled() and sources[0].numel() <= _FEW_TOKENS * len(query):
            result, weights = _attend_stacked(query, eps, is_sum, sources)
        else:
            result, weights = _DepthAttention.apply(query, eps, is_sum, *sources)
    return result.to(dtype), weights, sources


# In decoding operations cost more than what they move, and stacked sources need fewer. Not in training: there what is
# computed without gradients first, and with them later, has to be the same to the last bit.
_FEW_TOKENS = 8


def _attend_stacked(query: Tensor, eps: float, is_sum: bool, sources: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    shape, n = sources[0].shape, len(sources)
    stacked = torch.stack([source.to(query.dtype) for source in sources]).view(n, -1, shape[-1])
    logits = (stacked @ query).mul_(_inverse_rms(stacked, eps, query.dtype))  # (n, tokens)
    weights = logits.softmax(0)
    result = torch.bmm(weights.t().unsqueeze(1), stacked.transpose(0, 1)).view(shape)
    return (result.mul_(n) if is_sum else result), weights.view(n, *shape[:-1])


def _attend_fusible(query: Tensor, eps: float, is_sum: bool, sources: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Sums and products alone, which a compiler puts into one loop or two; a matrix product would be a call."""
    values = [source.to(query.dtype) for source in sources]
    logits = [(value * query).sum(-1) * (value.square().mean(-1) + eps).rsqrt() for value in values]
    largest = functools.reduce(torch.maximum, logits)
    exp = [(logit - largest).exp() for logit in logits]
    normaliser = sum(exp)
    mixing = [e * len(sources) / normaliser if is_sum else e / normaliser for e in exp]
    result = sum(factor.unsqueeze(-1) * value for factor, value in zip(mixing, values))
    return result, torch.stack([e / normaliser for e in exp])


class _DepthAttention(torch.autograd.Function):
    """Forward and derivative of depth attention; `query` is `w * g`, so the key norm's weight never touches a source.

    With `r_i = rsqrt(mean(s_i^2) + eps)` the logits are `l_i = r_i (query . s_i)`: a dot product and a norm per token.
    Saved for the backward pass: the sources themselves and `[n, ...]` statistics, nothing of the sources' size.
    """

    @staticmethod
    def forward(ctx, *arguments: Tensor | float | bool) -> tuple[Tensor, Tensor]:
        # Not in the signature: `torch.compile` counts parameters to see whether `ctx` is one of them, and with
        # `(ctx, query, eps, is_sum, *sources)` two sources make it think not.
        query, eps, is_sum, *sources = arguments
        logits, inverse_rms = [], []
        for source in sources:
            inverse_rms.append(_inverse_rms(source, eps, query.dtype))
            logits.append((source.to(query.dtype) @ query) * inverse_rms[-1])
        logits, inverse_rms = torch.stack(logits), torch.stack(inverse_rms)  # (n, ...)
        exp = (logits - logits.amax(0)).exp()
        normaliser = exp.sum(0)
        weights = exp / normaliser
        # Not `weights * n`: in this order it is exactly one at zero queries, and `sum` is the plain sum of the sources.
        mixing = exp * len(sources) / normaliser if is_sum else weights
        coefficients = mixing.unsqueeze(-1).unbind()  # n of (..., 1)
        result = coefficients[0] * sources[0].to(query.dtype)
        for coefficient, source in zip(coefficients[1:], sources[1:]):
            result.addcmul_(coefficient, source)
        ctx.save_for_backward(query, logits, inverse_rms, weights, mixing, *sources)
        ctx.set_materialize_grads(False)
        return result, weights

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor | None, grad_weights: Tensor | None):
        query, logits, inverse_rms, weights, mixing, *sources = ctx.saved_tensors
        if grad is None:
            grad = torch.zeros_like(sources[0], dtype=query.dtype)
        with maybe_autocast(grad.device.type, enabled=False):
            # The incoming gradients, contracted with d h / d l_i and d a_i / d l_i: (n, ...)
            similarity = torch.stack([(grad * source).sum(-1) for source in sources])
            grad_logits = mixing * (similarity - (weights * similarity).sum(0))
            if grad_weights is not None:
                grad_logits = grad_logits + weights * (grad_weights - (weights * grad_weights).sum(0))
            along_query = grad_logits * inverse_rms
            along_source = -grad_logits * logits * inverse_rms.square() / query.numel()
            grad_query = None
            if ctx.needs_input_grad[0]:
                grad_query = sum(
                    coefficient.flatten() @ source.reshape(-1, query.numel()).to(query.dtype)
                    for coefficient, source in zip(along_query, sources)
                )
            grad_sources = []
            for i, source in enumerate(sources):
                if not ctx.needs_input_grad[3 + i]:
                    grad_sources.append(None)
                    continue
                grad_source = mixing[i].unsqueeze(-1) * grad
                grad_source.addcmul_(along_query[i].unsqueeze(-1), query)
                grad_source.addcmul_(along_source[i].unsqueeze(-1), source)
                grad_sources.append(grad_source.to(source.dtype))
        return grad_query, None, None, *grad_sources


def _inverse_rms(source: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """`1 / sqrt(mean(s^2) + eps)` over the last axis, `[...]`, without a squared copy of the source."""
    norm = torch.linalg.vector_norm(source, dim=-1, dtype=dtype)
    return (norm.square() / source.shape[-1] + eps).rsqrt()


def _dtypes(sources: Sequence[Tensor]) -> tuple[torch.dtype, torch.dtype]:
    """The dtype of the result, and that of the statistics."""
    dtype = common_dtype(sources)
    return dtype, torch.promote_types(dtype, torch.float32)


def _check(query: Tensor, sources: Sequence[Tensor], key_norm_weight: Tensor | None, scale: str) -> None:
    if scale not in ("mean", "sum"):
        raise ValueError(f"`scale` is {scale!r}, but must be one of 'mean', 'sum'.")
    if len(sources) == 0:
        raise ValueError("`sources` is empty, but depth attention needs at least one source (the embedding).")
    shape = sources[0].shape
    if not shape:
        raise ValueError("source 0 has shape (), but a source must be [..., D].")
    for i, source in enumerate(sources):
        if source.shape != shape:
            raise ValueError(f"source {i} has shape {tuple(source.shape)}, but source 0 has {tuple(shape)}.")
    for name, vector in (("query", query), ("key_norm_weight", key_norm_weight)):
        if vector is not None and vector.shape != shape[-1:]:
            raise ValueError(
                f"`{name}` has shape {tuple(vector.shape)}, but must be [{shape[-1]}], the sources' width."
            )


__all__ = ["attend", "depth_attention", "depth_attention_reference"]
