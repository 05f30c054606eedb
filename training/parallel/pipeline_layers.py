"""Divide the layers of a decoder into chunks of about equal cost.

The cost of a layer is counted: the parameters that one token uses. The head counts for the last chunk; the embedding is
a look-up, which costs nothing.
"""

from collections.abc import Sequence
from itertools import accumulate

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from attnres.utils import partition

from .pipeline_settings import PipelineSettings


def chunk_layers(model: PreTrainedModel, settings: PipelineSettings) -> list[range]:
    """Return the layers of each chunk: as the settings list them, or of about equal cost.

    Args:
        model: The whole model.
        settings: The division.

    Raises:
        ValueError: The model has fewer layers than chunks, or other layers than the list.
    """
    costs, last = count_costs(model)
    if settings.layers is not None:
        return listed_layers(settings.layers, len(costs))
    return divide_layers(costs, settings.chunks, last)


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
    return [range(part.start, part.stop) for part in partition.divide_layers(costs, chunks, last)]


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


__all__ = ["chunk_layers", "count_costs", "divide_layers", "listed_layers"]
