"""Interventions on the depth: change what consumers read, and measure the rise of the loss.

The rise shows which sources the model uses. A source with a large weight need not be used. There are two kinds of
intervention, made one at a time: a source is hidden from all consumers after it, or the depth weights of one consumer
are made uniform. To hide a source, its share is subtracted from the inputs of later consumers:

    h_l - sum_{i in source} M[l, i] v_i        M = the depth-mixing matrix without the intervention

The norm of a sublayer cancels the scale of its input, so for attention residuals this equals a softmax over the other
sources. A block is hidden from the consumers after it. Consumers within it still read its running sum.
"""

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from attnres.residual_attnres import ResidualConnection

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
        uniform: The rise of the loss when a consumer's depth weights are made uniform, `[L + 1]` in float64; NaN if the
            consumer has one source, or if the model has no depth attention.
        tokens: The number of predicted tokens.
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
    """Measure how much the loss rises without each source, and without the depth weights of each consumer.

    Each intervention takes a pass over all batches; [`count_passes`] counts these passes.

    Args:
        model: A causal language model of the family, or a standard one on a backbone in `BACKBONES`.
        batches: One or several, each token ids `[batch, seq]` or the mapping that a tokenizer returns.
        attention: The depth attention of the model, if it has any. The sources, and their number for each consumer, are
            taken from it. Without it, each output is a source, and no weights are made uniform.
        advance: Called without arguments after each pass over all batches.

    Returns:
        The loss of the model, and its rise by each intervention.

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

    def loss_with(make_intervention: Callable[[], Any] = lambda: None) -> float:
        """Return the loss in nats per token over all batches, with a new intervention for each pass."""
        total = tokens = 0.0
        for batch in batches:
            intervention = make_intervention()
            with watched(model, getattr(intervention, "read", None), getattr(intervention, "write", None)):
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
    """Count the passes that [`interventions`] makes over its batches.

    Args:
        depth: The depth axis of the model.
        attention: The depth attention of the model, if it has any.
    """
    return 1 + len(depth.sources) + sum(count > 1 for count in (attention.num_sources if attention else ()))


class _Hidden:
    """The reads and writes of one pass in which some outputs are hidden from the consumers after them.

    Args:
        members: The indices of the hidden outputs, which follow one another; 0 is the embedding.
    """

    def __init__(self, members: range):
        self.members = members
        self.num_reads = 0
        # A second state, made by the same reads and writes, but with zeros in place of the hidden outputs.
        self.state_without: Any = None

    def read(self, connection: ResidualConnection, original: Any, state: Any, *norm: Any) -> Any:
        # The coefficients come from the full state, as without the intervention.
        coefficients = connection.coefficients(state, *norm)
        result = original(state, *norm)
        if self.num_reads == 0:  # the state is the embedding
            self.state_without = torch.zeros_like(state) if 0 in self.members else state
        # The next layer may be on another device than the last one.
        self.state_without = tree_map(lambda tensor: tensor.to(result[0].device), self.state_without)
        inputs, self.state_without = connection.mix(self.state_without, coefficients)
        self.num_reads += 1
        # Nothing is hidden from the first consumer, since the embedding is its only source.
        if self.num_reads <= max(self.members[-1], 1):
            return result
        return inputs.to(result[0].dtype), *result[1:]

    def write(self, connection: ResidualConnection, original: Any, state: Any, output: Tensor) -> Any:
        is_hidden = self.num_reads in self.members
        self.state_without = original(self.state_without, torch.zeros_like(output) if is_hidden else output)
        return original(state, output)


class _Uniform:
    """The reads of one pass in which the depth weights of one consumer are uniform.

    Args:
        consumer: The index of the consumer.
    """

    def __init__(self, consumer: int):
        self.consumer = consumer
        self.num_reads = 0

    def read(self, connection: ResidualConnection, original: Any, *arguments: Any) -> Any:
        self.num_reads += 1
        if self.num_reads - 1 != self.consumer:
            return original(*arguments)
        # A copy of the connection with a zero query and no prior gives all sources the same weight. The class's
        # `forward` is called, since the module's `forward` may be wrapped in hooks.
        uniform = copy.copy(connection)
        parameters = {
            name: torch.zeros_like(tensor) if name in ("weight", "bias") and tensor is not None else tensor
            for name, tensor in connection._parameters.items()
        }
        vars(uniform).update(has_prior=False, _parameters=parameters)
        return type(connection).forward(uniform, *arguments)


def _count_predicted(batch: Batch) -> int:
    return int(predicted_mask(batch).sum())


__all__ = ["Interventions", "count_passes", "interventions"]
