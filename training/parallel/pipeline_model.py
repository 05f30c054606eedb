"""Cut a model of the family into the chunks of a pipeline, from outside: the model's files know nothing of it.

A chunk is the model itself, with placeholders for the layers and modules that other chunks hold. So the backbone's own
loop runs over the layers, with its masks and positions, and every tensor keeps its name.
"""

import copy
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnres import ResidualConfig
from attnres.residual_attnres import DepthState

from .pipeline_cache import BlockCache
from .pipeline_transfers import Chunk


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


class Entry(AbsentLayer):
    """The placeholder before the first layer of a chunk: it returns the state that the chunk has been given.

    Attributes:
        state: The state, which [`ChunkModule`] sets for the time of one forward pass.
    """

    state: DepthState | None = None

    def forward(self, hidden_states: DepthState, **kwargs: Any) -> DepthState:
        """Return the given state in place of what the backbone makes of the embedding."""
        return self.state


class AbsentEmbedding(nn.Module):
    """A placeholder for the token embedding, which the first chunk holds.

    Args:
        embedding: The embedding. Its size stays known for checks of token ids, its dtype for masks.
    """

    def __init__(self, embedding: nn.Module):
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
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            "`pipeline` of the recipe cannot compute the routers' auxiliary loss, which reads the routers of all "
            "chunks: set config.output_router_logits=false, and balance by `expert_balancing`."
        )


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
    decoder, embedding = model.base_model, model.get_input_embeddings()
    kept = [
        layer if index in layers else Entry(index) if index == entry else AbsentLayer(index)
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
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def untie(model: PreTrainedModel) -> None:
    """Give the head a parameter for its tied weight, for a process that holds the head without the embedding.

    The two share their memory until [`keep_part`] drops the embedding. The process with the embedding has the other
    copy. Both get the sum of their gradients, so that they stay equal.
    """
    weight = model.get_output_embeddings().weight
    model.get_output_embeddings().weight = nn.Parameter(weight.detach(), requires_grad=weight.requires_grad)


def view_of(model: PreTrainedModel, layers: Collection[int], is_first: bool, is_last: bool) -> PreTrainedModel:
    """Return the model of a chunk or of a process, which shares its modules with a larger model.

    Args:
        model: The larger model.
        layers: The layers of the chunk or process.
        is_first: Whether the chunk has the token embedding.
        is_last: Whether the chunk has the final norm and the head.
    """
    view, decoder = _shallow(model), _shallow(model.base_model)
    setattr(view, model.base_model_prefix, decoder)
    keep_part(view, layers, is_first, is_last, entry=None if is_first else min(layers) - 1)
    return view


def _shallow(module: PreTrainedModel) -> PreTrainedModel:
    """Copy a module, but not its children and parameters."""
    copied = copy.copy(module)
    # `copy.copy` shares the dictionaries, of which the children's is about to change.
    copied._modules = module._modules.copy()
    return copied


class ChunkModule(nn.Module):
    """One chunk as a module for `torch.distributed.pipelining`: tensors of the state in, tensors of the state out.

    Args:
        view: The model of the chunk, of [`view_of`].
        cache: The cache of the process.
        is_last: Whether the chunk has the head.
        context: A function that returns the context manager of each forward pass, such as autocast.
        clones_sent: Whether to return copies of the tensors to send, for a schedule with a split backward pass. After
            its first part, the engine cuts the returned tensors off their graph in place. The second part may still
            need the originals: later layers of the chunk have saved them, or they are inputs or views.
    """

    def __init__(
        self,
        view: PreTrainedModel,
        cache: BlockCache,
        is_last: bool,
        context: Callable[[], AbstractContextManager] = nullcontext,
        clones_sent: bool = False,
    ):
        super().__init__()
        self.view, self.cache, self.is_last, self.context = view, cache, is_last, context
        self.clones_sent = clones_sent

    def forward(
        self,
        *received: Tensor,
        chunk: Chunk,
        batch: Mapping[str, Any],
        cached: tuple[Tensor, ...] = (),
        micro_batch: int | None = None,
    ) -> tuple[Tensor, ...] | Tensor:
        """Run the chunk on one micro-batch.

        Args:
            received: The tensors of the transfer, in the order of `chunk.received`.
            chunk: The plan of the chunk, for this shape.
            batch: The arguments of the model: `input_ids` `[batch, seq]`, `labels` and others.
            cached: The tensors of the cache, in the order of `chunk.cached`.
            micro_batch: The number of the micro-batch in a training step, for the cache. Without it, nothing is kept.

        Returns:
            The tensors to send, in the order of `chunk.sent`. Of the last chunk, the loss `[1]` if the batch has
            labels, else the logits `[batch, seq, vocab]`.

        Raises:
            RuntimeError: The state has other tensors than planned.
        """
        inputs = dict(zip((piece.number for piece in chunk.received), received, strict=True))
        inputs |= dict(zip(chunk.cached, cached, strict=True))
        outputs = self._run(inputs, chunk, batch)
        if self.is_last:
            made, result = inputs, outputs.logits if "labels" not in batch else outputs.loss.reshape(-1).clone()
        else:
            # A tensor that passes through is sent as it came, so that its gradients meet in one place.
            made = dict(zip(chunk.after.numbers, _tensors_of(outputs, chunk), strict=True)) | inputs
            result = tuple(made[piece.number].contiguous() for piece in chunk.sent)
            if self.clones_sent:
                result = tuple(tensor.clone() for tensor in result)
        if micro_batch is not None:
            for number in chunk.kept:
                self.cache.keep(micro_batch, number, made[number])
            for number in chunk.freed:
                self.cache.free(micro_batch, number)
        return result

    def _run(self, inputs: Mapping[int, Tensor], chunk: Chunk, batch: Mapping[str, Any]) -> Any:
        """Run the chunk's model on the tensors of the state by their numbers.

        Returns:
            The state after the chunk; of the last chunk the output of the model.
        """
        ids, arguments = batch["input_ids"], {name: value for name, value in batch.items() if name != "input_ids"}
        if not self.is_last:
            arguments = {name: value for name, value in arguments.items() if name in _OF_DECODER}
        called = self.view if self.is_last else self.view.base_model
        entry = None
        if chunk.index == 0:
            arguments["input_ids"] = ids
        else:
            tensors = tuple(inputs[number] for number in chunk.before.numbers)
            # The backbone takes batch, length, dtype and device from an embedding. This one has no memory.
            nothing = torch.zeros((), dtype=tensors[0].dtype, device=tensors[0].device)
            arguments["inputs_embeds"] = nothing.expand(*ids.shape, self.view.config.hidden_size)
            entry = self.view.base_model.layers[chunk.layers.start - 1]
            entry.state = tensors if chunk.before.is_tuple else tensors[0]
        try:
            with self.context():
                outputs = called(use_cache=False, **arguments)
        finally:
            if entry is not None:
                entry.state = None
        return outputs if self.is_last else outputs.last_hidden_state


def _tensors_of(state: DepthState, chunk: Chunk) -> tuple[Tensor, ...]:
    """Return the tensors of the state after a chunk. Raise RuntimeError if they are not as planned."""
    tensors = state if isinstance(state, tuple) else (state,)
    found = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    expected = [(piece.shape, piece.dtype) for piece in chunk.after.pieces]
    if found != expected:
        raise RuntimeError(
            f"the state after layer {chunk.layers.stop - 1} has tensors {found}, but the plan of the pipeline expects "
            f"{expected}."
        )
    return tensors


# Arguments that every chunk needs; the others are for the head.
_OF_DECODER = ("attention_mask", "position_ids")

__all__ = [
    "ChunkModule",
    "Entry",
    "check_model",
    "is_tied",
    "keep_part",
    "untie",
    "view_of",
]
