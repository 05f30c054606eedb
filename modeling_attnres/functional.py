"""Depth attention as a function of tensors: a fast form, and a readable reference with the same arguments."""

from collections.abc import Sequence

from torch import Tensor

from .functional_attnres import attend_directly, attend_generally, reference

_SCALES = ("mean", "sum")


def depth_attention(
    query: Tensor,
    sources: Sequence[Tensor],
    key_norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    scale: str = "mean",
    return_weights: bool = False,
    implementation: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from one pseudo-query to the sources: `h = sum_i a_i s_i`, `a = softmax_i(w . (g * RMSNorm(s_i)))`.

    Keys are normalised, values are the raw sources, and there is no `1/sqrt(D)`. Statistics, logits and softmax are in
    float32, or in float64 if a source is.

    Args:
        query: pseudo-query `w`, `[D]`.
        sources: the `n >= 1` sources `s_i`, each `[..., D]`, all of one shape, any floating dtype.
        key_norm_weight: weight `g` of the key norm, `[D]`; ones if `None`.
        eps: epsilon of the key norm.
        scale: `"mean"` as above; `"sum"` multiplies the result by `n`, which at `w = 0` gives the sum of the sources.
        return_weights: also return `a`, `[n, ...]` in the dtype of the statistics; it sums to one for either scale.
        implementation: a name of `attnres.DEPTH_ATTENTION`; `auto` is the fastest that runs on these tensors.

    Returns:
        `h`, `[..., D]`, in the common dtype of the sources; with `return_weights` the pair `(h, a)`.

    Raises:
        ValueError: no source, a shape that does not fit, an unknown scale, or an implementation that is not known or
            cannot run on these tensors.
    """
    attended = None
    # This path checks the tensors itself. A query `[1, D]`, as layers have, is its only other freedom.
    if scale in _SCALES and len(sources) and query.ndim == 1:
        is_sum = scale == "sum"
        attended = attend_directly(
            query, sources, key_norm_weight, eps, is_sum, implementation, needs_weights=return_weights
        )
    if attended is None:
        _check(query, sources, key_norm_weight, scale)
        attended = attend_generally(query, sources, key_norm_weight, eps, scale == "sum", implementation)
    result, weights, _ = attended
    return (result, weights) if return_weights else result


def depth_attention_reference(
    query: Tensor,
    sources: Sequence[Tensor],
    key_norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    scale: str = "mean",
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute [`depth_attention`] by the equation, line by line; arguments and result are the same."""
    _check(query, sources, key_norm_weight, scale)
    result, weights = reference(query, sources, key_norm_weight, eps, scale == "sum")
    return (result, weights) if return_weights else result


def _check(query: Tensor, sources: Sequence[Tensor], key_norm_weight: Tensor | None, scale: str) -> None:
    if scale not in _SCALES:
        raise ValueError(f"`scale` is {scale!r}, but must be one of 'mean', 'sum'.")
    if len(sources) == 0:
        raise ValueError("`sources` is empty, but must hold at least one source (the embedding).")
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


__all__ = ["depth_attention", "depth_attention_reference"]
