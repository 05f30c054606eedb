"""Kimi Delta Attention that keeps the documents of one row apart, and ignores padding.

The layer of `transformers` runs one recurrence and one short convolution over all tokens of a row. This one also takes

- rows of several documents: state and convolution begin anew at each;
- padding anywhere: with and without a cache, the layer computes the same as without padding.

The functions that compute the convolution and the recurrence are attributes, which `attnres.accelerated` replaces.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache
from transformers.integrations.accelerate import force_accelerate_hooks
from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear

from .padding_attnres import Rows
from .recording_attnres import RecordingLayer, last_real
from .rows_attnres import is_start


def convolve(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, seq_idx: Tensor | None = None
) -> Tensor:
    """Compute the causal convolution of each channel; with `seq_idx`, separately for each document.

    Args:
        inputs: `[batch, channels, seq]`.
        weight: `[channels, kernel]`.
        bias: `[channels]` or `None`.
        activation: name of an activation function, or `None`.
        seq_idx: `[batch, seq]`, the number of each token's document.

    Returns:
        `[batch, channels, seq]`.
    """
    if seq_idx is None:
        return kimi_linear.causal_conv1d_fn(inputs, weight=weight, bias=bias, activation=activation)
    inputs_in, length = inputs.to(weight.dtype), inputs.shape[-1]
    output = inputs_in * weight[:, -1:]
    for back in range(1, min(weight.shape[-1], length)):
        # A token of another document contributes zero, as before the start of a row.
        is_same = (seq_idx[:, back:] == seq_idx[:, :-back]).unsqueeze(1)  # (batch, 1, seq - back)
        earlier = (inputs_in[..., :-back] * weight[:, -1 - back, None]).masked_fill(~is_same, 0)
        output = output + F.pad(earlier, (back, 0))
    if bias is not None:
        output = output + bias[:, None]
    if activation is not None:
        output = kimi_linear.ACT2FN[activation](output)
    return output.to(inputs.dtype)


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
    """Compute the recurrence over several tokens; with `seq_idx`, separately over each document.

    Args:
        query: `[batch, seq, heads, d_k]`.
        key: `[batch, seq, heads, d_k]`.
        value: `[batch, seq, heads, d_v]`.
        g: logarithm of each channel's decay, `[batch, seq, heads, d_k]`.
        beta: rate at which a token writes to the state, `[batch, seq, heads]`.
        initial_state: `[batch, heads, d_k, d_v]`, or `None` for zeros; it must be `None` with `seq_idx`.
        output_final_state: whether to return the state after the last token, too; there is none with `seq_idx`.
        seq_idx: `[batch, seq]`, the number of each token's document.
        cu_seqlens: the documents' borders in all rows together, for kernels that take them.

    Returns:
        The outputs `[batch, seq, heads, d_v]`, and the state or `None`.
    """
    options = {"output_final_state": output_final_state, "use_qk_l2norm_in_kernel": True}
    if seq_idx is None:
        return kimi_linear.chunk_kimi_delta_attention(
            query, key, value, g=g, beta=beta, initial_state=initial_state, **options
        )
    # No function of `transformers` takes documents on every device. So each document becomes a row, in a batch with the
    # documents of about its length (up to the same power of two). Tokens after a document fill its row to less than
    # twice its length; their outputs are dropped.
    borders = [*is_start(seq_idx).flatten().nonzero().flatten().tolist(), seq_idx.numel()]
    documents: dict[int, list[tuple[int, int]]] = {}
    for start, end in pairwise(borders):
        documents.setdefault((end - start - 1).bit_length(), []).append((start, end))
    inputs = [tensor.flatten(0, 1) for tensor in (query, key, value, g, beta)]
    outputs, places = [], []
    for alike in documents.values():
        starts, ends = torch.tensor(alike, device=query.device).unsqueeze(-1).unbind(1)  # (documents, 1) each
        tokens = starts + torch.arange(max(end - start for start, end in alike), device=query.device)
        rows = [tensor[tokens.clamp(max=seq_idx.numel() - 1)] for tensor in inputs]
        output, _ = kimi_linear.chunk_kimi_delta_attention(
            *rows[:3], g=rows[3], beta=rows[4], initial_state=None, **options | {"output_final_state": False}
        )
        outputs.append(output[tokens < ends])
        places.append(tokens[tokens < ends])
    return torch.cat(outputs)[torch.cat(places).argsort()].view_as(value), None


def step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute the recurrence for one token; the shapes are those of [`chunk`]."""
    options = {"output_final_state": output_final_state, "use_qk_l2norm_in_kernel": True}
    return kimi_linear.recurrent_kimi_delta_attention(
        query, key, value, g=g, beta=beta, initial_state=initial_state, **options
    )


def convolve_step(inputs: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """Compute the convolution of one token `[batch, channels, 1]`; update `state` `[batch, channels, kernel]`."""
    return kimi_linear.causal_conv1d_update(inputs, state, weight=weight, bias=bias, activation=activation)


class DeltaAttention(kimi_linear.KimiLinearDeltaAttention):
    """Kimi Linear's delta attention for rows of several documents and for padding anywhere."""

    chunk, step = staticmethod(chunk), staticmethod(step)
    convolve, convolve_step = staticmethod(convolve), staticmethod(convolve_step)

    @force_accelerate_hooks("conv1d")  # its weight is used without a call of the module
    def forward(self, hidden_states: Tensor, cache: Cache | None = None, rows: Rows | None = None) -> Tensor:
        """Compute the layer's output `[batch, seq, hidden]`.

        Args:
            hidden_states: `[batch, seq, hidden]`.
            cache: holds the states of earlier tokens; it must be `None` with several documents in a row.
            rows: which tokens are padding, and where documents begin; `None`: each row is one text.
        """
        batch, length = hidden_states.shape[:2]
        rows = rows or Rows()
        order = rows.order
        if order is not None:
            hidden_states = hidden_states.gather(1, order.unsqueeze(-1).expand_as(hidden_states))
        hidden_states = kimi_linear.apply_mask_to_padding_states(hidden_states, rows.is_real)

        projections = self.q_proj, self.k_proj, self.v_proj
        mixed = torch.cat([project(hidden_states) for project in projections], -1).transpose(1, 2)
        # Both states are `None` before the first token. (The oldest `transformers` has no `get_conv_state`.)
        conv_state = state = recorder = None
        if cache is not None:
            states: Any = cache.layers[self.layer_idx]
            if states.has_previous_state[0]:
                conv_state, state = states.conv_states[0], states.recurrent_states[0]
            recorder = states if isinstance(states, RecordingLayer) and states.record_past else None
        is_step = length == 1 and conv_state is not None and order is None and recorder is None
        if is_step:
            convolved = self.run_convolution(self.convolve_step, mixed, conv_state)
        else:
            if cache is not None:
                # The kept tokens come before these: `[batch, channels, kernel + seq]`.
                mixed = self._update_conv_state(cache, mixed, conv_state, None if order is None else rows.is_real)
            convolved = self.run_convolution(self.convolve, mixed, seq_idx=rows.documents)[..., -length:]
        heads = batch, length, -1, self.head_dim
        query, key, value = (part.view(heads) for part in convolved.transpose(1, 2).split(self.qkv_dim, dim=-1))

        g, beta = self.forget_gate(hidden_states), self.write_rate(hidden_states)
        if order is not None and rows.is_real is not None:
            # Padding neither forgets nor writes. (Zero inputs are not enough: their convolution sees real tokens.)
            is_padding = ~rows.is_real.unsqueeze(-1)
            g, beta = g.masked_fill(is_padding.unsqueeze(-1), 0), beta.masked_fill(is_padding, 0)
        inputs = query, key, value, g, beta
        if recorder is not None:
            output, state = recorder.run(self.chunk, self.step, inputs, state, mixed, order, rows.is_real)
        elif is_step:
            output, state = self.step(*inputs, state, True)
        else:
            documents = {"seq_idx": rows.documents, "cu_seqlens": rows.borders}
            output, state = self.chunk(*inputs, state, cache is not None, **documents)
        if cache is not None:
            # pyrefly: ignore[missing-attribute]  # asked for a state, the recurrence returns one
            cache.update_recurrent_state(state.float(), self.layer_idx)

        gate = self.output_gate(hidden_states).view(heads)
        output = self.o_proj(self.o_norm(output, gate).reshape(batch, length, -1))
        if order is not None:
            output = output.gather(1, order.argsort(dim=1).unsqueeze(-1).expand_as(output))
        return output

    def run_convolution(self, function: Callable[..., Tensor], *args: Tensor, **kwargs: Any) -> Tensor:
        """Call [`convolve`] or [`convolve_step`] with the layer's weight, bias and activation."""
        weight, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
        return function(*args, weight=weight, bias=bias, activation=self.activation, **kwargs)

    def write_rate(self, hidden_states: Tensor) -> Tensor:
        """Compute `beta` `[batch, seq, heads]`, the rate at which each token writes to the state."""
        return self.b_proj(hidden_states).sigmoid()

    def output_gate(self, hidden_states: Tensor) -> Tensor:
        """Compute the logits `[batch, seq, heads * d_v]` of the output's gate."""
        return self.g_b_proj(self.g_a_proj(hidden_states))

    def _update_conv_state(
        self, cache: Cache, mixed: Tensor, conv_state: Tensor | None, is_real: Tensor | None
    ) -> Tensor:
        """Keep the last tokens of each row for the convolution; return the tokens kept earlier and the new ones.

        Args:
            cache: the cache that keeps the tokens.
            mixed: `[batch, channels, seq]`.
            conv_state: `[batch, channels, kernel]`, or `None` before the first token.
            is_real: `[batch, seq]`, true for real tokens, which padding follows; `None` if there is no padding.
        """
        size = self.conv_kernel_size
        if is_real is None:
            return cache.update_conv_state(mixed, self.layer_idx, conv_kernel_size=size)
        before = mixed.new_zeros(*mixed.shape[:2], size) if conv_state is None else conv_state
        mixed = torch.cat((before, mixed), -1)
        # The cache keeps `size` tokens, so these replace its whole state.
        cache.update_conv_state(last_real(mixed, is_real, size), self.layer_idx, conv_kernel_size=size)
        return mixed
