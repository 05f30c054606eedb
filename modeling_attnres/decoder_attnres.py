"""Residual connections on any decoder of `transformers`: mixins for its layer, its model and its heads.

- A layer runs its declared sublayers (`sublayers_attnres`). Each reads its input from the depth state and writes its
  output to it (`residual_attnres`); the final norm reads the aggregate over all of it.
- The state passes through the backbone's own forward loop in place of `hidden_states`: one explicit value, no hooks.
- The backbone's own constructors build everything else, so that no line of a backbone is repeated here.

The files of this folder travel with the weights, so they need only `torch` and `transformers`, and import each other by
single-dot relative imports.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import ModelOutput
from transformers.utils import can_return_tuple
from transformers.utils.output_capturing import OutputRecorder

from .configuration_attnres import ResidualConfig
from .loading_attnres import check_attn_res_tensors, check_shapes, explain_broken_shard
from .plain_attnres import has_hooks_on_all_modules, is_plain_rms_norm, is_untouched
from .reads_attnres import Reads
from .residual_attnres import AttnRes, DepthState, ResidualConnection, ResidualNorm, add_residual_connection
from .sublayers_attnres import Sublayer, Sublayers

# Modules that mix tokens: they take the keyword arguments of the layer and return a tuple, output first.
_ATTENTION = ("attention", "self_attn")
# Names that the first sublayer of a layer may have: what it reads is what is recorded as the layer's input.
_RECORDED = ("output_hidden_states", "output_depth_attentions")
_FIRST_SUBLAYER = ("self_attention_res", "parallel_res")


class ResidualDecoderLayer:
    """Mixin of a backbone's decoder layer: its sublayers, each behind a residual connection."""

    sublayers: Sublayers
    layer_idx: int

    def connect(self, config: ResidualConfig, sublayers: Sublayers, layer_idx: int) -> None:
        """Add a residual connection for each of the `sublayers` to a layer that its backbone has built.

        Raises:
            ValueError: a declared sublayer does not fit the layer.
        """
        _check_declaration(self, config.backbone, sublayers)
        self.sublayers = sublayers
        self.layer_idx = layer_idx
        for i, sublayer in enumerate(sublayers):
            add_residual_connection(self, sublayer.name, config, sublayer=layer_idx * len(sublayers) + i)

    def forward(
        self,
        hidden_states: DepthState,
        *,
        last_layer: int | None = None,
        read_output: Callable[[DepthState], Tensor] | None = None,
        is_recorded: bool = True,
        reads: Reads | None = None,
        **kwargs,
    ) -> DepthState:
        """State in, state out; the layer with the index `last_layer` returns what `read_output` makes of the state.

        What connections return is recorded, unless not `is_recorded`: then they may read through the sublayer's norm,
        or `reads` may read in their place.
        """
        state = hidden_states
        for sublayer in self.sublayers:
            connection = getattr(self, f"{sublayer.name}_proj")
            if reads is not None and not torch.compiler.is_compiling():
                inputs, is_normed = reads.read(connection, state)
            else:
                inputs, is_normed, state = self._read(sublayer, connection, state, is_recorded)
            output = self._run(sublayer.branches[0][is_normed:], inputs, kwargs)
            for branch in sublayer.branches[1:]:
                output = output + self._run(branch[is_normed:], inputs, kwargs)
            if sublayer.multiplier is not None:
                output = output * getattr(self, sublayer.multiplier)
            state = connection.write(state, output)
        return read_output(state) if self.layer_idx == last_layer else state

    def _read(
        self, sublayer: Sublayer, connection: ResidualConnection, state: DepthState, is_recorded: bool
    ) -> tuple[Tensor, bool, DepthState]:
        """The input of a sublayer; or, and then `True`, what the norm that it begins with makes of that. The state."""
        norm_weight = getattr(self, f"{sublayer.name}_norm")()
        norm = getattr(self, sublayer.first) if sublayer.first else None
        is_free = not is_recorded and connection.reads_through_norm and not has_hooks_on_all_modules()
        if is_free and norm is not None and is_untouched(connection) and is_plain_rms_norm(norm):
            inputs, _, state = connection(state, norm_weight, norm)
            return inputs, True, state
        inputs, _, state = connection(state, norm_weight)
        return inputs, False, state

    def _run(self, branch: tuple[str, ...], hidden_states: Tensor, kwargs: dict) -> Tensor:
        for name in branch:
            module = getattr(self, name)
            hidden_states = (
                self.attend(module, hidden_states, **kwargs) if name in _ATTENTION else module(hidden_states)
            )
        return hidden_states

    def attend(self, attention: nn.Module, hidden_states: Tensor, **kwargs) -> Tensor:
        """The output `[batch, seq, hidden]` of the attention, called as the backbone calls it."""
        return attention(hidden_states, **kwargs)[0]


class ResidualPreTrainedModel:
    """Mixin of a backbone's `PreTrainedModel`: what is recorded, initialised, checked on loading and saved."""

    config: ResidualConfig
    auto_classes: dict[str, str]  # Auto class -> name of the class, in the same file, that loads there

    def __init_subclass__(cls, **kwargs) -> None:
        super().__init_subclass__(**kwargs)
        if not issubclass(cls, PreTrainedModel):
            return  # another mixin
        _show_backbone_signature(cls)
        # The input of every decoder layer, then that of the final norm (whose output takes the place of the latter).
        reads = [
            OutputRecorder(ResidualConnection, index=0, layer_name=name, capture_initial_hidden_state=False)
            for name in (*(f"{first}_proj" for first in _FIRST_SUBLAYER), "output_attn_res_proj")
        ]
        depth_attentions = OutputRecorder(ResidualConnection, index=1)
        recorded = getattr(cls, "_can_record_outputs", None) or {}
        cls._can_record_outputs = recorded | {"hidden_states": reads, "depth_attentions": depth_attentions}

    def post_init(self) -> None:
        # It collects these from the classes. What the backbone's constructor has collected names its own layers, which
        # are of another class since.
        vars(self).pop("_no_split_modules", None)
        super().post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, AttnRes):
            init.zeros_(module.weight)  # uniform depth weights
        elif isinstance(module, ResidualNorm) and module.weight is not None:
            init.ones_(module.weight)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # `transformers` looks for the decorator `@use_experts_implementation` in the file of the class. The experts of
        # the family are those of the backbones, which carry it in theirs.
        backbone = next(c for c in cls.__mro__ if c.__module__.startswith("transformers.models."))
        return backbone._can_set_experts_implementation()

    def _set_gradient_checkpointing(self, enable: bool = True, gradient_checkpointing_func=checkpoint, **kwargs):
        super()._set_gradient_checkpointing(enable, _with_flat_state(gradient_checkpointing_func), **kwargs)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path,
        *args,
        output_loading_info: bool = False,
        ignore_mismatched_sizes: bool = False,
        **kwargs,
    ):
        """As in `transformers`; a backbone's checkpoint, without any AttnRes tensor, loads with those initialised.

        Raises:
            ValueError: some AttnRes tensors are missing and others are not, or one is not finite.
            RuntimeError: a tensor has another shape than the model's, unless `ignore_mismatched_sizes`.
            OSError: a safetensors file is truncated or damaged. Each message names the tensors or the file.
        """
        with explain_broken_shard(pretrained_model_name_or_path, kwargs.get("subfolder", "")):
            model, info = super().from_pretrained(
                pretrained_model_name_or_path,
                *args,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, with the names in the error
                **kwargs,
            )
        if not ignore_mismatched_sizes:
            check_shapes(info["mismatched_keys"], pretrained_model_name_or_path)
        check_attn_res_tensors(model, info["missing_keys"], pretrained_model_name_or_path)
        return (model, info) if output_loading_info else model

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs):
        # The code travels with the weights: every head of the family loads from it, not only the one that is saved.
        with _under_own_name(type(self)) as own_class:
            self.config.auto_map = auto_map(own_class)
            super().save_pretrained(save_directory, **kwargs)


class ResidualModel(ResidualPreTrainedModel):
    """Mixin of a backbone's decoder without a head."""

    layer_class: type[ResidualDecoderLayer]

    def __init__(self, config: ResidualConfig):
        config.check_fields()
        super().__init__(config)
        self._connect()

    @classmethod
    def from_backbone(cls, backbone: PreTrainedModel) -> "ResidualModel":
        """This model, made of the modules of a `backbone` that was just built from a configuration of the family."""
        model = cls.__new__(cls)
        PreTrainedModel.__init__(model, backbone.config)
        vars(model).update(vars(backbone))
        model._connect()
        return model

    def _connect(self) -> None:
        sublayers = self.config.sublayers
        if not isinstance(getattr(self, "layers", None), nn.ModuleList):
            raise ValueError(f"the decoder of {self.config.backbone!r} does not keep its layers in `layers`.")
        for i, layer in enumerate(self.layers):
            layer.__class__ = self.layer_class
            layer.connect(self.config, sublayers, i)
        add_residual_connection(self, "output_attn_res", self.config, sublayer=self.config.num_sublayers)
        self.post_init()

    def forward(self, *args, record_depth_attentions: Callable[[tuple[Tensor, ...]], None] | None = None, **kwargs):
        """As the backbone's. `record_depth_attentions` is called with the depth attentions, if they are recorded."""
        # The backbone's own loop runs the layers. Between the last of them and the final norm the output is read, which
        # needs tensors of this model: the last layer is told how. Early exit, in generation, runs fewer than there are.
        last_layer = min(self.config.num_hidden_layers, len(self.layers)) - 1
        is_recorded = self._is_recorded(kwargs)
        reads = None if is_recorded or torch.is_grad_enabled() else self._reads()
        outputs = super().forward(
            *args,
            last_layer=last_layer,
            read_output=partial(self._read_output, reads=reads),
            is_recorded=is_recorded,
            reads=reads,
            **kwargs,
        )
        if record_depth_attentions is not None and "depth_attentions" in outputs:
            record_depth_attentions(outputs["depth_attentions"])
        return outputs

    def _is_recorded(self, kwargs: dict) -> bool:
        """Whether somebody asks for what the connections return; compiled, the norms are fused in any case."""
        asked = (kwargs.get(name, getattr(self.config, name, None)) for name in _RECORDED)
        return torch.compiler.is_compiling() or any(value is not None and value is not False for value in asked)

    def _reads(self) -> Reads | None:
        """What reads in place of the connections, where it may."""
        if not _run_as_they_are(self.layers):
            return None
        modules = [
            (layer._modules, sublayer.name, sublayer.first) for layer in self.layers for sublayer in layer.sublayers
        ]
        modules.append((self._modules, "output_attn_res", None))
        return Reads.of([(own[f"{name}_proj"], own[f"{name}_norm"], own.get(first)) for own, name, first in modules])

    def _read_output(self, state: DepthState, reads: Reads | None) -> Tensor:
        """The input of the final norm `[batch, seq, hidden]`: the aggregate over all blocks and the partial sum."""
        connection = self.output_attn_res_proj
        if reads is not None:
            return reads.read(connection, state)[0]
        return connection(state, self.output_attn_res_norm())[0]


class ResidualHead(ResidualPreTrainedModel):
    """Mixin of a model with a head: passes on what its decoder recorded, which a backbone's head knows nothing of."""

    @can_return_tuple
    def forward(self, *args, **kwargs) -> ModelOutput:
        """As the backbone's. With `output_depth_attentions` the output has `depth_attentions`: for each sublayer in
        turn and then for the output, the weights `[sources, batch, seq]`."""
        recorded = []
        # Only if asked for: what a head is called with goes on to the loss function too.
        if kwargs.get("output_depth_attentions", getattr(self.config, "output_depth_attentions", False)):
            kwargs["record_depth_attentions"] = recorded.append
        outputs = super().forward(*args, **kwargs | {"return_dict": True})
        outputs.depth_attentions = None
        if recorded:
            (outputs["depth_attentions"],) = recorded
        return outputs


class ResidualForCausalLM(ResidualHead):
    """Mixin of a backbone's causal language model."""

    model_class: type[ResidualModel]

    def __init__(self, config: ResidualConfig):
        config.check_fields()
        super().__init__(config)
        setattr(self, self.base_model_prefix, self.model_class.from_backbone(self.base_model))
        self.post_init()


class ResidualForSequenceClassification(ResidualHead, GenericForSequenceClassification):
    """Mixin of a backbone with a classification head."""

    model_class: type[ResidualModel]

    def __init__(self, config: ResidualConfig):
        super(GenericForSequenceClassification, self).__init__(config)
        self.num_labels = config.num_labels
        # Not through `AutoModel`: loaded as remote code, a file's classes are not registered there.
        setattr(self, self.base_model_prefix, self.model_class(config))
        self.score = nn.Linear(config.hidden_size, self.num_labels, bias=False)
        self.post_init()


def _run_as_they_are(layers: nn.ModuleList) -> bool:
    """Whether no layer is compiled by itself, or wrapped."""
    return all(isinstance(layer, ResidualDecoderLayer) and layer._compiled_call_impl is None for layer in layers)


def _check_declaration(layer: nn.Module, backbone: str, sublayers: Sublayers) -> None:
    """Check that the `sublayers` declared for a backbone fit a layer of it.

    Raises:
        ValueError: naming the backbone, the sublayer and what does not fit.
    """
    names = [sublayer.name for sublayer in sublayers]
    if names[0] not in _FIRST_SUBLAYER or len(set(names)) < len(names):
        raise ValueError(
            f"the sublayers declared for {backbone!r} are named {', '.join(map(repr, names))}; names must differ, and "
            f"the first must be {' or '.join(map(repr, _FIRST_SUBLAYER))}."
        )
    children = dict(layer.named_children())
    for sublayer in sublayers:
        for name in (name for branch in sublayer.branches for name in branch):
            if name not in children:
                raise ValueError(
                    f"the sublayer {sublayer.name!r} declared for {backbone!r} runs `{name}`, but a layer of it has "
                    f"{', '.join(f'`{child}`' for child in children)}."
                )
        if sublayer.multiplier is not None and not hasattr(layer, sublayer.multiplier):
            raise ValueError(
                f"the sublayer {sublayer.name!r} declared for {backbone!r} is multiplied by `{sublayer.multiplier}`, "
                "which a layer of it does not have."
            )


def auto_map(model_class: type[ResidualPreTrainedModel]) -> dict[str, str]:
    """`auto_map` of a configuration: the classes that the Auto classes load from the code beside the weights."""

    def reference(module: str, name: str) -> str:
        return f"{module.rpartition('.')[2]}.{name}"

    config_class, module = model_class.config_class, model_class.__module__
    heads = {auto_class: reference(module, name) for auto_class, name in model_class.auto_classes.items()}
    return {"AutoConfig": reference(config_class.__module__, config_class.__name__)} | heads


@contextmanager
def _under_own_name(model_class: type[PreTrainedModel]) -> Iterator[type[PreTrainedModel]]:
    """The class whose code is to be saved. FSDP2 makes a model one of a class in a file of torch's, derived from it."""
    own_class = next(c for c in model_class.__mro__ if not c.__module__.startswith("torch."))
    named = model_class.__module__, model_class.__name__
    model_class.__module__, model_class.__name__ = own_class.__module__, own_class.__name__
    try:
        yield own_class
    finally:
        model_class.__module__, model_class.__name__ = named


def _show_backbone_signature(model_class: type[ResidualPreTrainedModel]) -> None:
    """Give `forward` of a mixin the backbone's signature and documentation: `generate` and `Trainer` read them."""
    inherited = [c.__dict__["forward"] for c in model_class.__mro__ if "forward" in c.__dict__]
    if inherited[0].__module__ != __name__ or len(inherited) == 1:
        return
    forward = inherited[0]
    backbone_forward = next(f for f in inherited if f.__module__ != __name__)

    @wraps(backbone_forward)
    def forward_with_signature(self, *args, **kwargs):
        return forward(self, *args, **kwargs)

    model_class.forward = forward_with_signature


def _with_flat_state(checkpoint_func: Callable) -> Callable:
    """Let a checkpointing function see the tensors of the state, which is a layer's one positional argument.

    Reentrant checkpointing differentiates only with respect to tensors that are themselves positional arguments.
    """

    def checkpoint_layer(forward: partial, state: DepthState) -> DepthState:
        if isinstance(state, tuple):
            return checkpoint_func(lambda *tensors: forward(tensors), *state)
        return checkpoint_func(forward, state)

    return checkpoint_layer
