"""Kernels of other libraries for depth attention on a GPU, each `(query, sources, key_norm_weight, eps) -> h`.

All compute `attnres.depth_attention_reference` with `scale="mean"`; none has `"sum"`, which takes one more pass over
the result. Each library is imported when its function is called, and is not a dependency of this package.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def fla_fused(query: Tensor, sources: Sequence[Tensor], key_norm_weight: Tensor, eps: float) -> Tensor:
    """`fla.ops.attnres.fused_attnres` of flash-linear-attention (`fla-core`), for training.

    Sources as they are, not stacked. Float32 inside; gradients of the query, the norm's weight and all sources, in a
    fixed order; the weights, if asked for, have none. One row of `[tokens, D]` in float32 is written for the query's
    gradient. Kernels are tuned at the first call with each of 8, 16, 32, 64 sources and each width.

    Raises:
        ValueError: a row of a source is not a multiple of 16 bytes. Its kernels assume that it is.
    """
    from fla.ops.attnres import fused_attnres

    if sources[0].shape[-1] * sources[0].element_size() % 16:
        raise ValueError(f"a row of {sources[0].shape[-1]} {sources[0].dtype} is not a multiple of 16 bytes.")
    return fused_attnres(query, sources, key_norm_weight, rms_eps=eps)


def liger(query: Tensor, sources: Sequence[Tensor], key_norm_weight: Tensor, eps: float) -> Tensor:
    """`liger_attn_res` of Liger Kernel, for training.

    Takes one stacked tensor `[n, ..., D]` (its documentation also names a list, which its autograd function refuses),
    so that the stack is part of what it costs. Keys are rounded to the dtype of the norm's weight. The query's gradient
    is summed by atomic additions: not the same twice. Every source is read twice forward and twice backward.
    """
    from liger_kernel.transformers.functional import liger_attn_res

    return liger_attn_res(torch.stack(tuple(sources)), query, key_norm_weight, eps)


def flash_attn_res(query: Tensor, sources: Sequence[Tensor], key_norm_weight: Tensor, eps: float) -> Tensor:
    """Phase one of flash-attn-res alone, with one query: `phase_1_batched_attention_triton_op`.

    Takes one stacked tensor `[n, batch, seq, D]`; there is no norm weight, so that the query brings it along. The
    result is bfloat16 whatever the sources are. Differentiable; the query's gradient is summed by atomic additions.
    All sources of a token are held at once: many registers. Kernels are made for each number of tokens.

    Raises:
        ValueError: the width is not a power of two: its kernels take no other. Or, of version 0.1.12, on importing it
            with Triton 3.9, which refuses a name among its tuning keys; Triton 3.4 and 3.6 do not.
    """
    from flash_attn_res import phase_1_batched_attention_triton_op

    values, query = _stacked(sources), _float32(query, key_norm_weight)
    results, _ = phase_1_batched_attention_triton_op(values, query[None], eps)
    return results[0].view(sources[0].shape)


def flash_attn_res_two_phases(query: Tensor, sources: Sequence[Tensor], key_norm_weight: Tensor, eps: float) -> Tensor:
    """Both phases of flash-attn-res: all sources but the last as the finished blocks, the last as the partial sum.

    As [`flash_attn_res`]. In a model phase one is shared by the queries of a block; this is what a block of one costs.
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
    """The sources as `[n, 1, tokens, D]`."""
    width = sources[0].shape[-1]
    if width & (width - 1):
        raise ValueError(f"the width is {width}, but must be a power of two.")
    return torch.stack(tuple(sources)).view(len(sources), 1, -1, width)
