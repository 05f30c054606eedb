"""Other code for depth attention, to time beside ours.

A peer is a function `(query, sources, key_norm_weight, eps) -> h`. `query` and `key_norm_weight` are `[D]`, each source
is `[..., D]`, and `h` is like a source. All but `inkling2` compute `attnres.depth_attention_reference`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnres import depth_attention_reference

# A function of the query, the sources, the key norm's weight and its epsilon. Some return more than the result.
Peer = Callable[[Tensor, Sequence[Tensor], Tensor, float], Any]


def pseudocode(query: Tensor, sources: Sequence[Tensor], key_norm_weight: Tensor, eps: float) -> Tensor:
    """Compute the paper's pseudocode: stack, RMSNorm, einsum, softmax, einsum, all in the sources' dtype."""
    values = torch.stack(tuple(sources))
    keys = F.rms_norm(values, values.shape[-1:], key_norm_weight, eps)
    logits = torch.einsum("d, n ... d -> n ...", query, keys)
    return torch.einsum("n ..., n ... d -> ... d", logits.softmax(0), values)


def fla_naive(query: Tensor, sources: Sequence[Tensor], key_norm_weight: Tensor, eps: float) -> Tensor:
    """Compute the reference of flash-linear-attention, `fla.ops.attnres.naive_attnres`, in float32 throughout."""
    shape, dtype = sources[0].shape, sources[0].dtype
    values = torch.stack(tuple(source.view(-1, shape[-1]) for source in sources)).float()
    keys = F.rms_norm(values, shape[-1:], key_norm_weight.float(), eps)
    weights = torch.einsum("l ... d, d -> l ...", keys, query.float()).softmax(0)
    return torch.einsum("l ..., l ... d -> ... d", weights, values).view(shape).to(dtype)


def inkling2(query: Tensor, sources: Sequence[Tensor], key_norm_weight: Tensor | None, eps: float) -> Tensor:
    """Compute `Inkling2BlockAttentionResidual` of transformers, to compare its cost.

    It is **another function**: it normalises values too, divides logits by `sqrt(D)`, and its norm has no weight. In
    transformers the finished blocks are one tensor already, and the partial sum is concatenated to it. That copies all
    sources once, like the stack here.
    """
    values = torch.stack(tuple(sources), -2).float()  # [..., n, D]
    values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
    size = values.shape[-1]
    queries = query.float().view(-1, size).expand(*values.shape[:-2], -1, -1)
    output = F.scaled_dot_product_attention(queries, values, values, scale=size**-0.5)
    return output.squeeze(-2).to(sources[0].dtype)


def compiled_reference() -> Peer:
    """Compile `attnres.depth_attention_reference` for the shapes of its first call."""
    # Without a reset, a second shape would compile for all shapes, and a ninth would not compile at all.
    torch.compiler.reset()
    return torch.compile(depth_attention_reference, dynamic=False)


# Name of a column -> its function. With a GPU, `gpu_peers` adds the kernels of libraries.
PEERS: dict[str, Peer] = {"pseudocode": pseudocode, "fla naive": fla_naive, "inkling2": inkling2}


def gpu_peers() -> dict[str, Peer]:
    """Return the kernels of libraries by the names of their columns; nothing without a GPU."""
    if not torch.cuda.is_available():
        return {}
    from .peers_gpu import PEERS

    return {**PEERS}
