"""Trace one pass: count its memory by running the model on tensors without data.

The model's own code runs, so the counts hold for every backbone and every residual connection.
Nothing is computed, and a model of any size fits. In training, layers that are alike run once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import DynamicCache, PreTrainedModel

from attnres import ResidualConfig
from attnres.decoder_attnres import DepthReader, ResidualDecoderLayer
from attnres.padding_attnres import CACHE_NAME
from attnres.utils.quiet import quiet_transformers

from .building import Batch, build, layers_of, without_data
from .live_bytes import LiveBytes, storage_bytes, tensors_in
from .traces import LayerTrace, Trace


def trace(config: ResidualConfig, batch: Batch) -> Trace:
    """Trace one pass of a configuration's causal language model.

    Args:
        config: A configuration of the family.
        batch: The pass.

    Raises:
        ValueError: The matrices cannot be sharded among `batch.tensor` devices.
    """
    with without_data(batch), quiet_transformers():
        model = build(config, batch)
        return _trace_training(model, batch) if batch.training else _trace_inference(model, batch)


class _Sink(torch.autograd.Function):
    """Ends a graph without keeping its outputs, and begins the backward pass with gradients of their shapes."""

    @staticmethod
    def forward(ctx, *outputs: Tensor) -> Tensor:
        ctx.like = [(output.shape, output.dtype) for output in outputs]
        return outputs[0].new_empty(())

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(grad.new_empty(shape, dtype=dtype) for shape, dtype in ctx.like)


class _Output(torch.autograd.Function):
    """Stands in for the output of a sublayer, of which only the shape matters."""

    @staticmethod
    def forward(ctx, inputs: Tensor) -> Tensor:
        return torch.empty_like(inputs)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


@dataclass
class _Walk:
    """The calls of all layers in one pass in which sublayers compute nothing.

    Attributes:
        states: The state before each layer, and after the last.
        arguments: The other arguments of each layer.
        numbers: For each layer, the numbers of tensors of the state after each sublayer.
    """

    states: list[Any] = field(default_factory=list)
    arguments: list[dict[str, Any]] = field(default_factory=list)
    numbers: list[tuple[int, ...]] = field(default_factory=list)


def _connections_only(layer: ResidualDecoderLayer, state: Any, numbers: list[int] | None = None) -> Any:
    """Run the reads and writes of a layer; each sublayer's output is an empty tensor."""
    reader = DepthReader()
    for sublayer in layer.sublayers:
        inputs, _, state = reader.read(layer, sublayer.name, state, sublayer.first)
        state = getattr(layer, f"{sublayer.name}_proj").write(state, _Output.apply(inputs))
        if numbers is not None:
            numbers.append(len(tensors_in(state)))
    return state


def _walk(model: PreTrainedModel, batch: Batch) -> _Walk:
    walk, layers = _Walk(), layers_of(model)

    def forward(
        layer: ResidualDecoderLayer, *hidden_states: Any, reader: DepthReader, is_tuple: bool = False, **arguments: Any
    ) -> Any:
        numbers: list[int] = []
        # A layer gets each tensor of a state as an argument of its own.
        state = hidden_states if is_tuple else hidden_states[0]
        walk.states.append(state)
        walk.arguments.append(arguments)
        state = _connections_only(layer, state, numbers)
        walk.numbers.append(tuple(numbers))
        if len(walk.numbers) == len(layers):
            walk.states.append(state)
        return reader.after(layer.layer_idx, state)

    # The model belongs to this file alone, so its layers may run another `forward` for a moment.
    for layer in layers:
        layer.forward = MethodType(forward, layer)
    with torch.no_grad():
        model(input_ids=torch.zeros(batch.rows, batch.length, dtype=torch.long), use_cache=False, logits_to_keep=1)
    for layer in layers:
        del layer.forward
    return walk


def _identities(states: Sequence[Any]) -> list[list[tuple[int, int]]]:
    """Return for each state the identity and bytes of each tensor; tensors of one storage have one identity."""
    numbers: dict[int, int] = {}
    storages = [[tensor.untyped_storage() for tensor in tensors_in(state)] for state in states]
    return [[(numbers.setdefault(id(s), len(numbers)), s.nbytes()) for s in state] for state in storages]


def _trace_training(model: PreTrainedModel, batch: Batch) -> Trace:
    walk = _walk(model, batch)
    for parameter in model.parameters():
        # From the second of several accumulated batches on, gradients are added to the existing ones.
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
    identities = _identities(walk.states)
    # The embedding gets no gradient if its weight is frozen.
    constants = set() if batch.lora is None else {identity for identity, _ in identities[0]}
    layers, known = [], {}
    for i, layer in enumerate(layers_of(model)):
        state = walk.states[i]
        kinds = [type(module) for module in layer.modules()]
        shapes = [(*tensor.shape, tensor.dtype) for tensor in (*layer.parameters(), *tensors_in(state))]
        arguments = [
            (name, type(value), *map(lambda t: t.shape, tensors_in(value))) for name, value in walk.arguments[i].items()
        ]
        needs_grad = tuple(identity not in constants for identity, _ in identities[i])
        signature = (*kinds, *shapes, *walk.numbers[i], *arguments, isinstance(state, tuple), needs_grad)
        if signature not in known:
            known[signature] = _trace_layer(layer, state, walk.arguments[i], needs_grad)
        numbers, positions = known[signature]
        both = [identity for identity, _ in (*identities[i], *identities[i + 1])]
        layers.append(
            replace(numbers, states=dict(identities[i]), kept_states=frozenset(both[place] for place in positions))
        )
    stream = batch.rows * batch.length * model.config.hidden_size * batch.dtype.itemsize
    needs_grad = [identity not in constants for identity, _ in identities[-1]]
    head = _trace_head(model, _leaves(walk.states[-1], needs_grad), batch)
    return Trace(batch, tuple(layers), dict(identities[-1]), head, stream)


def _leaves(state: Any, needs_grad: Iterable[bool]) -> Any:
    """Return a state of new tensors without a history. `needs_grad` says of each whether it gets a gradient."""
    tensors, structure = tree_flatten(state)
    leaves = [
        torch.empty_like(tensor, memory_format=torch.contiguous_format).requires_grad_(needed)
        for tensor, needed in zip(tensors, needs_grad, strict=True)
    ]
    return tree_unflatten(leaves, structure)


def _trace_layer(
    layer: ResidualDecoderLayer, state: Any, arguments: dict[str, Any], needs_grad: Sequence[bool]
) -> tuple[LayerTrace, list[int]]:
    """Run both passes of a layer. Return its memory, and the positions of the input and output states that it keeps."""
    leaves = [_leaves(state, needs_grad) for _ in range(2)]
    kept, positions, forward, backward = _run(layer, leaves.pop(), lambda state: layer(state, **arguments))
    # A second run, in which only the connections keep something.
    connection_kept, *_ = _run(layer, leaves.pop(), lambda state: _connections_only(layer, state))
    return LayerTrace({}, kept, connection_kept, forward=forward, backward=backward), positions


def _run(layer: ResidualDecoderLayer, state: Any, function: Any) -> tuple[int, list[int], int, int]:
    """Run both passes of a function of a state.

    Returns:
        The bytes that it keeps besides states; the positions of the kept states among its input and output states;
        and the peaks of the forward pass and of both passes.
    """
    ours = [*_tensors_of(layer), *tensors_in(state)]
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.detach())
        return tensor

    # Gradients of routed experts, `[experts, ...]`, are sharded among devices in other ways than the rest: `layouts`
    # counts them.
    live = LiveBytes(tensor.shape for tensor in layer.parameters() if tensor.ndim == 3 and tensor.requires_grad)
    live.ignore(ours)
    with live:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = tensors_in(function(state))
        forward = live.peak
        ignored = {id(tensor.untyped_storage()) for tensor in ours}
        states = [id(tensor.untyped_storage()) for tensor in (*tensors_in(state), *outputs)]
        saved_storages = {id(tensor.untyped_storage()) for tensor in saved}
        positions = [i for i, storage in enumerate(states) if storage in saved_storages]
        kept = storage_bytes(t for t in saved if id(t.untyped_storage()) not in {*ignored, *states})
        saved.clear()
        loss = _Sink.apply(*outputs)
        del outputs
        loss.backward()
    return kept, positions, forward, live.peak


def _tensors_of(module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a module, and the gradients that it holds."""
    gradients = (parameter.grad for parameter in module.parameters())
    return [*module.parameters(), *module.buffers(), *(gradient for gradient in gradients if gradient is not None)]


def _trace_head(model: PreTrainedModel, state: Any, batch: Batch) -> int:
    """Return the peak of embedding, output read, norm, head and loss, in both passes."""
    layers = layers_of(model)

    def forward(
        layer: ResidualDecoderLayer, *hidden_states: Any, reader: DepthReader, is_tuple: bool = False, **arguments: Any
    ) -> Any:
        if layer is layers[-1]:
            return reader.after(layer.layer_idx, state)
        # The embedding's output goes through, so that it gets a gradient.
        return hidden_states if is_tuple else hidden_states[0]

    for layer in layers:
        layer.forward = MethodType(forward, layer)
    live = LiveBytes()
    live.ignore([*_tensors_of(model), *tensors_in(state)])
    with live:
        ids = torch.zeros(batch.rows, batch.length, dtype=torch.long)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for layer in layers:
        del layer.forward
    return live.peak


@torch.no_grad()
def _trace_inference(model: PreTrainedModel, batch: Batch) -> Trace:
    """Trace a pass of the whole model that fills a cache."""
    cache = DynamicCache(config=model.config)
    if batch.past:
        past = torch.zeros(batch.rows, batch.past, dtype=torch.long)
        model(input_ids=past, logits_to_keep=1, **{CACHE_NAME: cache})
    states, starts, peaks = [], [], []
    live = LiveBytes()
    layers = layers_of(model)

    def forward(layer: ResidualDecoderLayer, *hidden_states: Any, is_tuple: bool = False, **arguments: Any) -> Any:
        states.append(hidden_states if is_tuple else hidden_states[0])
        live.peak = live.now
        starts.append(live.now)
        result = type(layer).forward(layer, *hidden_states, is_tuple=is_tuple, **arguments)
        peaks.append(live.peak - starts[-1])
        live.peak = live.now
        if len(peaks) == len(layers):
            states.append(result)
        return result

    for layer in layers:
        layer.forward = MethodType(forward, layer)
    live.ignore(_tensors_of(model))
    # The tensors of the cache are replaced by longer ones, and both exist for a moment.
    live.count(tensor for layer in cache.layers for tensor in _cached(layer))
    with live:
        ids = torch.zeros(batch.rows, batch.length, dtype=torch.long)
        model(input_ids=ids, use_cache=True, logits_to_keep=1, **{CACHE_NAME: cache})
        head = live.peak - live.now
    identities = _identities(states)
    sizes = [storage_bytes(_cached(layer)) for layer in cache.layers]
    traced = [LayerTrace(dict(state), forward=peak, cache=size) for state, peak, size in zip(identities, peaks, sizes)]
    stream = batch.rows * batch.length * model.config.hidden_size * batch.dtype.itemsize
    return Trace(batch, tuple(traced), dict(identities[-1]), head, stream)


def _cached(layer: Any) -> Iterable[Tensor]:
    """Return the tensors of one layer of a cache, whatever its kind."""
    return [tensor for value in vars(layer).values() for tensor in tensors_in(value)]


__all__ = ["trace"]
