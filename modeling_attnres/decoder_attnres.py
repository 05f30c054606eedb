"""Residual connections on any decoder of `transformers`: mixins for its layer and its model.

Each sublayer reads its input from the depth state and writes its output to it; after the last layer, the final norm
reads its input. The state takes the place of `hidden_states` in the backbone's own loop over layers, so no hooks are
needed. `ResidualDecoderLayer.forward` is the way of the state through one layer.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import can_return_tuple

from .configuration_attnres import ResidualConfig, Sublayers
from .connections_attnres import ATTENTION_CHANGES, CONNECTIONS, MTP
from .loading_attnres import added_fields
from .pretrained_attnres import FIRST_SUBLAYER, ResidualPreTrainedModel
from .records_attnres import SUMS, Receiver, sums_of
from .residual_attnres import DepthState, ResidualConnection, ResidualNorm
from .rows_attnres import find_documents, keep_apart, shape_of


def _add_connection(module: nn.Module, name: str, config: ResidualConfig, sublayer: int) -> None:
    """Register a connection as `{name}_proj` and its norm as `{name}_norm`, the names of the released weights."""
    # Not `config.connection`: with remote code, the configuration may come from another copy of these files.
    connection = CONNECTIONS[config.residual_connection].form(config)(config, sublayer)
    module.add_module(f"{name}_proj", connection)
    if connection.has_norm:
        module.add_module(f"{name}_norm", ResidualNorm(config.hidden_size))


# The backbone's class follows the mixins, so a type checker sees what all modules and models have.
_AnyLayer, _AnyModel = (nn.Module, PreTrainedModel) if TYPE_CHECKING else (object, object)


class ResidualDecoderLayer(_AnyLayer):
    """Mixin of a backbone's decoder layer that runs its sublayers, as declared in `BACKBONES`, on the depth state."""

    sublayers: Sublayers
    layer_idx: int
    connected_at: int  # the index for which the connections are numbered; other libraries change `layer_idx` alone

    def connect(self, config: ResidualConfig, sublayers: Sublayers, layer_idx: int) -> None:
        """Add the residual connections to a layer that the backbone has made.

        Args:
            config: the model's configuration.
            sublayers: the declarations of the layer's sublayers.
            layer_idx: index of the layer in the decoder.

        Raises:
            ValueError: the declarations do not fit the layer.
        """
        _check_declaration(self, config.backbone, sublayers)
        self.sublayers, self.layer_idx, self.connected_at = sublayers, layer_idx, layer_idx
        for i, sublayer in enumerate(sublayers):
            _add_connection(self, sublayer.name, config, layer_idx * len(sublayers) + i)
        for change in ATTENTION_CHANGES:
            change.add_to(self, config)

    def move_to(self, layer_idx: int) -> None:
        """Set the layer's index in the decoder, after layers were moved or removed."""
        self.layer_idx = self.connected_at = layer_idx
        for i, sublayer in enumerate(self.sublayers):
            _set_index(self._modules[f"{sublayer.name}_proj"], layer_idx * len(self.sublayers) + i)

    def __call__(self, hidden_states: DepthState, **kwargs) -> DepthState:
        """Call `forward` with each tensor of the state as an argument of its own.

        PyTorch's full backward hooks and reentrant checkpointing see only tensors that are arguments themselves. In a
        tuple, a hook would run before the layer's backward pass, and a gradient would be lost.

        Args:
            hidden_states: the depth state; backbones call their layers with this name.
            kwargs: as in `forward`.
        """
        if isinstance(hidden_states, tuple):
            return super().__call__(*hidden_states, is_tuple=True, **kwargs)
        return super().__call__(hidden_states, **kwargs)

    def forward(
        self, *hidden_states: Any, is_tuple: bool = False, reader: "DepthReader | None" = None, **kwargs
    ) -> DepthState:
        """Run the layer's sublayers: each reads from the state, computes, and writes its output to the state.

        Args:
            hidden_states: the depth state, or each of its tensors.
            is_tuple: whether the arguments are the tensors of a state.
            reader: the reader of this pass, made once by the decoder; `None` for a layer that is called alone.
            kwargs: arguments of the backbone's attention.

        Returns:
            The state; after the last layer the input `[batch, seq, hidden]` of the final norm.
        """
        state, reader = hidden_states if is_tuple else hidden_states[0], reader or DepthReader()
        if reader.last is not None and self.layer_idx > reader.last:
            return state  # the loops of some backbones, such as GPT-NeoX, run all layers
        # Not by `getattr`, which looks everywhere else first: in decoding, that is a good part of the time of a read.
        modules: dict[str, Any] = self._modules
        for sublayer in self.sublayers:
            inputs, is_normed, state = reader.read(self, sublayer.name, state, sublayer.first)  # (batch, seq, hidden)
            outputs = []
            for branch in sublayer.branches:
                output = inputs
                for name in branch[is_normed:]:  # without the first module, if the read has applied that norm
                    module = modules[name]
                    is_attention = name in ("attention", "self_attn")
                    output = self.attend(module, output, **kwargs)[0] if is_attention else module(output)
                outputs.append(output)
            output = sum(outputs[1:], outputs[0])
            if sublayer.multiplier is not None:
                output = output * getattr(self, sublayer.multiplier)
            state = modules[f"{sublayer.name}_proj"].write(state, output)
        return reader.after(self.layer_idx, state)

    def attend(self, attention: nn.Module, hidden_states: Tensor, **kwargs) -> tuple[Any, ...]:
        """Call an attention, and return its results. The first is its output `[batch, seq, hidden]`.

        Args:
            attention: the layer's attention module.
            hidden_states: its input `[batch, seq, hidden]`.
            kwargs: its other arguments.
        """
        return attention(hidden_states, **kwargs)


class DepthReader:
    """Reads the inputs of all sublayers in one forward pass, through their connections or a plan.

    Args:
        model: the decoder, for the read after its last layer; `None` for a layer that is called alone.
        plan: the plan that reads in place of the connections, or `None`; see [`ResidualConnection.inference_plan`] and
            [`ResidualConnection.training_plan`].
        last: index of the last layer of the pass.
        receiver: receives the input of the final norm, if a head asked. Compiled checkpointing allows no such effect.
    """

    def __init__(self, model: Any = None, plan: Any = None, last: int | None = None, receiver: Receiver | None = None):
        self.model, self.plan, self.last, self.receiver = model, plan, last, receiver

    def read(self, owner: nn.Module, name: str, state: DepthState, first: str | None = None) -> tuple[Any, ...]:
        """Read the input of a sublayer.

        Args:
            owner: the module that holds the connection: a layer, or the decoder for its output.
            name: name of the connection.
            state: the depth state.
            first: name of the module, usually the norm, that the sublayer begins with.

        Returns:
            The input `[batch, seq, hidden]`, whether `first` has been applied to it already, and the state after the
            read.
        """
        connection: Any = owner._modules[f"{name}_proj"]
        if self.plan is not None and not torch.compiler.is_compiling():
            return self.plan.read(connection, state)
        norm = getattr(owner, f"{name}_norm", None)
        takes_norm = connection.takes_norm
        is_normed = takes_norm and first is not None
        argument = _as_function(getattr(owner, first)) if is_normed else None if norm is None else norm()
        # A connection that takes no norm need not have a parameter for one.
        inputs, _, state = connection(state, argument) if takes_norm or norm is not None else connection(state)
        return inputs, is_normed, state

    def after(self, layer_idx: int, state: DepthState) -> DepthState:
        """Return the state after a layer; after the last one the final norm's input `[batch, seq, hidden]`.

        Args:
            layer_idx: index of the layer that has just ended.
            state: the state after it.
        """
        if self.model is None or layer_idx != self.last:
            return state
        inputs = self.read(self.model, "output_attn_res", state)[0]
        if self.receiver is not None:
            self.receiver.unnormed = inputs
        return inputs


class ResidualModel(ResidualPreTrainedModel):
    """Mixin of a backbone's decoder, such as `LlamaModel`."""

    layer_class: type[ResidualDecoderLayer]
    layers: nn.ModuleList  # the layers of the depth, and after them a layer for multi-token prediction if there is one

    def __init__(self, config: ResidualConfig):
        config.check_fields()
        super().__init__(config)
        self.connect()

    def connect(self) -> None:
        """Add the residual connections to a decoder that the backbone has made.

        Raises:
            ValueError: the decoder does not keep its layers in `layers`, or they do not fit their declaration.
        """
        config, sublayers = self.config, self.config.sublayers
        if not isinstance(getattr(self, "layers", None), nn.ModuleList):
            raise ValueError(f"the decoder of {config.backbone!r} does not keep its layers in `layers`.")
        layers: list[Any] = [*self.layers]
        for i, layer in enumerate(layers):
            # The backbone's `__init__` makes its layers of a fixed class. To make them again would initialise all
            # weights twice, so only the class changes: the family's adds methods and, in `connect`, the connections.
            layer.__class__ = self.layer_class
            layer.connect(config, sublayers, i)
        _add_connection(self, "output_attn_res", config, config.num_sublayers)
        if MTP is not None:
            MTP.add_to(self, ATTENTION_CHANGES)
        self.sublayers_per_layer = len(sublayers)
        self.built_with = added_fields(config)
        self.post_init()

    def prepare_rows(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Change the arguments of a forward pass so that documents of one row do not see each other.

        Args:
            arguments: the arguments by name.

        Raises:
            ValueError: as [`find_documents`] and [`keep_apart`], or the row has several documents and the backbone
                carries a state through all of it.
        """
        # The paged cache of continuous batching (`generate_batch`) keeps the requests in a row apart. Its borders of
        # keys are a dictionary, and include tokens in the cache.
        is_paged = arguments.get("write_index") is not None
        shape = shape_of(arguments)
        if shape is None or is_paged:
            return arguments
        arguments, documents = find_documents(arguments, shape, self.makes_cache(arguments))
        if documents is None:
            return arguments
        if self.carries_state:
            raise ValueError(
                f"the row has several documents, but the backbone {self.config.backbone!r} carries a state from one to "
                "the next: pass each document as a separate row."
            )
        return keep_apart(arguments, documents, self.config, self.get_input_embeddings().weight.dtype)

    @property
    def carries_state(self) -> bool:
        """Return whether the backbone carries a state through a row, in which documents cannot be kept apart here."""
        # `_is_stateful` is private, but nothing else in `transformers` marks such backbones.
        return self._is_stateful

    def makes_cache(self, arguments: dict[str, Any]) -> bool:
        """Return whether `transformers` makes a cache in a forward pass with these arguments by name."""
        use_cache = arguments.get("use_cache")
        if use_cache is None:
            # Configurations of some backbones have no such field.
            use_cache = getattr(self.config, "use_cache", None)
        return bool(use_cache) and not (self.training and getattr(self, "gradient_checkpointing", False))

    @property
    def depth_layers(self) -> list[Any]:
        """The layers of the depth: all but a layer for multi-token prediction."""
        return [layer for layer in self.layers if not getattr(layer, "predicts_ahead", False)]

    def number_layers(self) -> int:
        """Give every connection its index, since layers may have been removed or moved since the last pass.

        Returns:
            The number of layers that run: fewer than there are, if `num_hidden_layers` was lowered for early exit.

        Raises:
            ValueError: a layer cannot run at its place.
        """
        layers = self.depth_layers
        if not all(_is_at(layer, i) for i, layer in enumerate(layers)):
            foreign = next((layer for layer in layers if not hasattr(layer, "layer_idx")), None)
            if foreign is not None:
                raise ValueError(
                    f"`layers` holds a {type(foreign).__name__}, which is no decoder layer. An engine that cuts a "
                    "model into pipeline stages puts such placeholders there, but the depth state of this model is "
                    "more than the one tensor that it would pass on: run the model in one pipeline stage."
                )
            if len({*layers}) < len(layers):
                raise ValueError("one layer is at two places of `layers`: put a copy at one of them.")
            for i, layer in enumerate(layers):
                layer.move_to(i)
        wrappers = [layer for layer in layers if not isinstance(layer, ResidualDecoderLayer)]
        # PyTorch's `CheckpointWrapper` has this attribute.
        is_reentrant = any(getattr(getattr(w, "checkpoint_impl", None), "name", None) == "REENTRANT" for w in wrappers)
        # The state between two layers of a standard model is one tensor, which reentrant checkpointing can track.
        if is_reentrant and torch.is_grad_enabled() and self.config.residual_connection != "standard":
            raise ValueError(
                "a layer is in a reentrant `checkpoint_wrapper`, which would lose gradients of the depth state: use "
                "`CheckpointImpl.NO_REENTRANT`, or call `model.gradient_checkpointing_enable()`."
            )
        number = min(self.config.num_hidden_layers, len(layers))
        output: Any = self._modules["output_attn_res_proj"]
        index = number * self.sublayers_per_layer
        if getattr(output, "sublayer", None) != index:
            _set_index(output, index)
        return number

    @can_return_tuple
    def forward(self, *args, receiver: Receiver | None = None, **kwargs):
        """Run the decoder; see the backbone's own `forward` for arguments and result.

        Args:
            args: the backbone's arguments.
            receiver: receives what was computed; the heads pass it on demand.
            kwargs: the backbone's arguments.

        Raises:
            ValueError: the same layer is at two places of `layers`; a layer is another engine's placeholder, or in a
                wrapper that would lose gradients; the rows cannot be prepared; the connection lacks a requested sum.
        """
        number = self.number_layers()
        records = self.requested(kwargs)
        plan = None
        # Records are taken from calls of the connections, which a plan bypasses.
        if not (records or torch.compiler.is_compiling()):
            # One connection is enough to ask: a plan checks that all have the same class.
            name = "training_plan" if torch.is_grad_enabled() else "inference_plan"
            make_plan = getattr(self._modules["output_attn_res_proj"], name, None)  # a pipeline stage may lack it
            plan = None if make_plan is None else make_plan(self)
        # `zip` ends with `args`, the arguments that were given by position.
        arguments = self.prepare_rows(dict(zip(self.argument_names, args)) | kwargs)
        # The backbone's loop passes extra arguments on to every layer, so `reader` reaches the layers.
        reader = DepthReader(self, plan, last=number - 1, receiver=receiver)
        outputs = super().forward(reader=reader, **arguments | {"return_dict": True})
        for name in records.keys() & {*SUMS}:
            connection: Any = self._modules["output_attn_res_proj"]
            outputs[name] = sums_of(connection, name, outputs[name], records[name])
        if receiver is not None:
            receiver.outputs, receiver.arguments = outputs, arguments
        return outputs


def _is_at(layer: Any, index: int) -> bool:
    """Return whether a layer, and its connections if it has some, have an index in the decoder."""
    return getattr(layer, "layer_idx", None) == index == getattr(layer, "connected_at", index)


def _set_index(connection: Any, sublayer: int) -> None:
    """Set the index of a connection, and of the copies that an adapter holds of it."""
    for module in connection.modules():
        if isinstance(module, ResidualConnection):
            module.sublayer = sublayer


def _as_function(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a function that calls a module. Offloading engines move arguments that have a method `to`; it has none."""

    def call(x: Tensor) -> Tensor:
        return module(x)

    return call


def _check_declaration(layer: nn.Module, backbone: str, sublayers: Sublayers) -> None:
    """Raise `ValueError` if the declared sublayers do not fit a layer of the backbone."""
    names = [sublayer.name for sublayer in sublayers]
    if names[0] not in FIRST_SUBLAYER or len(set(names)) < len(names):
        first = " or ".join(map(repr, FIRST_SUBLAYER))
        raise ValueError(
            f"the sublayers of {backbone!r} are named {names}: names must differ, and the first must be {first}."
        )
    for sublayer in sublayers:
        missing = [name for name in sum(sublayer.branches, ()) if name not in layer._modules]
        if sublayer.multiplier is not None and not hasattr(layer, sublayer.multiplier):
            missing.append(sublayer.multiplier)
        if missing:
            has = ", ".join(f"`{child}`" for child, _ in layer.named_children())
            raise ValueError(
                f"{sublayer.name!r}, declared for {backbone!r}, uses `{missing[0]}`; its layers have {has}."
            )
