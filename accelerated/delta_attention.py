"""Compute Kimi Delta Attention by matrix products, on devices without its GPU kernel.

    S_t = (I - b_t k_t k_t^T) Diag(exp(g_t)) S_{t-1} + b_t k_t v_t^T        o_t = S_t^T q_t / sqrt(d_k)

(Kimi Linear, arXiv 2510.26692, section 3.) Within a chunk this is a triangular system whose entries are products of two
tokens with the decay between them, `sum_d x_t[d] y_s[d] exp(g_{s+1} + ... + g_t)[d]`. The decay is different for each
channel, so one matrix product cannot give all entries. But the chunk can be halved again and again. For a token `t` in
the second half and a token `s` in the first, the decay is a product of two decays: from `s` to the middle, and from the
middle to `t`. Neither exceeds one, however strong the decay is, and no entry is the difference of larger numbers.
"""

import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from importlib import import_module
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear

if TYPE_CHECKING:
    from .interface import DeltaAttentionLayer

# Up to this length pairs of tokens are multiplied channel by channel: smaller matrix products cost more than they save.
LEAF = 4


def chunk_kda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute the recurrence above in float32.

    Args:
        query: `[batch, seq, heads, d_k]`.
        key: `[batch, seq, heads, d_k]`.
        value: `[batch, seq, heads, d_v]`.
        g: logarithm of each channel's decay, at most 0, `[batch, seq, heads, d_k]`.
        beta: rate at which a token writes to the state, `[batch, seq, heads]`.
        chunk_size: number of tokens that are computed together; a power of 2.
        initial_state: `[batch, heads, d_k, d_v]`, zero by default.
        output_final_state: whether to return the state after the last token.
        use_qk_l2norm_in_kernel: whether to normalise queries and keys first.
        starts: `[batch, seq]`, true where a document begins, which forgets the state before it.

    Returns:
        The output `[batch, seq, heads, d_v]` in the dtype of `query`, and the last state `[batch, heads, d_k, d_v]` in
        float32, or `None` without `output_final_state`.
    """
    if torch.is_autocast_enabled(query.device.type):
        with torch.autocast(query.device.type, enabled=False):
            options = chunk_size, initial_state, output_final_state, use_qk_l2norm_in_kernel, starts
            return chunk_kda(query, key, value, g, beta, *options)
    dtype, length = query.dtype, key.shape[1]
    query, key, value, g, beta = (x.transpose(1, 2).float() for x in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        query, key = kimi_linear.l2norm(query), kimi_linear.l2norm(key)
    query = query * key.shape[-1] ** -0.5
    if starts is not None:
        # A decay of exactly 0 resets the state to zero where a document begins, and lets no gradient pass.
        g = g.masked_fill(starts[:, None, :, None], -torch.inf)
    # A short sequence is one short chunk. Padding of the last chunk has keys of zero, so that it changes nothing.
    chunk_size = min(chunk_size, 1 << (length - 1).bit_length())
    query, key, value, g, beta = (
        F.pad(x, (0, 0, 0, -length % chunk_size)).unflatten(2, (-1, chunk_size))  # (batch, heads, chunks, chunk, d)
        for x in (query, key, value, g, beta.unsqueeze(-1))
    )
    key_beta = key * beta
    scores, system = decayed_products(torch.stack((query, key_beta)), key, g, starts is not None)
    since_start = _decay(g.cumsum(-2))
    # Each token writes its value minus the value that the state already holds for its key. The part of that value from
    # the chunk itself is found by the triangular system (I + strictly lower part); the part from the state before the
    # chunk is subtracted in the loop below.
    written = torch.cat((value * beta, key_beta * since_start), -1)
    written = torch.linalg.solve_triangular(system, written, upper=False, unitriangular=True)
    new, old_keys = written.split((value.shape[-1], key.shape[-1]), -1)
    query = query * since_start
    key = (key * _decay(_sum_after(g))).transpose(-1, -2)
    decay = since_start[..., -1, :, None]

    state = value.new_zeros(*value.shape[:2], key.shape[-2], value.shape[-1])
    state = state if initial_state is None else initial_state.float()
    outputs = []
    for chunk in range(value.shape[2]):
        delta = new[:, :, chunk] - old_keys[:, :, chunk] @ state
        outputs.append(query[:, :, chunk] @ state + scores[:, :, chunk] @ delta)
        state = state * decay[:, :, chunk] + key[:, :, chunk] @ delta
    output = torch.cat(outputs, 2)[:, :, :length].transpose(1, 2)
    return output.to(dtype), state if output_final_state else None


def decayed_products(later: Tensor, earlier: Tensor, g: Tensor, has_starts: bool = False) -> Tensor:
    """Compute the products of all pairs of tokens, with the decay between the two.

        P[t, s] = sum_d later_t[d] earlier_s[d] exp(g_{s+1} + ... + g_t)[d]    for s <= t, and 0 above the diagonal

    Args:
        later: `[kinds, ..., length, d]`, one or more vectors for each token; the length is a power of 2.
        earlier: `[..., length, d]`.
        g: logarithms of the decay, `[..., length, d]`.
        has_starts: whether `g` may be `-inf`, in all channels of a token at once.

    Returns:
        `[kinds, ..., length, length]`.
    """
    length = earlier.shape[-2]
    if length <= LEAF:
        hidden = torch.ones(length, length, dtype=torch.bool, device=g.device).triu(1)[..., None]
        if has_starts:
            # The difference of two infinities is NaN, so pairs of tokens from different documents are masked instead.
            is_start = g[..., :1].isneginf()
            document = is_start.cumsum(-2)
            hidden = hidden | (document.unsqueeze(-2) != document.unsqueeze(-3))
            g = g.masked_fill(is_start, 0)
        since = g.cumsum(-2)
        decay = _decay(since.unsqueeze(-2) - since.unsqueeze(-3), hidden)
        decayed = decay * earlier.unsqueeze(-3)  # (..., t, s, d)
        return (later.movedim(0, -2) @ decayed.transpose(-1, -2)).movedim(-2, 0)
    # Both halves by recursion, and the pairs with `t` in the second half and `s` in the first by one matrix product.
    later, earlier, g = (x.unflatten(-2, (2, length // 2)) for x in (later, earlier, g))
    first, second = decayed_products(later, earlier, g, has_starts).unbind(-3)
    since_middle = later[..., 1, :, :] * _decay(g[..., 1, :, :].cumsum(-2))
    until_middle = earlier[..., 0, :, :] * _decay(_sum_after(g[..., 0, :, :]))
    across = since_middle @ until_middle.transpose(-1, -2)
    return torch.cat((F.pad(first, (0, length // 2)), torch.cat((across, second), -1)), -2)


def _decay(log: Tensor, is_hidden: Tensor | bool = False) -> Tensor:
    """Compute `exp(log)`, but 0 where it is hidden or less than `exp(-40)`."""
    # Products of smaller numbers would be denormal, and processors take a hundred times as long for those.
    return log.masked_fill((log < -40) | is_hidden, -torch.inf).exp()


def _sum_after(g: Tensor) -> Tensor:
    """Compute `sum_{r > s} g_r` at each position `s` of the last but one dimension."""
    return F.pad(g[..., 1:, :].flip(-2).cumsum(-2).flip(-2), (0, 0, 0, 1))


def _has_kernel(package: str) -> bool:
    """Return whether `transformers` takes GPU kernels from a package: there is a GPU, and the package imports."""
    # An installed package may lack its own dependencies. Then `transformers` takes its slow fallback.
    with suppress(ImportError):
        return torch.accelerator.is_available() and bool(import_module(package))
    return False


def _by_device(name: str, package: str, plain: Callable | None = None) -> Callable:
    """Return a function of `modeling_kimi_linear` that runs its GPU kernel on GPUs, and PyTorch's operations on CPUs.

    `transformers` chooses between the two once, by whether the package imports, and not by the tensors' device.

    Args:
        name: name of the function.
        package: package that has the kernel.
        plain: the function for CPUs; by default the one that `transformers` uses without the package.
    """
    kernel = getattr(kimi_linear, name)
    plain = plain or inspect.unwrap(kernel)
    parameters = inspect.signature(plain).parameters  # fewer than those of the kernel

    @wraps(plain)
    def function(tensor: Tensor, *args, **kwargs):
        if _runs_kernel(function, tensor):
            return kernel(tensor, *args, **kwargs)
        return plain(tensor, *args, **{key: value for key, value in kwargs.items() if key in parameters})

    function.has_kernel = _has_kernel(package)  # pyrefly: ignore[missing-attribute]  # any function takes attributes
    return function


def _runs_kernel(function: Callable, tensor: Tensor) -> bool:
    """Return whether a function of [`_by_device`] runs a GPU kernel on the tensor."""
    # pyrefly: ignore[missing-attribute]  # set by `_by_device`
    return function.has_kernel and tensor.device.type != "cpu"


chunk_kimi_delta_attention = _by_device("chunk_kimi_delta_attention", "fla", chunk_kda)
recurrent_kimi_delta_attention = _by_device("recurrent_kimi_delta_attention", "fla")
causal_conv1d_fn = _by_device("causal_conv1d_fn", "causal_conv1d")
causal_conv1d_update = _by_device("causal_conv1d_update", "causal_conv1d")


def chunk(
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
    """Compute the recurrence as `delta_attention_attnres.chunk` does, with the same arguments and result.

    Rows of several documents cost no more than others. If a kernel runs and `cu_seqlens` is missing, the borders are
    derived from `seq_idx`, which waits for the device.
    """
    options = {"initial_state": initial_state, "output_final_state": output_final_state}
    options["use_qk_l2norm_in_kernel"] = True
    if seq_idx is None:
        return chunk_kimi_delta_attention(query, key, value, g=g, beta=beta, **options)
    starts = F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0), value=True)
    if not _runs_kernel(chunk_kimi_delta_attention, query):
        return chunk_kda(query, key, value, g=g, beta=beta, starts=starts, **options)
    if cu_seqlens is None:
        ends = starts.new_full((1,), seq_idx.numel(), dtype=torch.long)
        cu_seqlens = torch.cat((starts.flatten().nonzero().flatten(), ends))
    # The kernel takes documents in a single row.
    query, key, value, g, beta = (tensor.flatten(0, 1).unsqueeze(0) for tensor in (query, key, value, g, beta))
    output, _ = chunk_kimi_delta_attention(query, key, value, g=g, beta=beta, cu_seqlens=cu_seqlens, **options)
    return output.view(*seq_idx.shape, *output.shape[2:]), None


def step(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, output_final_state: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute the recurrence for one token, as `delta_attention_attnres.step` does."""
    options = {"output_final_state": output_final_state, "use_qk_l2norm_in_kernel": True}
    return recurrent_kimi_delta_attention(query, key, value, g=g, beta=beta, initial_state=initial_state, **options)


def convolve(
    convolve_documents: Callable[..., Tensor],
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    seq_idx: Tensor | None = None,
) -> Tensor:
    """Compute the convolution as `convolve_documents` does, the `convolve` of `delta_attention_attnres`."""
    options = {"weight": weight, "bias": bias, "activation": activation}
    if seq_idx is None:
        return causal_conv1d_fn(inputs, **options)
    if not _runs_kernel(causal_conv1d_fn, inputs):
        return convolve_documents(inputs, **options, seq_idx=seq_idx)
    return causal_conv1d_fn(inputs, **options, seq_idx=seq_idx.int().contiguous())


def convolve_step(inputs: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """Compute the convolution for one token, as `delta_attention_attnres.convolve_step` does."""
    return causal_conv1d_update(inputs, state, weight=weight, bias=bias, activation=activation)


def accelerate(attention: "DeltaAttentionLayer") -> None:
    """Make a `DeltaAttention` of the model's files use the functions above; its weights stay."""
    attention.chunk, attention.step, attention.convolve_step = chunk, step, convolve_step
    # A partial function, because a copied or unpickled layer would keep a bound method of the original.
    attention.convolve = partial(convolve, type(attention).convolve)


__all__ = ["accelerate", "chunk_kda", "decayed_products"]
