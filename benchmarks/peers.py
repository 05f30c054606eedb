"""Depth attention as others write it, each `(query, sources, key_norm_weight, eps) -> h`, for times beside ours.

All but `inkling2` compute the function of `attnres.depth_attention_reference`.
"""

from collections.abc import Callable, Sequence
from inspect import isfunction, signature

import torch
import torch.nn.functional as F
from torch import Tensor

from attnres import depth_attention_reference

Peer = Callable[[Tensor, Sequence[Tensor], Tensor, float], Tensor]


def pseudocode(query: Tensor, sources: Sequence[Tensor], key_norm_weight: Tensor, eps: float) -> Tensor:
    """The paper's pseudocode: stack, RMSNorm, einsum, softmax, einsum; all in the model's dtype."""
    values = torch.stack(tuple(sources))
    keys = F.rms_norm(values, values.shape[-1:], key_norm_weight, eps)
    logits = torch.einsum("d, n ... d -> n ...", query, keys)
    return torch.einsum("n ..., n ... d -> ... d", logits.softmax(0), values)


def fla_naive(query: Tensor, sources: Sequence[Tensor], key_norm_weight: Tensor, eps: float) -> Tensor:
    """flash-linear-attention's reference, `fla.ops.attnres.naive_attnres`: the same in float32 throughout."""
    shape, dtype = sources[0].shape, sources[0].dtype
    values = torch.stack(tuple(source.view(-1, shape[-1]) for source in sources)).float()
    keys = F.rms_norm(values, shape[-1:], key_norm_weight.float(), eps)
    weights = torch.einsum("l ... d, d -> l ...", keys, query.float()).softmax(0)
    return torch.einsum("l ..., l ... d -> ... d", weights, values).view(shape).to(dtype)


def inkling2(query: Tensor, sources: Sequence[Tensor], key_norm_weight: Tensor | None, eps: float) -> Tensor:
    """`Inkling2BlockAttentionResidual` of transformers. **Another function**: values are normalised too, logits are
    divided by `sqrt(D)`, and the norm has no weight. What it costs is what counts here.

    There the finished blocks are one tensor already, and the partial sum is concatenated to it: one copy of all
    sources, as the stack here.
    """
    values = torch.stack(tuple(sources), -2).float()  # [..., n, D]
    values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
    size = values.shape[-1]
    queries = query.float().view(-1, size).expand(*values.shape[:-2], -1, -1)
    output = F.scaled_dot_product_attention(queries, values, values, scale=size**-0.5)
    return output.squeeze(-2).to(sources[0].dtype)


def compiled_reference() -> Peer:
    """`torch.compile` of our readable form, for the shapes that it is first called with."""
    torch.compiler.reset()  # a second shape would make it one for all shapes, and the ninth none at all
    return torch.compile(depth_attention_reference, dynamic=False)


# Column -> function. Those of libraries for the GPU are added where there is one (`gpu_peers`).
PEERS: dict[str, Peer] = {"pseudocode": pseudocode, "fla naive": fla_naive, "inkling2": inkling2}


def gpu_peers() -> dict[str, Peer]:
    """Kernels of libraries: the functions of `peers_gpu` that are called as the ones above. None without a GPU."""
    if not torch.cuda.is_available():
        return {}
    from . import peers_gpu

    arguments = list(signature(pseudocode).parameters)
    functions = {name: value for name, value in vars(peers_gpu).items() if isfunction(value) and name[0] != "_"}
    return {
        name.replace("_", " "): function
        for name, function in functions.items()
        if list(signature(function).parameters)[:4] == arguments
    }
