"""A cache of delta attention that can go back by some tokens, for generation that looks ahead.

Prompt lookup, an assistant model and multi-token prediction draft several tokens. One pass of the model reads all of
them, and the cache then drops the rejected ones by `crop`. Keys and values are cut, but delta attention has one state,
and the caches of `transformers` record no earlier ones. This layer keeps what the recurrence reads of the last tokens,
and computes the state after the accepted ones from the state before the pass.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import LinearAttentionLayer

# Passes of up to this many tokens run the recurrence token by token, which is faster than chunks of 64, and gives the
# bits that single tokens give.
STEPS = 32
# Of a longer pass, such as a prompt with a draft after it, the last tokens are enough: at least this many are recorded.
RECORDED = 256
CHUNK = 64  # number of tokens that kernels compute together

Recurrence = Callable[..., tuple[Tensor, Tensor | None]]


class RecordedPass(NamedTuple):
    """A record of one forward pass: the inputs of delta attention at its last tokens, and the state before them."""

    state: Tensor | None
    """`[batch, heads, d_k, d_v]`, the state before these tokens; `None` before the first token."""
    mixed: Tensor
    """`[batch, channels, kernel + seq]`, the inputs of the convolution, after those kept before."""
    inputs: tuple[Tensor, Tensor, Tensor, Tensor]
    """`key`, `value`, `g` and `beta` of the recurrence, each `[batch, seq, ...]`."""
    recurrence: Recurrence
    """The function that computes the recurrence, with the arguments of `chunk` of `delta_attention_attnres`."""
    order: Tensor | None
    """`[batch, seq]`, the indices of these tokens in their rows, where padding was moved; see `Rows.order`."""
    is_real: Tensor | None
    """`[batch, seq]`, false for padding, in that order."""

    @property
    def length(self) -> int:
        """Return the number of tokens."""
        return self.inputs[0].shape[1]

    def states_after(self, count: int) -> tuple[Tensor, Tensor | None]:
        """Compute the states after the first `count` tokens of each row.

        Returns:
            The inputs that the convolution keeps `[batch, channels, kernel]`, and the state of the recurrence.
        """
        size, order = self.mixed.shape[-1] - self.length, self.order
        key, value, g, beta = self.inputs
        if order is None or self.is_real is None:
            kept = self.mixed[..., count : count + size]
            key, value, g, beta = (tensor[:, :count] for tensor in self.inputs)
        else:
            # Dropped tokens lie between others, so they become padding: they neither forget nor write.
            is_dropped = (order >= count).unsqueeze(-1)
            g, beta = g.masked_fill(is_dropped.unsqueeze(-1), 0), beta.masked_fill(is_dropped, 0)
            kept = last_real(self.mixed, self.is_real & (order < count), size)
        if count == 0:
            return kept, self.state
        # Only the state matters, so any tensor of the right shape serves as the query.
        return kept, self.recurrence(key, key, value, g, beta, self.state, True)[1]


def last_real(mixed: Tensor, is_real: Tensor, size: int) -> Tensor:
    """Return the last `size` inputs of the convolution in each row, without the padding after them.

    Args:
        mixed: `[batch, channels, size + seq]`, the inputs that were kept before, and those of the tokens.
        is_real: `[batch, seq]`, true for real tokens, which padding follows.
        size: number of inputs that the convolution keeps.

    Returns:
        `[batch, channels, size]`.
    """
    # A row has `size + count` inputs, where `count` is its number of real tokens.
    last = is_real.sum(1, keepdim=True) + torch.arange(size, device=mixed.device)  # (batch, size)
    return mixed.gather(2, last.unsqueeze(1).expand(-1, mixed.shape[1], -1))


class RecordingLayer(LinearAttentionLayer):
    """A layer of a cache that delta attention fills and that [`crop`] takes back by some tokens.

    Args:
        layer: the layer of `transformers` that this one continues.
    """

    def __init__(self, layer: LinearAttentionLayer):
        self.__dict__.update(layer.__dict__)
        self.passes: list[RecordedPass] = []

    def run(
        self,
        chunk: Recurrence,
        step: Recurrence,
        inputs: tuple[Tensor, ...],
        state: Tensor | None,
        mixed: Tensor,
        order: Tensor | None,
        is_real: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the recurrence of one pass, and record it.

        Args:
            chunk: the recurrence over many tokens.
            step: the recurrence token by token.
            inputs: `query`, `key`, `value`, `g` and `beta`, each `[batch, seq, ...]`.
            state: the state before the pass, `None` before the first token.
            mixed: `[batch, channels, seq]` or longer, the inputs of the convolution, which end with those of this pass.
            order: see [`RecordedPass`].
            is_real: see [`RecordedPass`].

        Returns:
            The outputs `[batch, seq, heads, d_v]`, and the state after the pass.
        """
        length = inputs[0].shape[1]
        recurrence = step if state is not None and length <= STEPS else chunk
        # A whole number of chunks goes first, so that the split changes no bit.
        start = 0 if length < 2 * RECORDED or order is not None else (length - RECORDED) // CHUNK * CHUNK
        outputs = []
        if start:
            output, state = chunk(*(tensor[:, :start] for tensor in inputs), state, True)
            outputs.append(output)
            inputs = tuple(tensor[:, start:].clone() for tensor in inputs)  # a view would keep the whole prompt
            self.passes = []  # crop cannot go back to them through what is not recorded
        size: Any = self.conv_kernel_size[0]
        mixed = F.pad(mixed, (size + length - start - mixed.shape[-1], 0))  # also cuts
        # pyrefly: ignore[bad-argument-type]  # four tensors follow the query
        self.passes.append(RecordedPass(state, mixed, inputs[1:], recurrence, order, is_real))
        output, state = recurrence(*inputs, state, True)
        return torch.cat((*outputs, output), 1), state

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Keep the last inputs of the convolution alone, because [`RecordedPass`] has the others."""
        states = super().update_conv_state(conv_states, state_idx, **kwargs)
        if self.record_past:
            size: Any = self.conv_kernel_size[state_idx]
            self.conv_states[state_idx] = F.pad(states, (size - states.shape[-1], 0))  # also cuts
        return states

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Keep a state without changing the one before, which [`RecordedPass`] may hold."""
        if not self.record_past:
            self.passes = []
            return super().update_recurrent_state(recurrent_states, state_idx, **kwargs)
        self.recurrent_states[state_idx] = recurrent_states
        self.is_recurrent_states_initialized[state_idx] = True
        return recurrent_states

    @property
    def is_croppable(self) -> bool:
        """Return whether [`crop`] can go back: tokens are recorded from now on."""
        return self.record_past

    def crop(self, tokens_to_remove: int) -> None:
        """Go back by some tokens, and forget the record of those that stay.

        Args:
            tokens_to_remove: the number of tokens, negative or 0, as `Cache.crop` takes it.

        Raises:
            RuntimeError: so many tokens are not recorded.
        """
        count, recorded = -tokens_to_remove, sum(record.length for record in self.passes)
        if not 0 <= count <= recorded:
            raise RuntimeError(
                f"the state of delta attention can go back by 0 to {recorded} tokens, not {count}: pass a number from "
                f"{-recorded} to 0 to `crop`. Tokens are recorded after `cache.activate_past_recording()`."
            )
        passes, self.passes = self.passes, []
        while count > 0:
            record = passes.pop()
            stay = max(record.length - count, 0)
            count -= record.length - stay
            if stay == 0 and count > 0:
                continue
            kept, state = record.states_after(stay)
            self.conv_states[0] = kept
            if state is None:
                self.has_previous_state[0] = False
            else:
                self.recurrent_states[0] = state

    def reset(self) -> None:
        """Forget the states and what is recorded."""
        self.passes = []
        super().reset()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorder the rows, and forget what is recorded of them in another order."""
        self.passes = []
        super().reorder_cache(beam_idx)


def record_states(cache: Cache | None) -> None:
    """Let the layers of a cache record states if `transformers` has asked for that.

    Args:
        cache: the cache of a forward pass. Its layers of linear attention are replaced by [`RecordingLayer`].
    """
    layers: list[Any] = getattr(cache, "layers", [])
    for i, layer in enumerate(layers):
        if type(layer) is LinearAttentionLayer and layer.record_past:
            layers[i] = RecordingLayer(layer)
