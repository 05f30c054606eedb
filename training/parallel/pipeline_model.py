"""Cut a model of the family into the chunks of a pipeline, from outside: the model's files know nothing of it.

A chunk is the model itself, with placeholders for the layers and modules that other chunks hold. So the backbone's own
loop runs over the layers, with its masks and positions, and every tensor keeps its name.

Unless the recipe lists them, the layers of each chunk have about equal cost: the number of parameters that one token
uses. The head adds its cost to the last chunk. The embedding is a look-up, which costs nothing.
"""

import copy
from collections.abc import Collection
from itertools import accumulate
from typing import Any, TypeVar, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from attnres import ResidualConfig
from attnres.configuration.counting import count_idle, count_values
from attnres.decoder_attnres import ResidualModel
from attnres.residual_attnres import DepthState
from attnres.utils.partition import partition_layers

from .pipeline_settings import PipelineSettings

AnyModule = TypeVar("AnyModule", bound=nn.Module)


class AbsentLayer(nn.Module):
    """A placeholder for a decoder layer of another chunk: it returns the state as it is.

    Args:
        layer_idx: The index of the layer in the decoder.
    """

    def __init__(self, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx

    def forward(self, hidden_states: DepthState, **kwargs: Any) -> DepthState:
        """Return the state."""
        return hidden_states


class StateEntry(AbsentLayer):
    """The placeholder before the first layer of a chunk: it returns the state that the chunk has been given.

    Attributes:
        state: The state, which [`ChunkModule`] sets for the time of one forward pass.
    """

    state: DepthState

    def forward(self, hidden_states: DepthState, **kwargs: Any) -> DepthState:
        """Return the given state in place of what the backbone makes of the embedding."""
        return self.state


class AbsentEmbedding(nn.Module):
    """A placeholder for the token embedding, which the first chunk holds.

    Args:
        embedding: The embedding. Its size stays known for checks of token ids, its dtype for masks.
    """

    def __init__(self, embedding: nn.Embedding):
        super().__init__()
        self.num_embeddings = embedding.num_embeddings
        # Not on the embedding's device: the embedding of another process is on the meta device.
        self.register_buffer("weight", torch.empty(0, dtype=embedding.weight.dtype), persistent=False)


def check_model(model: PreTrainedModel) -> None:
    """Check that a model can be cut into chunks.

    Raises:
        ValueError: It is not a language model of the family; a module other than the layers, the token embedding and
            the head is needed by several chunks; or its loss has a part that no single chunk can compute.
    """
    config = model.config
    if not isinstance(config, ResidualConfig) or model.get_output_embeddings() is None:
        raise ValueError(
            f"`pipeline` of the recipe needs a language model of the family, not {config.model_type}. Put its residual "
            "connections in by `attnres convert`, or by 'retrofit={residual: standard}', which keeps them as they are."
        )
    if config.value_residual is not None:
        raise ValueError(
            "`pipeline` of the recipe does not carry the first layer's values: leave out `value_residual`."
        )
    if getattr(model, "has_vision", False):
        raise ValueError(
            "`pipeline` of the recipe passes tokens and no images between its stages: train the text model alone, or "
            "shard by `distributed: {fsdp_size: N}`."
        )
    if len(decoder_of(model).depth_layers) < len(decoder_of(model).layers):
        raise ValueError(
            "`pipeline` of the recipe does not hold the layer for multi-token prediction: leave it out by "
            "config.num_nextn_predict_layers=0."
        )
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            "`pipeline` of the recipe cannot compute the routers' auxiliary loss, which reads the routers of all "
            "chunks: set config.output_router_logits=false, and balance by `expert_balancing`."
        )


# The annotations of `transformers` do not say what these are; `check_model` has made sure of it.


def decoder_of(model: PreTrainedModel) -> ResidualModel:
    """Return the decoder of a language model of the family."""
    return cast(ResidualModel, model.base_model)


def embedding_of(model: PreTrainedModel) -> nn.Embedding:
    """Return the token embedding of a language model."""
    return cast(nn.Embedding, model.get_input_embeddings())


def head_of(model: PreTrainedModel) -> nn.Linear:
    """Return the head of a language model."""
    return cast(nn.Linear, model.get_output_embeddings())


def chunk_layers(model: PreTrainedModel, settings: PipelineSettings) -> list[range]:
    """Return the layers of each chunk: as the settings list them, or of about equal cost.

    Args:
        model: The whole model.
        settings: The settings of the pipeline.

    Raises:
        ValueError: The model has fewer layers than chunks, or other layers than the list.
    """
    costs, head = count_costs(model)
    counts, count = settings.layers, len(costs)
    if counts is None:
        if count < settings.chunks:
            raise ValueError(
                f"the model has {count} layers, but `stages` times `virtual` of the recipe's `pipeline` is "
                f"{settings.chunks}: each chunk needs a layer, so make one of them smaller."
            )
        return [range(part.start, part.stop) for part in partition_layers(costs, settings.chunks, head)]
    if sum(counts) != count:
        raise ValueError(
            f"`layers` of the recipe's `pipeline` add up to {sum(counts)}, but the model has {count} layers."
        )
    return [range(end - size, end) for end, size in zip(accumulate(counts), counts)]


def count_costs(model: PreTrainedModel) -> tuple[list[float], float]:
    """Count the parameters that one token uses in each decoder layer, and in the head.

    Args:
        model: A language model; it may be on the meta device.

    Returns:
        The cost of each layer, and of the head.
    """
    layers = [float(_count(layer) - count_idle(layer, model.config)) for layer in decoder_of(model).layers]
    return layers, float(_count(head_of(model)))


def _count(module: nn.Module) -> int:
    return count_values(module.named_parameters())


def keep_part(
    model: PreTrainedModel, layers: Collection[int], has_embedding: bool, has_head: bool, entry: int | None = None
) -> None:
    """Replace every module of a model that another chunk holds by a placeholder, in place.

    Args:
        model: The model.
        layers: The layers to keep.
        has_embedding: Whether to keep the token embedding.
        has_head: Whether to keep the output's read, the final norm and the head.
        entry: The layer at whose place the state enters; `None` if it begins with the embedding.
    """
    decoder, embedding = decoder_of(model), embedding_of(model)
    kept: list[nn.Module] = [
        layer if index in layers else StateEntry(index) if index == entry else AbsentLayer(index)
        for index, layer in enumerate(decoder.layers)
    ]
    decoder.layers = nn.ModuleList(kept)
    for owner in (model, decoder):
        for name, child in [*owner.named_children()]:
            if child is decoder or child is decoder.layers:
                continue
            if child is embedding:
                if not has_embedding:
                    setattr(owner, name, AbsentEmbedding(embedding))
            elif not has_head and child.state_dict():
                # What has no tensors to save, such as rotary positions, every chunk needs.
                setattr(owner, name, nn.Identity())


def is_tied(model: PreTrainedModel) -> bool:
    """Return whether the head of a whole model has the weight of the token embedding."""
    return head_of(model).weight is embedding_of(model).weight


def untie(model: PreTrainedModel) -> None:
    """Give the head a parameter for its tied weight, for a process that holds the head without the embedding.

    The two share their memory until [`keep_part`] drops the embedding. The process with the embedding has the other
    copy. Both get the sum of their gradients, so that they stay equal.
    """
    weight = head_of(model).weight
    head_of(model).weight = nn.Parameter(weight.detach(), requires_grad=weight.requires_grad)


def view_of(model: PreTrainedModel, layers: Collection[int], is_first: bool, is_last: bool) -> PreTrainedModel:
    """Return the model of a chunk or of a process, which shares its modules with a larger model.

    Args:
        model: The larger model.
        layers: The layers of the chunk or process.
        is_first: Whether the chunk has the token embedding.
        is_last: Whether the chunk has the final norm and the head.
    """
    view, decoder = _shallow(model), _shallow(decoder_of(model))
    setattr(view, model.base_model_prefix, decoder)
    keep_part(view, layers, is_first, is_last, entry=None if is_first else min(layers) - 1)
    return view


def _shallow(module: AnyModule) -> AnyModule:
    """Copy a module, but not its children and parameters."""
    copied = copy.copy(module)
    # `copy.copy` shares the dictionaries, of which the children's is about to change.
    copied._modules = module._modules.copy()
    return copied


__all__ = [
    "StateEntry",
    "check_model",
    "chunk_layers",
    "count_costs",
    "decoder_of",
    "embedding_of",
    "head_of",
    "is_tied",
    "keep_part",
    "untie",
    "view_of",
]
