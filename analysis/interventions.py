"""Interventions on the depth: what the loss says is used, which need not be what has much weight.

Two interventions are made, one at a time: a source is hidden from all consumers after it, or the depth weights of one
consumer are made uniform. To hide a source, its share is subtracted from what later consumers read:

    h_l - sum_{i in source} M[l, i] v_i        with M, the depth-mixing matrix, as it is without the intervention

The norm of a sublayer cancels the scale of its input, so for attention residuals this equals a softmax over the other
sources. A block is hidden from the consumers after it. Those within it still read its running sum.
"""

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from .axis import DepthAxis, depth_axis
from .batches import Batch, as_batches, predicted_mask
from .depth_attention import DepthAttention
from .measurement import DrawableMeasurement
from .watching import family_member, measuring, summed_loss, watched


@dataclass(frozen=True, eq=False, repr=False)
class Interventions(DrawableMeasurement):
    """Losses in nats per token, all on the same tokens.

    Attributes:
        depth: The names of consumers and sources.
        loss: The loss of the model as it is.
        hidden: The rise of the loss when a source is hidden from all consumers after it, `[sources]` in float64.
        uniform: The rise of the loss when a consumer's depth weights are made uniform, `[L + 1]` in float64; NaN where
            the consumer has one source, or the model no depth attention.
        tokens: The number of tokens that were predicted.
    """

    depth: DepthAxis
    loss: float
    hidden: Tensor
    uniform: Tensor
    tokens: int


def interventions(
    model: PreTrainedModel,
    batches: Batch | Iterable[Batch],
    attention: DepthAttention | None = None,
    advance: Callable[[], Any] = lambda: None,
) -> Interventions:
    """Measure what each source, and the depth weights of each consumer, are worth in loss.

    Each intervention takes a pass over all batches; [`count_passes`] counts them.

    Args:
        model: A causal language model of the family, or a standard one on a backbone that the family knows.
        batches: One or several, each token ids `[batch, seq]` or what a tokenizer returns.
        attention: The depth attention of the model, if it has any: it says which sources there are, and how many each
            consumer has. Without it, each output is a source, and no weights are made uniform.
        advance: Called without arguments after each pass over all batches.

    Returns:
        The loss of the model, and the rise of the loss by each intervention.

    Raises:
        ValueError: There is no batch, no sequence has two tokens, or the model's results are not finite.
    """
    batches = list(as_batches(batches))
    if not batches:
        raise ValueError("no batch of token ids was given.")
    model = family_member(model)
    if not any(map(_count_predicted, batches)):
        raise ValueError("no sequence of at least two tokens was given.")
    depth = attention.depth if attention else depth_axis(model)

    def loss_with(make: Callable[[], Any] = lambda: None) -> float:
        """Return the loss over all batches; `make` makes the intervention for one pass."""
        total = tokens = 0.0
        for batch in batches:
            change = make()
            with watched(model, getattr(change, "read", None), getattr(change, "write", None)):
                count = _count_predicted(batch)
                loss = summed_loss(model, batch).item() if count else 0.0
            total, tokens = total + loss, tokens + count
        advance()
        return total / tokens

    with measuring(model), torch.no_grad():
        loss = loss_with()
        hidden = [loss_with(partial(_Hidden, depth.members(source))) - loss for source in range(len(depth.sources))]
        uniform = [
            loss_with(partial(_Uniform, consumer)) - loss
            if attention and attention.num_sources[consumer] > 1
            else math.nan
            for consumer in range(len(depth.consumers))
        ]
    tokens = sum(map(_count_predicted, batches))
    hidden, uniform = (torch.tensor(rises, dtype=torch.float64) for rises in (hidden, uniform))
    return Interventions(depth, loss, hidden, uniform, tokens)


def count_passes(depth: DepthAxis, attention: DepthAttention | None = None) -> int:
    """Count the passes over its batches that [`interventions`] takes.

    Args:
        depth: The depth axis of the model.
        attention: The depth attention of the model, if it has any.
    """
    return 1 + len(depth.sources) + sum(count > 1 for count in (attention.num_sources if attention else ()))


class _Hidden:
    """One pass in which some outputs are hidden from the consumers after the last of them.

    Args:
        members: The indices of the outputs that are hidden; 0 is the embedding.
    """

    def __init__(self, members: range):
        self.members = members
        self.num_reads = 0
        # A second state, which the same reads and writes keep, but with zeros in place of the hidden outputs.
        self.state_without: Any = None

    def read(self, connection: nn.Module, original: Any, state: Any, *norm: Any) -> Any:
        # The weights are those of the full state.
        coefficients = connection.coefficients(state, *norm)
        result = original(state, *norm)
        if self.num_reads == 0:  # the state is the embedding
            self.state_without = torch.zeros_like(state) if 0 in self.members else state
        # The next layer may be on another device than the last one.
        self.state_without = tree_map(lambda tensor: tensor.to(result[0].device), self.state_without)
        inputs, self.state_without = connection.mix(self.state_without, coefficients)
        self.num_reads += 1
        # The first consumer reads nothing but the embedding, so it keeps it.
        if self.num_reads <= max(self.members[-1], 1):
            return result
        return inputs.to(result[0].dtype), *result[1:]

    def write(self, connection: nn.Module, original: Any, state: Any, output: Tensor) -> Any:
        is_hidden = self.num_reads in self.members
        self.state_without = original(self.state_without, torch.zeros_like(output) if is_hidden else output)
        return original(state, output)


class _Uniform:
    """One pass in which the depth weights of one consumer are uniform.

    Args:
        consumer: The index of the consumer.
    """

    def __init__(self, consumer: int):
        self.consumer = consumer
        self.num_reads = 0

    def read(self, connection: nn.Module, original: Any, *arguments: Any) -> Any:
        self.num_reads += 1
        if self.num_reads - 1 != self.consumer:
            return original(*arguments)
        # Read by a copy of the connection whose query is zero. The class's `forward` is called, and not the module's,
        # which may be wrapped in hooks.
        uniform = copy.copy(connection)
        uniform.has_prior = False
        uniform._parameters = {
            name: torch.zeros_like(tensor) if name in ("weight", "bias") and tensor is not None else tensor
            for name, tensor in connection._parameters.items()
        }
        return type(connection).forward(uniform, *arguments)


def _count_predicted(batch: Batch) -> int:
    return int(predicted_mask(batch).sum())


__all__ = ["Interventions", "count_passes", "interventions"]
