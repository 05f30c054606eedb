"""Divide the layers of a decoder into chunks of about equal cost.

The cost of a layer is counted: the parameters that one token uses. The head counts for the last chunk; the embedding is
a look-up, which costs nothing.
"""

from collections.abc import Sequence
from itertools import accumulate

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


def divide_layers(costs: Sequence[float], chunks: int, last: float = 0.0) -> list[range]:
    """Divide layers into consecutive chunks so that the most expensive chunk costs as little as possible.

    Args:
        costs: The cost of each layer.
        chunks: The number of chunks.
        last: A cost that is added to the last chunk.

    Returns:
        The layers of each chunk, at least one. Among the best divisions, the one whose earlier chunks are largest.

    Raises:
        ValueError: There are fewer layers than chunks.
    """
    count = len(costs)
    if count < chunks:
        raise ValueError(
            f"the model has {count} layers, but `stages` times `virtual` of the recipe's `pipeline` is {chunks}: each "
            "chunk needs a layer, so make one of them smaller."
        )
    sums = [0.0, *accumulate(costs)]
    # best[k][i]: the least maximum over k chunks that hold the layers from i to the end.
    best = [[float("inf")] * (count + 1) for _ in range(chunks + 1)]
    for i in range(count):
        best[1][i] = sums[count] - sums[i] + last
    for k in range(2, chunks + 1):
        for i in range(count - k + 1):
            best[k][i] = min(max(sums[j] - sums[i], best[k - 1][j]) for j in range(i + 1, count - k + 2))
    limit, start, divided = best[chunks][0], 0, []
    for k in range(chunks, 1, -1):
        # The furthest end that keeps this chunk and the rest within the limit.
        ends = range(start + 1, count - k + 2)
        end = max(j for j in ends if sums[j] - sums[start] <= limit and best[k - 1][j] <= limit)
        divided.append(range(start, end))
        start = end
    return [*divided, range(start, count)]


def listed_layers(counts: Sequence[int], layers: int) -> list[range]:
    """Return the layers of each chunk for given numbers of layers.

    Args:
        counts: The number of layers in each chunk.
        layers: The number of layers in the model.

    Raises:
        ValueError: The numbers do not add up to the model's layers.
    """
    if sum(counts) != layers:
        raise ValueError(
            f"`layers` of the recipe's `pipeline` add up to {sum(counts)}, but the model has {layers} layers."
        )
    ends = [*accumulate(counts)]
    return [range(end - count, end) for end, count in zip(ends, counts)]


def count_costs(model: PreTrainedModel) -> tuple[list[float], float]:
    """Count the parameters that one token uses in each decoder layer, and in the head.

    Args:
        model: A language model; it may be on the meta device.

    Returns:
        The cost of each layer, and of the head.
    """
    config, head = model.config, model.get_output_embeddings()
    layers = [float(_activated(layer, config)) for layer in model.base_model.layers]
    return layers, float(sum(parameter.numel() for parameter in head.parameters()))


def _activated(layer: nn.Module, config: PreTrainedConfig) -> int:
    """Count the parameters of a layer that one token uses: of the routed experts, only those that it is routed to."""
    total = sum(parameter.numel() for parameter in layer.parameters())
    for module in layer.modules():
        # As in `attnres.configuration.counting`: each model of `transformers` has its own class of stacked experts.
        if type(module).__name__.endswith("Experts"):
            stacked = sum(parameter.numel() for parameter in module.parameters())
            total -= stacked // module.num_experts * (module.num_experts - config.num_experts_per_tok)
    return total


__all__ = ["count_costs", "divide_layers", "listed_layers"]
