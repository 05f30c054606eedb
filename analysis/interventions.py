"""Interventions on the depth: what is used, not only what is weighted.

The rise of the loss when one source is hidden from all readers after it, and when one reader's depth weights are made
uniform. A hidden source is subtracted from what they read, in the share that it has there:

    h_l - sum_{i in source} M[l, i] v_i         with the weights of h_l

The norm of a sublayer cancels the scale of its input, so that for attention residuals this is a softmax over the other
sources. Readers within a block are not after it: they go on reading its running sum.
"""

import copy
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from .depth_attention import DepthAttention
from .names import Depth, Measurement, depth_of
from .watching import Batch, family_member, measuring, predicted, several, summed_loss, watched

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False, repr=False)
class Interventions(Measurement):
    """Losses in nats per token, all on the same tokens.

    Attributes:
        depth: names of readers and sources.
        loss: of the model as it is.
        hidden: the rise when a source is hidden from all readers after it, `[sources]` in float64.
        uniform: the rise when a reader's depth weights are made uniform, `[L + 1]`; NaN where it has one source, or the
            model no depth attention.
        tokens: how many were predicted.
    """

    depth: Depth
    loss: float
    hidden: Tensor
    uniform: Tensor
    tokens: int

    def plot(self, path: str | os.PathLike | None = None) -> "Figure":
        """Draw them by depth; see [`attnres.analysis.figures.draw_interventions`]."""
        from .figures import draw_interventions, finish

        return finish(draw_interventions({"": self}), path)


def interventions(
    model: PreTrainedModel,
    batches: Batch | Iterable[Batch],
    attention: DepthAttention | None = None,
    advance: Callable[[], Any] = lambda: None,
) -> Interventions:
    """Measure what each source and each reader's depth weights are worth, by a pass over the batches for each.

    Args:
        model: a causal language model of the family, or a standard one on a backbone that the family knows.
        batches: one or several, each token ids `[batch, seq]` or what a tokenizer returns.
        attention: the model's, if it has any: what its sources are, and how many each reader has. Without, each output
            is a source, and no row is made uniform.
        advance: called after each pass over all batches: one of the model as it is, and one for each intervention.

    Raises:
        ValueError: there is no batch, or what the model computes is not finite.
    """
    batches = list(several(batches))
    if not batches:
        raise ValueError("no batch of token ids was given.")
    model = family_member(model)
    if not any(map(_count, batches)):
        raise ValueError("no sequence of at least two tokens was given.")
    depth = attention.depth if attention else depth_of(model)

    def loss_with(make: Callable[[], Any] = lambda: None) -> float:
        total = tokens = 0.0
        for batch in batches:
            change = make()
            with watched(model, getattr(change, "read", None), getattr(change, "write", None)):
                loss, count = _summed_loss(model, batch)
            total, tokens = total + loss, tokens + count
        advance()
        return total / tokens

    with measuring(model), torch.no_grad():
        loss = loss_with()
        hidden = [loss_with(partial(_Hidden, depth.members(source))) - loss for source in range(len(depth.sources))]
        uniform = [
            loss_with(partial(_Uniform, reader)) - loss if attention and attention.num_sources[reader] > 1 else math.nan
            for reader in range(len(depth.readers))
        ]
    tokens = sum(_count(batch) for batch in batches)
    hidden, uniform = (torch.tensor(rises, dtype=torch.float64) for rises in (hidden, uniform))
    return Interventions(depth, loss, hidden, uniform, tokens)


def count_passes(depth: Depth, attention: DepthAttention | None = None) -> int:
    """How many passes over its batches [`interventions`] takes."""
    return 1 + len(depth.sources) + sum(count > 1 for count in (attention.num_sources if attention else ()))


class _Hidden:
    """A pass in which some outputs, by place, are hidden from those who read after the last of them."""

    def __init__(self, members: range):
        self.members, self.place = members, 0
        self.without: Any = None  # the state, without those outputs

    def read(self, connection: nn.Module, forward: Any, state: Any, *norm: Any) -> Any:
        coefficients = connection.coefficients(state, *norm)
        result = forward(state, *norm)
        if self.place == 0:
            self.without = torch.zeros_like(state) if 0 in self.members else state
        self.without = tree_map(lambda tensor: tensor.to(result[0].device), self.without)
        inputs, self.without = connection.mix(self.without, coefficients)
        self.place += 1
        # The first reader has nothing but the embedding.
        return (inputs.to(result[0].dtype), *result[1:]) if self.place > max(self.members[-1], 1) else result

    def write(self, connection: nn.Module, own: Any, state: Any, output: Tensor) -> Any:
        self.without = own(self.without, torch.zeros_like(output) if self.place in self.members else output)
        return own(state, output)


class _Uniform:
    """A pass in which one reader's query, or what it has for one, is zero."""

    def __init__(self, reader: int):
        self.reader, self.place = reader, 0

    def read(self, connection: nn.Module, forward: Any, *arguments: Any) -> Any:
        self.place += 1
        if self.place - 1 != self.reader:
            return forward(*arguments)
        uniform = copy.copy(connection)
        uniform.has_prior = False
        uniform._parameters = {
            name: torch.zeros_like(tensor) if name in ("weight", "bias") and tensor is not None else tensor
            for name, tensor in connection._parameters.items()
        }
        return type(connection).forward(uniform, *arguments)


def _summed_loss(model: PreTrainedModel, batch: Batch) -> tuple[float, int]:
    count = _count(batch)
    return (summed_loss(model, batch).item() if count else 0.0), count


def _count(batch: Batch) -> int:
    """How many tokens of a batch are predicted."""
    return int(predicted(batch).sum())


__all__ = ["Interventions", "count_passes", "interventions"]
