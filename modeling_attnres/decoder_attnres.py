"""Residual connections on any decoder of `transformers`: mixins for its layer, its model and its heads.

Each sublayer reads its input from the depth state and writes its output to it; after the last layer, the final norm
reads its input. The state takes the place of `hidden_states` in the backbone's own loop over layers, so no hooks are
needed. `ResidualDecoderLayer.forward` is the way of the state through one layer.
"""

import os
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields
from functools import partial, wraps
from inspect import signature
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import ModelOutput, SequenceClassifierOutputWithPast
from transformers.models.auto import modeling_auto
from transformers.utils import can_return_tuple
from transformers.utils.output_capturing import OutputRecorder

from .attention_gate_attnres import add_attention_gate
from .configuration_attnres import CONNECTIONS, ResidualConfig, Sublayers
from .documents_attnres import keep_documents_apart, separate_under_mask
from .experts_attnres import call_mlp
from .loading_attnres import (
    added_by_kind,
    check_added,
    check_shapes,
    explain_broken_shard,
    stored_fields,
    warn_of_change,
)
from .residual_attnres import DepthState, ResidualConnection, ResidualNorm, explain_source
from .saving_attnres import complete_save, saved_whole, stage_in
from .value_residual_attnres import (
    ValueResidual,
    add_value_residual,
    pack_values,
    unpack_values,
)

# Model type -> class name. `Trainer`'s label smoothing, pipelines, `transformers serve` and lm-eval look here to tell
# language models from others. An Auto class's `register` does not write to these tables.
_CLASS_NAMES = {
    "AutoModel": modeling_auto.MODEL_MAPPING_NAMES,
    "AutoModelForCausalLM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "AutoModelForQuestionAnswering": modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    "AutoModelForSequenceClassification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "AutoModelForTokenClassification": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
}
# Names of a layer's first sublayer. Its input is recorded as the layer's hidden state.
_FIRST_SUBLAYER = ("self_attention_res", "parallel_res")


def _add_connection(module: nn.Module, name: str, config: ResidualConfig, sublayer: int) -> None:
    """Register a connection as `{name}_proj` and its norm as `{name}_norm`, the names of the released weights."""
    # Not `config.connection`: with remote code, the configuration may come from another copy of these files.
    connection = CONNECTIONS[config.residual_connection].form(config)(config, sublayer)
    module.add_module(f"{name}_proj", connection)
    if connection.has_norm:
        module.add_module(f"{name}_norm", ResidualNorm(config.hidden_size))


class ResidualDecoderLayer:
    """Mixin of a backbone's decoder layer that runs its sublayers, as declared in `BACKBONES`, on the depth state."""

    sublayers: Sublayers
    layer_idx: int
    mixes_values = False  # whether the state between layers also holds the first layer's values

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
        self.sublayers, self.layer_idx = sublayers, layer_idx
        for i, sublayer in enumerate(sublayers):
            _add_connection(self, sublayer.name, config, layer_idx * len(sublayers) + i)
        add_attention_gate(self, config)
        add_value_residual(self, config)
        self.mixes_values = config.value_residual is not None

    def move_to(self, layer_idx: int) -> None:
        """Set the layer's index in the decoder, after layers were moved or removed."""
        self.layer_idx = layer_idx
        for i, sublayer in enumerate(self.sublayers):
            getattr(self, f"{sublayer.name}_proj").sublayer = layer_idx * len(self.sublayers) + i

    def forward(self, hidden_states: DepthState, *, reader: "DepthReader | None" = None, **kwargs) -> DepthState:
        """Run the layer's sublayers: each reads from the state, computes, and writes its output to the state.

        Args:
            hidden_states: the depth state; backbones call their layers with this name.
            reader: the reader of this pass, made once by the decoder; `None` for a layer that is called alone.
            kwargs: arguments of the backbone's attention.

        Returns:
            The state; after the last layer the input `[batch, seq, hidden]` of the final norm.
        """
        state, reader = hidden_states, reader or DepthReader()
        if self.mixes_values:
            state, first_values = unpack_values(state)
        for sublayer in self.sublayers:
            inputs, is_normed, state = reader.read(self, sublayer.name, state, sublayer.first)  # (batch, seq, hidden)
            outputs = []
            for branch in sublayer.branches:
                output = inputs
                for name in branch[is_normed:]:  # without the first module, if the read has applied that norm
                    module = getattr(self, name)
                    if name not in ("attention", "self_attn"):
                        output = call_mlp(module, output)
                    elif self.mixes_values:
                        output, *_, first_values = self.attend(module, output, first_values=first_values, **kwargs)
                    else:
                        output = self.attend(module, output, **kwargs)[0]
                outputs.append(output)
            output = sum(outputs[1:], outputs[0])
            if sublayer.multiplier is not None:
                output = output * getattr(self, sublayer.multiplier)
            state = getattr(self, f"{sublayer.name}_proj").write(state, output)
        if self.mixes_values:
            state = pack_values(state, first_values)
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
    """Reads the inputs of all sublayers in one forward pass, through their connections or an inference plan.

    Args:
        model: the decoder, for the read after its last layer; `None` for a layer that is called alone.
        plan: the inference plan that reads in place of the connections, or `None`; see
            [`ResidualConnection.inference_plan`].
    """

    def __init__(self, model: "ResidualModel | None" = None, plan: Any = None):
        self.model, self.plan = model, plan

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

        Raises:
            TypeError: an adapter wraps the connection or its norm.
        """
        connection, norm = getattr(owner, f"{name}_proj"), getattr(owner, f"{name}_norm", None)
        if self.plan is not None and not torch.compiler.is_compiling():
            return *self.plan.read(connection, state), state
        if hasattr(connection, "get_base_layer") or hasattr(norm, "get_base_layer"):
            raise TypeError(f"`{name}` holds no layer for an adapter: train it by `modules_to_save`.")
        may_fuse = first is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if may_fuse and isinstance(connection, ResidualConnection):  # not the wrapper of an adapter
            both = connection.read_normed(state, norm, getattr(owner, first))
            if both is not None:
                return both[0], True, both[1]
        is_normed = connection.takes_norm and first is not None
        argument = _as_function(getattr(owner, first)) if is_normed else None if norm is None else norm()
        inputs, _, state = connection(state, argument)
        return inputs, is_normed, state

    def after(self, layer_idx: int, state: DepthState) -> DepthState:
        """Return the state after a layer; after the last one the final norm's input `[batch, seq, hidden]`.

        Args:
            layer_idx: index of the layer that has just ended.
            state: the state after it.
        """
        if self.model is None:
            return state
        last = min(self.model.config.num_hidden_layers, len(self.model.layers)) - 1  # early exit runs fewer
        if layer_idx != last:
            return state
        return self.read(self.model, "output_attn_res", unpack_values(state)[0])[0]


class ResidualPreTrainedModel:
    """Mixin of a backbone's `PreTrainedModel`: loading, saving, dtypes, and records of hidden states."""

    config: ResidualConfig
    auto_classes: dict[str, str]  # Auto class -> name of the model class, in the same file

    def __init_subclass__(cls, **kwargs) -> None:
        super().__init_subclass__(**kwargs)
        if not issubclass(cls, PreTrainedModel):
            return  # a mixin, such as `ResidualModel`
        backbone = next(c for c in cls.__mro__ if c.__module__.startswith("transformers.models."))
        cls.__doc__ = cls.__doc__ or f"[`{backbone.__name__}`] with attention residuals or another of `CONNECTIONS`."
        # By default `transformers` would search the file of the class for the experts' decorator.
        cls._can_set_experts_implementation = backbone._can_set_experts_implementation
        _show_backbone_signature(cls)
        # A connection returns the input (0) and the depth weights (1). `hidden_states` has the input of each layer and
        # of the final norm; `transformers` replaces the last one by the norm's output.
        record = partial(OutputRecorder, ResidualConnection)
        first = partial(record, index=0, capture_initial_hidden_state=False)
        reads = [first(layer_name=f"{name}_proj") for name in (*_FIRST_SUBLAYER, "output_attn_res")]
        own = {"hidden_states": reads, "depth_attentions": record(index=1)}
        cls._can_record_outputs = (getattr(cls, "_can_record_outputs", None) or {}) | own
        # FSDP2 derives a class from the model's, and so may a user. It goes into the tables that hold its base.
        bases = {base.__name__ for base in cls.__mro__[1:]}
        for names in _CLASS_NAMES.values():
            if not bases.isdisjoint(name for name in names.values() if isinstance(name, str)):
                _add_class_name(names, cls)

    @classmethod
    def register_for_auto_class(cls, auto_class: str | type = "AutoModel") -> None:
        """Save the class's code with its models, and name the class where the tools of `transformers` look."""
        super().register_for_auto_class(auto_class)
        name = auto_class if isinstance(auto_class, str) else auto_class.__name__
        if name in _CLASS_NAMES:
            _add_class_name(_CLASS_NAMES[name], cls)

    def post_init(self) -> None:
        """Initialise as `transformers` does, and keep some tensors of a 16-bit model in float32."""
        for name in ("_no_split_modules", "_keep_in_fp32_modules_strict"):
            vars(self).pop(name, None)  # the backbone's `__init__` has set them from its own classes
        super().post_init()
        if CONNECTIONS[self.config.residual_connection].form(self.config).float32:
            self._keep_in_fp32_modules_strict = {*(self._keep_in_fp32_modules_strict or ()), "*_res_proj"}
        if self.config.value_residual is not None:
            self._keep_in_fp32_modules_strict = {*(self._keep_in_fp32_modules_strict or ()), "value_residual"}
        # A model that is made in 16 bits has all tensors in 16 bits. `from_pretrained` keeps the dtypes that it finds.
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        kept = self._tensors_kept_in_float32()
        for tensor in kept.values():
            tensor.data = tensor.data.to(dtype)
        # Before transformers 5.23 the plan cannot be set, and FSDP2 groups whole layers.
        has_plan = getattr(getattr(type(self), "fsdp_plan", None), "fset", None) is not None
        if kept and has_plan and self.fsdp_plan and torch.get_default_dtype() != dtype:
            # FSDP2 needs one dtype in a group, but `transformers` groups a module with a tensor in float32 together
            # with its children in 16 bits. So each of these children gets a separate group.
            owners = {name.rpartition(".")[0] for name, _ in self.named_parameters() if name in kept}
            children = (f"{owner}.{name}" for owner in owners for name, _ in self.get_submodule(owner).named_children())
            apart = {re.sub(r"\.\d+\.", ".*.", name): "free_full_weight" for name in children}
            self.fsdp_plan = apart | self.fsdp_plan

    def _tensors_kept_in_float32(self) -> dict[str, Tensor]:
        """Return the tensors that `_keep_in_fp32_modules_strict` names, by name."""
        patterns = [name.replace(".", r"\.").replace("*", ".*") for name in self._keep_in_fp32_modules_strict or ()]
        if not patterns:
            return {}
        pattern = re.compile(rf"(^|\.)({'|'.join(patterns)})(\.|$)")
        named = chain(self.named_parameters(), self.named_buffers())
        return {name: tensor for name, tensor in named if tensor.is_floating_point() and pattern.search(name)}

    def _apply(self, fn: Callable[[Tensor], Tensor], *args, **kwargs):
        """Apply a function to all tensors; `model.to(torch.bfloat16)` and `model.half()` call this.

        It moves the tensors that stay in float32, but does not cast them to 16 bits.
        """
        kept = [*self._tensors_kept_in_float32().values()]
        kept += [tensor.grad for tensor in kept if tensor.grad is not None]
        kept_ids = {id(tensor) for tensor in kept}  # `fn` is called with tensors, and not with their names

        def cast(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            if id(tensor) in kept_ids and result.dtype in (torch.float16, torch.bfloat16):
                return tensor.to(device=result.device, dtype=torch.float32)
            return result

        return super()._apply(cast, *args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, (ResidualConnection, ValueResidual)):
            module.reset_parameters()
        elif isinstance(module, ResidualNorm):
            init.ones_(module.weight)

    def _set_gradient_checkpointing(self, enable: bool = True, gradient_checkpointing_func=checkpoint, **kwargs):
        def checkpoint_layer(forward: partial, state: DepthState) -> DepthState:
            if isinstance(state, tuple):  # reentrant checkpointing passes gradients only to positional tensors
                return gradient_checkpointing_func(lambda *tensors: forward(tensors), *state)
            return gradient_checkpointing_func(forward, state)

        super()._set_gradient_checkpointing(enable, checkpoint_layer, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """Load a checkpoint of the family or of a backbone. From a backbone's, connections have their initial values.

        Args:
            pretrained_model_name_or_path: a folder or Hub id.
            args: as in `transformers`.
            kwargs: as in `transformers`.

        Raises:
            ValueError: the checkpoint holds only some of the added tensors, or values that are not finite.
            RuntimeError: the configuration implies another shape for a tensor.
            OSError: a file is truncated or damaged; or an interrupted save into the folder has just been completed.
        """
        source, options = pretrained_model_name_or_path, kwargs.copy()
        # An Auto class has read `config.json` and the code before this method is called.
        if source is not None and complete_save(Path(source, kwargs.get("subfolder") or "")) and "config" in kwargs:
            raise OSError(
                f"a save into {source} was interrupted, and is complete now. Load it again: the configuration that was "
                "read may belong to the older model."
            )
        kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        with explain_source(source), explain_broken_shard(source, kwargs.get("subfolder", "")):
            model, info = super().from_pretrained(source, *args, **kwargs)
        if not options.get("ignore_mismatched_sizes"):  # `transformers` ignored them, see above
            check_shapes(info["mismatched_keys"], source)
        for added in added_by_kind(model):
            check_added(model, added, info["missing_keys"], source)
        if source is not None:
            # By the class of the model: a config.json may hold the fields in another form than the configuration does.
            stored = cls.config_class.fields_of_file(stored_fields(source, **options))
            warn_of_change(model, stored, source, info)
        if _by_own_names(source or "", kwargs.get("subfolder", "")):
            # No renaming applied to these names, and a save would apply none either. Without the attribute, a save
            # derives the renamings from the model type.
            vars(model).pop("_weight_conversions", None)
        return (model, info) if options.get("output_loading_info") else model

    def save_pretrained(self, save_directory: str | Path, *args, **kwargs):
        """Save as `transformers` does, with the family's code; replace an older save in the folder as a whole.

        The arguments are those of `transformers`.

        Raises:
            OSError: no weights were written, or a file could not be moved.
        """
        # FSDP2 derives the model's class from the family's, in a module of torch. `transformers` saves the name and the
        # code of the class, so it must see the family's.
        cls = type(self)
        own = next(c for c in cls.__mro__ if not c.__module__.startswith("torch."))
        named = cls.__module__, cls.__name__
        kwargs.setdefault("save_original_format", not _by_own_names(save_directory))
        self.config.auto_map = auto_map(own)
        save = super().save_pretrained
        call = signature(save).bind(save_directory, *args, **kwargs).arguments
        call |= call.pop("kwargs", {})
        spread = torch.distributed.is_available() and torch.distributed.is_initialized()
        is_main = (not spread or torch.distributed.get_rank() == 0) and call.get("is_main_process", True)
        try:
            cls.__module__, cls.__name__ = own.__module__, own.__name__
            # Adapters do not replace the weights beside them. Of a distributed checkpoint, each process writes a part.
            if getattr(self, "_hf_peft_config_loaded", False) or call.get("distributed_checkpoint"):
                save(**call)
                return
            local = call | {"push_to_hub": False}
            if call.get("state_dict") is not None:
                local["state_dict"] = dict(call["state_dict"])  # `transformers` empties the dictionary that it saves
            with saved_whole(save_directory, call.get("variant")) if is_main else nullcontext(save_directory) as stage:
                save(**local | {"save_directory": stage})
            if call.get("push_to_hub"):
                # `transformers` uploads the folder that it writes to. So write again, to a stage for the upload: a
                # failed upload then loses nothing. Every process takes part, because they gather the weights together.
                call.setdefault("repo_id", os.path.basename(os.fspath(save_directory)))
                with stage_in(save_directory) if is_main else nullcontext(save_directory) as stage:
                    save(**call | {"save_directory": stage})
        finally:
            cls.__module__, cls.__name__ = named


class ResidualModel(ResidualPreTrainedModel):
    """Mixin of a backbone's decoder, such as `LlamaModel`."""

    layer_class: type[ResidualDecoderLayer]

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
        for i, layer in enumerate(self.layers):
            # The backbone's `__init__` makes its layers of a fixed class. To make them again would initialise all
            # weights twice, so only the class changes: the family's adds methods and, in `connect`, the connections.
            layer.__class__ = self.layer_class
            layer.connect(config, sublayers, i)
        _add_connection(self, "output_attn_res", config, config.num_sublayers)
        self.post_init()

    def prepare_rows(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Change the arguments of a forward pass so that documents of one row do not see each other.

        Args:
            arguments: the arguments by name.

        Raises:
            ValueError: as [`keep_documents_apart`], or the row has several documents and the backbone carries a state
                through all of it.
        """
        arguments, documents = keep_documents_apart(arguments, self.config)
        # `_is_stateful` is private, but nothing else in `transformers` marks such backbones.
        if documents is not None and self._is_stateful:
            raise ValueError(
                f"the row has several documents, but the backbone {self.config.backbone!r} carries a state from one to "
                "the next: pass each document as a separate row."
            )
        mask = arguments.get("attention_mask")
        if documents is not None and isinstance(mask, Tensor) and mask.ndim == 2:
            # `transformers` keeps documents apart only where there is no mask, so make the masks here.
            dtype = self.get_input_embeddings().weight.dtype
            mask = separate_under_mask(mask, documents, self.config, dtype, every_layer=True)
            arguments = arguments | {"attention_mask": mask}
        return arguments

    def forward(self, *args, record_to: list | None = None, **kwargs):
        """Run the decoder; see the backbone's own `forward` for arguments and result.

        Args:
            args: the backbone's arguments.
            record_to: a list to which the recorded depth weights are appended; the heads pass it.
            kwargs: the backbone's arguments.

        Raises:
            ValueError: the same layer is at two places of `layers`; a layer is another engine's placeholder; the rows
                cannot be prepared.
        """
        # Layers may have been removed or moved since the last pass.
        if any(getattr(layer, "layer_idx", None) != i for i, layer in enumerate(self.layers)):
            foreign = next((layer for layer in self.layers if not hasattr(layer, "layer_idx")), None)
            if foreign is not None:
                raise ValueError(
                    f"`layers` holds a {type(foreign).__name__}, which is no decoder layer. An engine that divides a "
                    "model into pipeline stages puts such placeholders there, but the depth state of this model is "
                    "more than the one tensor that it would pass on: run the model in one pipeline stage."
                )
            if len({*self.layers}) < len(self.layers):
                raise ValueError("one layer is at two places of `layers`: put a copy at one of them.")
            for i, layer in enumerate(self.layers):
                layer.move_to(i)
        records = ("output_hidden_states", "output_depth_attentions")
        is_recorded = any(kwargs.get(name) or getattr(self.config, name, False) for name in records)
        plan = None
        # Records are taken from calls of the connections, which a plan bypasses.
        if not (is_recorded or torch.is_grad_enabled() or torch.compiler.is_compiling()):
            plan = CONNECTIONS[self.config.residual_connection].form(self.config).inference_plan(self)
        # `zip` ends with `args`, the arguments that were given by position.
        arguments = self.prepare_rows(dict(zip(self.argument_names, args)) | kwargs)
        # The backbone's loop passes extra arguments on to every layer, so `reader` reaches the layers.
        outputs = super().forward(reader=DepthReader(self, plan), **arguments)
        if record_to is not None and "depth_attentions" in outputs:
            record_to.append(outputs["depth_attentions"])
        return outputs


class ResidualHead(ResidualPreTrainedModel):
    """Mixin of a backbone's model with a head, such as `LlamaForCausalLM`."""

    model_class: type[ResidualModel]

    def __init__(self, config: ResidualConfig):
        config.check_fields()
        super().__init__(config)
        # The backbone has made its decoder of a fixed class. The family's decoder takes over its modules, because its
        # own `__init__` would initialise all weights twice. `PreTrainedModel.__init__` alone is needed: `transformers`
        # registers the recorded outputs of a class there.
        decoder = self.model_class.__new__(self.model_class)
        PreTrainedModel.__init__(decoder, config)
        vars(decoder).update(vars(self.base_model))
        decoder.connect()
        setattr(self, self.base_model_prefix, decoder)
        self.post_init()

    @can_return_tuple
    def forward(self, *args, **kwargs) -> ModelOutput:
        """Run the model; see the backbone's own `forward` for arguments and result."""
        recorded = []
        # Pass `record_to` only on demand, because the loss function gets it too.
        if kwargs.get("output_depth_attentions", getattr(self.config, "output_depth_attentions", False)):
            kwargs["record_to"] = recorded
        # `Trainer` expects a loss that is divided by the number of labels in all accumulated batches. The loss of a
        # language model is. The other heads ignore that number, and return the mean over their batch.
        total = None if self.can_generate() else kwargs.pop("num_items_in_batch", None)
        outputs = super().forward(*args, **kwargs | {"return_dict": True})
        if total is not None and outputs.get("loss") is not None:
            share = (kwargs["labels"].ne(-100).sum() / total).to(outputs.loss.device)
            # A batch without labels has the mean NaN; its share of all labels is zero.
            outputs["loss"] = torch.where(share > 0, outputs.loss * share, 0.0)
        outputs.depth_attentions = None
        if recorded:
            (outputs["depth_attentions"],) = recorded
        return outputs


class PooledByMask(GenericForSequenceClassification):
    """Mixin of a sequence classifier that pools `inputs_embeds` at the last token that is not padding.

    `transformers` finds padding by token id. For `inputs_embeds` it pools the last position, which is padding in a row
    that is padded on the right.
    """

    def forward(self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, *args, **kwargs):
        """Run the classifier; see `transformers`' own `forward` for arguments and result."""
        embeddings = kwargs.get("inputs_embeds")
        if embeddings is None or not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2:
            return super().forward(input_ids, attention_mask, *args, **kwargs)
        labels = kwargs.pop("labels", None)
        outputs = self.base_model(input_ids, attention_mask, *args, **kwargs)
        batch_size, length = embeddings.shape[:2]
        is_token = attention_mask[:, -length:] != 0  # (batch, length); with a cache, the mask covers earlier tokens too
        # The product is largest at the last real token.
        last = (torch.arange(length, device=is_token.device) * is_token).argmax(-1).to(embeddings.device)
        hidden = outputs.last_hidden_state[torch.arange(batch_size, device=embeddings.device), last]
        logits = self.score(hidden)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config)
        names = {field.name for field in fields(SequenceClassifierOutputWithPast)} & outputs.keys()
        return SequenceClassifierOutputWithPast(loss=loss, logits=logits, **{name: outputs[name] for name in names})


def _as_function(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a function that calls a module. Offloading engines move arguments that have a method `to`; it has none."""

    def call(x: Tensor) -> Tensor:
        return module(x)

    return call


def _by_own_names(*path: str | Path) -> bool:
    """Return whether a folder is saved under the model's own tensor names, and not in the published layout.

    `Trainer` resumes from its folders `checkpoint-7` without the conversion of `from_pretrained`.
    """
    return bool(re.fullmatch(r"checkpoint-\d+", Path(*path).resolve().name))


def auto_map(model_class: type[ResidualPreTrainedModel]) -> dict[str, str]:
    """Return the entry `auto_map` of `config.json`: Auto class -> class in the saved code, as `file.Class`."""
    config_class = model_class.config_class
    model_file, config_file = (cls.__module__.rpartition(".")[2] for cls in (model_class, config_class))
    heads = {auto_class: f"{model_file}.{name}" for auto_class, name in model_class.auto_classes.items()}
    return {"AutoConfig": f"{config_file}.{config_class.__name__}"} | heads


def _add_class_name(names: dict[str, Any], model_class: type[ResidualPreTrainedModel]) -> None:
    """Add a class to a table of `_CLASS_NAMES`, under its model type if that is free."""
    name, model_type = model_class.__name__, model_class.config_class.model_type
    if names.setdefault(model_type, name) != name:
        names[f"{model_type}/{name}"] = name  # tools search the values too


def _check_declaration(layer: nn.Module, backbone: str, sublayers: Sublayers) -> None:
    """Raise `ValueError` if the declared sublayers do not fit a layer of the backbone."""
    names = [sublayer.name for sublayer in sublayers]
    if names[0] not in _FIRST_SUBLAYER or len(set(names)) < len(names):
        first = " or ".join(map(repr, _FIRST_SUBLAYER))
        raise ValueError(
            f"the sublayers of {backbone!r} are named {names}: names must differ, and the first must be {first}."
        )
    for sublayer in sublayers:
        for name in (*sum(sublayer.branches, ()), sublayer.multiplier):
            if name is not None and not hasattr(layer, name):
                has = ", ".join(f"`{child}`" for child, _ in layer.named_children())
                raise ValueError(f"{sublayer.name!r}, declared for {backbone!r}, uses `{name}`; its layers have {has}.")


def _show_backbone_signature(model_class: type[ResidualPreTrainedModel]) -> None:
    """Give `forward` the signature of the backbone's `forward`, because `generate` and `Trainer` read it."""
    family_forward, *inherited = (vars(c)["forward"] for c in model_class.__mro__ if "forward" in vars(c))
    if family_forward.__module__ == __name__:
        backbone_forward = next(forward for forward in inherited if forward.__module__ != __name__)

        @wraps(backbone_forward)
        def forward(self, *args, **kwargs):
            return family_forward(self, *args, **kwargs)

        forward.__doc__ = (
            f"As [`{backbone_forward.__qualname__}`]; `output_depth_attentions` adds `depth_attentions`: the weights "
            "`[sources, batch, seq]` with which each sublayer and the output read."
        )
        model_class.forward = forward
        # Names of positional arguments. They are kept here because `inspect` cannot read them in a traced call.
        model_class.argument_names = tuple(signature(backbone_forward).parameters)[1:]
