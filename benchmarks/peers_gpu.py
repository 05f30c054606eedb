"""Kernels of other libraries for depth attention on a GPU, with the signature that `peers` describes.

All compute `attnres.depth_attention_reference` with `scale="mean"`. None of them has the scale `"sum"`, which would
take one more pass over the result. Each function imports its library when it is called, because the libraries are not
dependencies of this package.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def fla_fused(query: Tensor, sources: Sequence[Tensor], key_norm_weight: Tensor, eps: float) -> Tensor:
    """Call `fla.ops.attnres.fused_attnres` of flash-linear-attention (`fla-core`), which is made for training.

    It takes the sources without stacking them, and computes in float32. It sums the gradients of the query, the norm's
    weight and all sources in a fixed order, and ignores gradients of the depth weights. For the query's gradient it
    writes a tensor `[tokens, D]` in float32. It tunes its kernels for each width and each of 8, 16, 32, 64 sources, at
    the first call.

    Raises:
        ValueError: a row of a source is not a multiple of 16 bytes, which the kernels assume without a check.
    """
    from fla.ops.attnres import fused_attnres

    if sources[0].shape[-1] * sources[0].element_size() % 16:
        size, dtype = sources[0].shape[-1], sources[0].dtype
        raise ValueError(f"a row of a source must be a multiple of 16 bytes, not {size} values of {dtype}.")
    return fused_attnres(query, sources, key_norm_weight, rms_eps=eps)


def liger(query: Tensor, sources: Sequence[Tensor], key_norm_weight: Tensor, eps: float) -> Tensor:
    """Call `liger_attn_res` of Liger Kernel, which is made for training.

    It takes one stacked tensor `[n, ..., D]`, so the stack is part of its cost. (Its documentation also names a list,
    but its autograd function refuses a list.) It rounds keys to the dtype of the norm's weight. It sums the query's
    gradient by atomic additions, so two calls differ. It reads every source twice forward and twice backward.
    """
    from liger_kernel.transformers.functional import liger_attn_res

    return liger_attn_res(torch.stack(tuple(sources)), query, key_norm_weight, eps)


def fast_attnres(query: Tensor, sources: Sequence[Tensor], key_norm_weight: Tensor, eps: float) -> Tensor:
    """Call `attnres` of fast-attnres, which is made for training in bfloat16.

    It takes no norm weight, so the weight is multiplied into the query, which is rounded to bfloat16. It takes the
    sources without stacking them, and sums the query's gradient in a fixed order. It tunes its kernels for each width
    and each number of sources, at the first call. The package has
    the import name of this one: install it by `pip install --no-deps --target fast_attnres fast-attnres` in a folder of
    Python's path.
    """
    from fast_attnres.attnres import attnres

    return attnres(sources, _float32(query, key_norm_weight).to(torch.bfloat16), eps=eps)


def flash_attn_res(query: Tensor, sources: Sequence[Tensor], key_norm_weight: Tensor, eps: float) -> Tensor:
    """Call phase one of flash-attn-res alone, `phase_1_batched_attention_triton_op`, with one query.

    It takes one stacked tensor `[n, batch, seq, D]` and no norm weight, so the weight is multiplied into the query. The
    result is bfloat16 for any sources. It is differentiable, and sums the query's gradient by atomic additions. It
    holds all sources of a token at once, in many registers. It makes kernels for each number of tokens.

    Raises:
        ValueError: the width is not a power of two, which the kernels need. Version 0.1.12 also raises it on import
            with Triton 3.9, which refuses one of its tuning keys. Triton 3.4 and 3.6 accept that key.
    """
    from flash_attn_res import phase_1_batched_attention_triton_op

    values, query = _stacked(sources), _float32(query, key_norm_weight)
    results, _ = phase_1_batched_attention_triton_op(values, query[None], eps)
    return results[0].view(sources[0].shape)


def flash_attn_res_two_phases(query: Tensor, sources: Sequence[Tensor], key_norm_weight: Tensor, eps: float) -> Tensor:
    """Call both phases of flash-attn-res, with the last source as the partial sum and the others as finished blocks.

    All else is as in [`flash_attn_res`]. In a model the queries of a block share phase one. Here a block has one query.
    """
    from flash_attn_res import phase_1_batched_attention_triton_op, phase_2_online_softmax_merge_triton_op

    if len(sources) == 1:
        return flash_attn_res(query, sources, key_norm_weight, eps)
    values, query = _stacked(sources), _float32(query, key_norm_weight)
    results, log_sums = phase_1_batched_attention_triton_op(values[:-1], query[None], eps)
    merged = phase_2_online_softmax_merge_triton_op(values[-1], query, results[0], log_sums[0], eps)
    return merged.view(sources[0].shape)


def _float32(query: Tensor, key_norm_weight: Tensor) -> Tensor:
    return query.float() * key_norm_weight.float()


def _stacked(sources: Sequence[Tensor]) -> Tensor:
    """Stack the sources to `[n, 1, tokens, D]`."""
    width = sources[0].shape[-1]
    if width & (width - 1):
        raise ValueError(f"the width must be a power of two, not {width}.")
    return torch.stack(tuple(sources)).view(len(sources), 1, -1, width)


# Name of a column -> its function.
PEERS = {
    "fla fused": fla_fused,
    "liger": liger,
    "fast attnres": fast_attnres,
    "flash attn res": flash_attn_res,
    "flash attn res two phases": flash_attn_res_two_phases,
}
