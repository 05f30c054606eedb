"""Find which tensors of the depth state travel between the chunks of a pipeline (section 4 of the paper).

The state of a residual connection is a tuple of tensors. A read or a write that leaves a tensor as it is returns the
same object, so the objects tell which parts of the state are finished: for Block AttnRes the embedding and the blocks.
[`trace_states`] runs the connections, without the layers, for one token, and numbers the objects. From these numbers
[`assign_transfers`] decides what a transfer must carry:

    naive     every tensor of the state
    cached    the tensors that the receiving process has neither received nor made, for this micro-batch

With C chunks of `N_p` blocks on P processes, V chunks each, the naive way sends `C (C - 1) / 2 N_p` blocks per token.
With the cache, a transfer carries at most `P N_p` blocks: the blocks since the receiver's last chunk.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from attnres import ResidualConfig
from attnres.residual_attnres import DepthState


@dataclass(frozen=True)
class Piece:
    """One tensor of the depth state.

    Attributes:
        number: Equal numbers are the same tensor, at different depths.
        shape: Its shape, which begins with `batch, seq`.
        dtype: Its dtype.
    """

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, device: torch.device | str) -> Tensor:
        """Return a tensor of this shape and dtype, with any values."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class State:
    """The depth state at one depth.

    Attributes:
        pieces: Its tensors.
        is_tuple: Whether the connection keeps it as a tuple, also if it has one tensor only.
    """

    pieces: tuple[Piece, ...]
    is_tuple: bool

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return the numbers of its tensors."""
        return tuple(piece.number for piece in self.pieces)


@dataclass(frozen=True)
class Chunk:
    """The part of a decoder that runs at once, and what enters and leaves it.

    Attributes:
        index: Its place among the chunks, from 0.
        layers: Its decoder layers.
        before: The state that its first layer gets. The first chunk makes this state, the embedding, by itself.
        after: The state after its last layer. The last chunk reads it by itself.
        received: The pieces that a transfer brings, in their order in `before`.
        cached: The numbers of the pieces that come from the cache of the process.
        sent: The pieces that a transfer takes to the next chunk, in their order in `after`.
        kept: The numbers that this chunk puts into the cache of the process, for later chunks there.
        freed: The numbers that this chunk takes from the cache, and no later chunk of the process does.
    """

    index: int
    layers: range
    before: State
    after: State
    received: tuple[Piece, ...]
    cached: tuple[int, ...]
    sent: tuple[Piece, ...]
    kept: tuple[int, ...]
    freed: tuple[int, ...]


@torch.no_grad()
def trace_states(
    config: ResidualConfig,
    batch: int,
    length: int,
    dtype: torch.dtype = torch.float32,
    output_dtype: torch.dtype | None = None,
) -> list[State]:
    """Compute the depth state before each layer, without running the layers.

    Args:
        config: The model's configuration.
        batch: Sequences in a micro-batch.
        length: Tokens in a sequence.
        dtype: Dtype of the embedding.
        output_dtype: Dtype of the sublayers' outputs, by default `dtype`; under autocast it may be narrower.

    Returns:
        The states before each layer and, as the last item, after the last layer.
    """
    # The plain implementation returns the sources as they are. Others may return copies of the references.
    config = copy.copy(config)
    config.depth_attention_implementation = "eager"
    form, sublayers = config.connection, config.sublayers
    numbers: dict[int, int] = {}
    alive: list[Tensor] = []  # an `id` stays unique only while its tensor exists

    def number_of(tensor: Tensor) -> int:
        if id(tensor) not in numbers:
            numbers[id(tensor)] = len(numbers)
            alive.append(tensor)
        return numbers[id(tensor)]

    def describe(state: DepthState) -> State:
        tensors = state if isinstance(state, tuple) else (state,)
        pieces = (Piece(number_of(one), (batch, length, *one.shape[2:]), one.dtype) for one in tensors)
        return State(tuple(pieces), isinstance(state, tuple))

    # To compute with one token takes a tenth of the time that PyTorch takes to find shapes on the meta device.
    is_autocast = output_dtype not in (None, dtype)
    with torch.device("cpu"), torch.autocast("cpu", output_dtype, enabled=is_autocast):
        shape = 1, 1, config.hidden_size
        state: DepthState = torch.empty(shape, dtype=dtype)
        output = torch.empty(shape, dtype=output_dtype or dtype)
        states = [describe(state)]
        for index in range(config.num_sublayers):
            connection = form(config, index).to(dtype)
            norm = torch.ones(config.hidden_size, dtype=dtype) if connection.has_norm else None
            # A read that takes the norm module of its sublayer changes neither shape nor dtype by it.
            _, _, state = connection(state, torch.clone if connection.takes_norm else norm)
            state = connection.write(state, output.clone())
            if (index + 1) % len(sublayers) == 0:
                states.append(describe(state))
    return states


def assign_transfers(states: Sequence[State], layers: Sequence[range], processes: int, cache: bool) -> list[Chunk]:
    """Assign to each chunk of a pipeline the tensors that it receives, keeps and sends.

    Args:
        states: The states before each layer and after the last one, of [`trace_states`].
        layers: The layers of each chunk, in order.
        processes: P. Process `p` runs the chunks `p`, `p + P`, ....
        cache: Whether a process keeps what it has received and made.

    Returns:
        The chunks, in order.
    """
    borders = [(states[part.start], states[part.stop]) for part in layers]
    numbers = [dict.fromkeys((*before.numbers, *after.numbers)) for before, after in borders]
    # For each chunk, the tensors that its process has received or made in earlier chunks.
    known = [{*chain(*numbers[index % processes : index : processes])} for index in range(len(layers))]
    cached = [
        tuple(number for number in before.numbers if cache and number in held)
        for (before, _), held in zip(borders, known)
    ]
    # The first chunk embeds the tokens by itself, and the last one sends nothing.
    received = [
        tuple(piece for piece in before.pieces if piece.number not in taken)
        for (before, _), taken in zip(borders[1:], cached[1:])
    ]
    chunks = []
    for index, part in enumerate(layers):
        later = {*chain(*cached[index + processes :: processes])}
        chunks.append(
            Chunk(
                index,
                layers=part,
                before=borders[index][0],
                after=borders[index][1],
                received=((), *received)[index],
                cached=cached[index],
                sent=(*received, ())[index],
                kept=tuple(number for number in numbers[index] if number in later and number not in known[index]),
                freed=tuple(number for number in cached[index] if number not in later),
            )
        )
    return chunks


__all__ = ["Chunk", "Piece", "State", "assign_transfers", "trace_states"]
