"""Stand-ins for the kernels of GPUs, which keep the same tensors for the backward pass, and compute nothing.

A plan is made on a machine without the device that it is for. PyTorch's own operations would keep much more: all pairs
of tokens for attention, and the steps of a loop over chunks for delta attention.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from attnres.delta_attention_attnres import DeltaAttention

# The name under which `transformers` finds the stand-in for flash attention. There is no mask for a name that it does
# not know, and flash attention needs none.
FLASH = "attnres_plan"
# The same for PyTorch's attention on a CPU.
CAUSAL = "attnres_plan_on_cpu"
# Tokens that the kernel of flash-linear-attention computes together.
DELTA_CHUNK = 64


class _FlashAttention(torch.autograd.Function):
    """Flash attention keeps its inputs, its output, and the logarithm of each row's normaliser."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


def flash_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Stand in for flash attention, with the arguments of an attention function of `transformers`.

    Args:
        module: The attention.
        query: `[batch, heads, seq, d_k]`.
        key: `[batch, kv_heads, keys, d_k]`.
        value: `[batch, kv_heads, keys, d_v]`.
        attention_mask: Unused.
        options: Unused.

    Returns:
        An output `[batch, seq, heads, d_v]` without values, and no weights.
    """
    return _FlashAttention.apply(query, key, value).transpose(1, 2).contiguous(), None


class _DeltaAttention(torch.autograd.Function):
    """The kernel of flash-linear-attention keeps its inputs and the products of the tokens of each chunk.

    Its backward pass computes the states of all chunks again, and gradients in float32.
    """

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        pairs = [query.new_empty(*query.shape[:3], DELTA_CHUNK) for _ in range(2)]
        normed = torch.empty_like(query), torch.empty_like(key)
        decay = g.new_empty(g.shape, dtype=torch.float32)
        ctx.save_for_backward(*normed, value, decay, g, beta, *pairs)
        return torch.empty_like(value)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, g, beta, *_ = ctx.saved_tensors
        batch, length, heads, width = query.shape
        chunks = -(-length // DELTA_CHUNK)
        # States and their gradients at the chunks' borders, and the recomputed factors of both.
        work = [query.new_empty(batch, chunks, heads, width, value.shape[-1]) for _ in range(2)]
        work += [torch.empty_like(value) for _ in range(6)]
        work += [query.new_empty(query.shape, dtype=torch.float32) for _ in range(3)]
        del work
        return tuple(torch.empty_like(tensor) for tensor in (query, key, value, g, beta))


def delta_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Stand in for the kernel of delta attention over several tokens; see `delta_attention_attnres.chunk`."""
    output = _DeltaAttention.apply(query, key, value, g, beta)
    if not output_final_state:
        return output, None
    batch, _, heads, width = query.shape
    return output, query.new_empty(batch, heads, width, value.shape[-1], dtype=torch.float32)


def use_stand_ins(model: nn.Module) -> None:
    """Make the delta attentions of a model use the stand-in. Attention uses the other by its name [`FLASH`]."""
    for module in model.modules():
        if isinstance(module, DeltaAttention):
            module.chunk = delta_attention  # its recurrence is an attribute, which implementations replace


def causal_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Run PyTorch's attention without a mask, as in a training pass without padding; see [`flash_attention`].

    Without data `transformers` cannot see that there is no padding, and would make a mask.
    """
    return sdpa_attention_forward(module, query, key, value, None, **options)


AttentionInterface.register(FLASH, flash_attention)
AttentionInterface.register(CAUSAL, causal_attention)

__all__ = ["CAUSAL", "DELTA_CHUNK", "FLASH", "causal_attention", "delta_attention", "flash_attention", "use_stand_ins"]
