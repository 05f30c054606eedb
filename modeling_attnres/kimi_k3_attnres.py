"""Kimi K3: the released language model with attention residuals, on Kimi Linear's classes.

Differences from AttnRes on Kimi Linear (`modeling_attnres`):

- `attn_res_block_size` counts decoder layers, of two sublayers each;
- the decay of delta attention has a lower bound, and the gate of its output has full rank;
- full attention has a gate before its output projection;
- all MLPs use SiTU, which bounds both factors of the product of gate and up projection;
- routed experts work in a smaller, latent space between two projections of their own;
- a checkpoint holds the text model alone, or in a composite model beside a vision part; it may pack experts as MXFP4.

The three parts of this file are the configuration, the model, and the released layout of a checkpoint. The file travels
with models of Kimi K3 only. The experts' decorator `@use_experts_implementation` is named here because `transformers`
searches this file's text for it.
"""

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, conversion_mapping
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
)
from transformers.integrations import use_experts_implementation
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import load_state_dict
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear
from transformers.utils import logging

from .attention_gate_attnres import GATE_FIELDS
from .configuration_attnres import CONNECTIONS, AttnResConfig
from .delta_attention_attnres import DeltaAttention
from .modeling_attnres import AttnResDecoderLayer, AttnResForCausalLM, AttnResModel, AttnResPreTrainedModel
from .residual_attnres import FamilyWarning, is_count, one_of, require

# A name under that of the library: otherwise its verbosity would not hold for these messages.
logger = logging.get_logger(f"transformers.{__name__}")

# --- Configuration ---------------------------------------------------------------------------------------------------

# Fields of the text model in the order of the released `config.json`, under the names that it has there.
_TEXT_FIELDS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "hidden_act", "activation_situ_beta"),
    *("activation_situ_linear_beta", "rms_norm_eps", "initializer_range", "max_position_embeddings"),
    *("num_attention_heads", "num_key_value_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim"),
    *("qk_rope_head_dim", "v_head_dim", "mla_use_nope", "mla_use_output_gate", "attention_bias", "attention_dropout"),
    *("num_experts", "num_experts_per_token", "num_shared_experts", "moe_intermediate_size"),
    *("routed_expert_hidden_size", "latent_moe_use_norm", "first_k_dense_replace", "moe_layer_freq"),
    *("moe_renormalize", "moe_router_activation_func", "topk_method", "use_grouped_topk", "num_expert_group"),
    *("topk_group", "routed_scaling_factor", "num_nextn_predict_layers", "tie_word_embeddings", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
# Field of the released `linear_attn_config` -> field of the configuration.
_LINEAR_FIELDS = {
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
    "gate_lower_bound": "gate_lower_bound",
    "use_full_rank_gate": "use_full_rank_gate",
}
_LAYER_LISTS = {"full_attn_layers": "full_attention", "kda_layers": "linear_attention"}
# What a released file means that has no such field: without the feature the model is Kimi Linear. The defaults of the
# class are those of Kimi K3.
_ABSENT = {
    "activation_situ_beta": None,
    "activation_situ_linear_beta": None,
    "attn_res_block_size": None,
    "gate_lower_bound": None,
    "hidden_act": "silu",
    "latent_moe_use_norm": False,
    "mla_use_output_gate": False,
    "num_shared_experts": 0,
    "q_lora_rank": None,
    "routed_expert_hidden_size": None,
    "use_full_rank_gate": False,
}
# Fields that are true or false. `transformers` does not check the types of fields that Kimi Linear does not have.
_SWITCHES = ("mla_use_output_gate", "use_full_rank_gate", "latent_moe_use_norm")
# Fields whose null in the file differs from their absence, for other readers of the file.
_WRITTEN_NULLS = ("q_lora_rank", "num_experts")
# A field of the text model that is not in this class is one of three kinds.
# Of no effect: releases, older releases of the same authors, or `transformers` have it, and this model needs no such
# number. It is kept without a word.
_WITHOUT_EFFECT = (
    *("aux_loss_alpha", "ep_size", "head_dim", "model_max_length", "num_nextn_predict_layers", "pretraining_tp"),
    *("rope_parameters", "rope_scaling", "rope_theta", "seq_aux", "qk_head_dim", "output_router_logits"),
    *("_name_or_path", "attn_implementation", "experts_implementation", "name_or_path", "num_labels", "torch_dtype"),
    *("output_attentions", "pruned_heads", "torchscript", "use_bfloat16", "tf_legacy_loss", "return_dict"),
    *("add_cross_attention", "cross_attention_hidden_size", "is_decoder", "tie_encoder_decoder"),
)
# Of architecture, since its name begins like that of a size, a switch or a function. It is refused.
_OF_ARCHITECTURE = (
    *("activation_", "attention_", "attn_", "conv_", "dense_", "embedding_", "expert", "ffn_", "final_", "full_"),
    *("gate_", "head_", "hidden_", "kda_", "kv_", "latent_", "layer_", "linear_", "logit", "mla_", "mlp_", "moe_"),
    *("n_", "norm_", "num_", "q_", "qk_", "residual_", "rms_", "rope_", "routed_", "router_", "safe_"),
    *("shared_", "short_", "situ", "sliding_", "topk_", "use_", "v_"),
)
# Any other is kept, and a warning names it.
# Fields of the two kinds of a released file that are of the file, and not of the model.
_OF_FILE = ("architectures", "auto_map", "model_type", "quantization_config", "transformers_version")
COMPOSITE, TEXT = "composite", "text"
_MXFP4 = "mxfp4-pack-quantized"


class AttnResKimiK3Config(AttnResConfig):
    """Configuration of Kimi K3's text model. Defaults are those of the released model.

    It takes the fields of a released `config.json`: of the composite model, with the text model's under `text_config`,
    or of the text model alone. `config.json` is written in the layout that was read. Fields that are documented here
    are those that [`KimiLinearConfig`] and [`ResidualConfig`] do not have, or have with another meaning.
    """

    model_type = "kimi_k3"
    attn_res_block_unit = 2  # a decoder layer has two sublayers
    # `transformers` checks the types of Kimi Linear's fields when they are set. There these two cannot be null.
    __validators__ = {
        name: checks
        for name, checks in getattr(AttnResConfig, "__validators__", {}).items()
        if name not in ("num_local_experts", "n_shared_experts")
    }

    vocab_size: int = 163840
    hidden_size: int = 7168
    intermediate_size: int = 33792
    moe_intermediate_size: int = 3072
    num_hidden_layers: int = 93
    num_attention_heads: int = 96
    num_key_value_heads: int | None = 96
    q_lora_rank: int | None = 1536
    n_shared_experts: int | None = 2
    routed_scaling_factor: float = 1.0
    num_experts_per_tok: int | None = 16
    linear_num_heads: int = 96

    num_local_experts: int | None = 896
    """Number of routed experts (`num_experts` in a file); `None`: the MLPs of all layers are dense."""

    attn_res_block_size: int | None = 12
    """Number of decoder *layers* in a block; `None`: no attention residuals, but the standard residual stream."""

    hidden_act: str = "situ"
    """Activation of all MLPs: `"situ"`, or a name of `ACT2FN` for the gate alone. Delta attention always has SiLU."""

    activation_situ_beta: float | None = 4.0
    """Bound `b` of the gate in SiTU: `b tanh(gate / b) sigmoid(gate)`."""

    activation_situ_linear_beta: float | None = 25.0
    """Bound `l` of the up projection in SiTU, `l tanh(up / l)`; `None` leaves it unchanged."""

    gate_lower_bound: float | None = -5.0
    """Lower bound of the logarithm of a decay in delta attention, below 0; `None`: Kimi Linear's unbounded form."""

    use_full_rank_gate: bool = True
    """Whether the gate of delta attention's output is one projection; if not, two of rank `linear_head_dim`."""

    mla_use_output_gate: bool = True
    """Whether the output of full attention is gated before its output projection."""

    mla_use_nope: bool = True
    """Must be true: full attention has no position encoding."""

    routed_expert_hidden_size: int | None = 3584
    """Width of the latent space of the routed experts; `None`: they work in the model's own."""

    latent_moe_use_norm: bool = True
    """Whether the experts' sum is normed before it is projected back from the latent space, if there is one."""

    first_k_dense_replace: int = 1
    """Number of layers at the start whose MLP is dense."""

    moe_layer_freq: int = 1
    """Of the other layers, those whose index is a multiple of it have routed experts."""

    moe_router_activation_func: str = "sigmoid"
    """Must be `"sigmoid"`."""

    topk_method: str | None = "noaux_tc"
    """Must be `"noaux_tc"`: a bias that is not trained decides which experts are chosen."""

    use_grouped_topk: bool | None = None
    """Whether experts are chosen by groups. It may not be false where there are several groups."""

    num_nextn_predict_layers: int | None = 0
    """Number of layers for multi-token prediction in the checkpoint. They are not loaded."""

    checkpoint_layout: str = COMPOSITE
    """Layout that `save_pretrained` writes: `"composite"` or `"text"`. It is not saved: a file shows its layout."""

    composite_fields: dict | None = None
    """Fields of the composite model that are not of its text model, such as `vision_config`. They are kept."""

    stored_A_log_shape: list[int] | None = None
    """Shape in which `save_pretrained` stores each `A_log`, padded with zeros. It is not saved: a checkpoint has it."""

    def __post_init__(self, **kwargs):
        if kwargs.get("model_type") == self.backbone:
            # Which of the fields with a default were given can no longer be told.
            raise ValueError(
                "these are fields of a config.json, where a feature without a field is off, but is on by default here. "
                "Call `AttnResKimiK3Config.from_dict`."
            )
        # `transformers` has set the fields that it knows, and passes on the others, of which some are second names from
        # releases. Types are checked under the first names.
        first_names = {released: name for name, released in self.attribute_map.items()}
        for name, value in self.fields_of_file(kwargs, fill="text_config" in kwargs).items():
            field = first_names.get(name, name)
            if field in type(self).__dataclass_fields__:
                setattr(self, field, value)
                kwargs.pop(name, None)
            else:
                kwargs[name] = value
        for name in ("text_config", "linear_attn_config", "quantization_config", *(self.composite_fields or ())):
            kwargs.pop(name, None)
        if self.attn_res_block_size is None and self.residual_connection == "attn_res":
            self.residual_connection = "standard"
        require(self, "num_hidden_layers", is_count(self.num_hidden_layers), "an integer >= 1")
        if self.layer_types is None:
            last = self.num_hidden_layers - 1
            self.layer_types = [
                "full_attention" if i % 4 == 3 or i == last else "linear_attention" for i in range(last + 1)
            ]
        if self.mlp_layer_types is None:
            require(self, "moe_layer_freq", is_count(self.moe_layer_freq), "an integer >= 1")
            self.mlp_layer_types = self._released_mlp_types()
        self.n_shared_experts = self.n_shared_experts or 0
        # The gate of the family is that of the released weights, with the same name of its tensor. If the arguments
        # contradict each other, `check_fields` says so.
        self.attention_gate = kwargs.pop("attention_gate", self._released_gate())
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            # The ids of the released tokenizer mean nothing in a smaller vocabulary.
            value = getattr(self, name)
            if value == getattr(type(self), name) and isinstance(value, int) and value >= self.vocab_size:
                setattr(self, name, None)
        super().__post_init__(**kwargs)

    def _released_gate(self) -> str | None:
        """Return the family's `attention_gate` that `mla_use_output_gate` stands for."""
        return "sdpa" if self.mla_use_output_gate else None

    def _released_mlp_types(self) -> list[str]:
        """Return the kinds of MLP that the released fields stand for."""
        first, every = self.first_k_dense_replace, self.moe_layer_freq
        has_experts = self.num_local_experts is not None
        return [
            "sparse" if has_experts and i >= first and i % every == 0 else "dense"
            for i in range(self.num_hidden_layers)
        ]

    @classmethod
    def check_file(cls, fields: Mapping[str, Any]) -> None:
        """Accept the fields of Kimi K3."""

    @classmethod
    def fields_of_file(cls, fields: Mapping[str, Any], fill: bool = True) -> dict[str, Any]:
        """Return the fields of a released `config.json` as arguments of this class.

        Args:
            fields: those of the composite model, of the text model, or arguments of this class.
            fill: whether a feature of which the file says nothing is off.

        Raises:
            ValueError: the lists of layers contradict each other; a field of linear attention is unknown; the
                quantisation is not the released one.
        """
        outer, layout = dict(fields), {}
        if "text_config" not in outer and "linear_attn_config" not in outer and outer.get("model_type") is None:
            return outer  # arguments of this class
        text = outer.pop("text_config", None)
        if text is None:
            flat = outer
            if flat.get("model_type") == cls.backbone:
                layout = {"checkpoint_layout": TEXT}
        else:
            text = _as_object("text_config", text)
            known = cls._known_fields()
            composite = {name: outer.pop(name) for name in [*outer] if name not in known}
            flat = outer | {name: value for name, value in text.items() if name not in _OF_FILE or name not in outer}
            flat["quantization_config"] = text.get("quantization_config") or outer.get("quantization_config")
            layout = {"checkpoint_layout": COMPOSITE, "composite_fields": composite or None}
        _check_quantization(flat.pop("quantization_config", None))
        linear = _as_object("linear_attn_config", flat.pop("linear_attn_config", None))
        lists = {name: linear.pop(name) for name in _LAYER_LISTS if linear.get(name) is not None}
        for name, value in linear.items():
            if name in _LINEAR_FIELDS:
                flat[_LINEAR_FIELDS[name]] = value
            elif value not in (None, False):
                raise ValueError(
                    f"`linear_attn_config` has the field `{name}` ({value!r}), which may change what the model "
                    "computes, and which this version does not know. Update the code, or remove the field if it has no "
                    "effect."
                )
        if lists:
            layers = flat.get("num_hidden_layers", cls.num_hidden_layers)
            flat["layer_types"] = _layer_types(lists, layers)
        if fill:
            # A field may have two names, of the released file and of `transformers`.
            given = {cls.attribute_map.get(name, name) for name in flat}
            flat |= {name: value for name, value in _ABSENT.items() if cls.attribute_map.get(name, name) not in given}
            # For the checks of a loaded checkpoint, which compare the fields of the family.
            flat["attention_gate"] = "sdpa" if flat["mla_use_output_gate"] else None
            if flat["attn_res_block_size"] is None:
                flat.setdefault("residual_connection", "standard")
        flat.pop("model_type", None)
        # The released names are no classes here. `to_dict` writes them.
        flat["architectures"] = ["AttnResKimiK3ForCausalLM"]
        return flat | layout | ({"model_type": cls.model_type} if fill else {})

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        """Make a configuration of the fields of a `config.json`, in any of the released layouts.

        Args:
            config_dict: the fields.
            kwargs: fields with other values, also under their released names; and arguments of `transformers`.
        """
        # `transformers` would set such fields at the end, when others were derived from those of the file.
        names = cls._known_fields() - {*_WITHOUT_EFFECT, *_OF_FILE, "dtype"} | {"linear_attn_config"}
        changes = {name: kwargs.pop(name) for name in [*kwargs] if name in names}
        return super().from_dict(cls._changed(cls.fields_of_file(config_dict), changes), **kwargs)

    @classmethod
    def _changed(cls, fields: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments of this class with some changed. Of a field's two names, that of the change remains."""
        if "linear_attn_config" in changes:
            changes = cls.fields_of_file(changes, fill=False)
        changed = {cls.attribute_map.get(name, name) for name in changes}
        # These follow from other fields.
        if "mla_use_output_gate" in changed:
            changed.add("attention_gate")
        if "attn_res_block_size" in changed and fields.get("residual_connection") == "standard":
            changed.add("residual_connection")
        kept = {name: value for name, value in fields.items() if cls.attribute_map.get(name, name) not in changed}
        return kept | dict(changes)

    @classmethod
    def get_config_dict(cls, *args, **kwargs):
        """Read a `config.json` as `transformers` does; that of the text model alone names Kimi Linear's model type."""
        # Not the method of the family: it would hide which layout the file has.
        fields, kwargs = PreTrainedConfig.get_config_dict.__func__(cls, *args, **kwargs)
        return cls.fields_of_file(fields), kwargs

    def check_fields(self) -> None:
        """Check all fields, also those of Kimi K3.

        Raises:
            ValueError: a value is not allowed; the message names field, value and allowed values.
        """
        experts, shared = self.num_local_experts, self.n_shared_experts
        is_number = experts is None or is_count(experts)
        require(self, "num_experts", is_number, "an integer >= 1, or null where the MLPs of all layers are dense")
        is_number = shared is None or shared == 0 or is_count(shared)
        require(self, "num_shared_experts", is_number, "an integer >= 0")
        for name in _SWITCHES:
            require(self, name, isinstance(getattr(self, name), bool), "true or false")
        first = self.first_k_dense_replace
        require(self, "first_k_dense_replace", first == 0 or is_count(first), "an integer >= 0")
        super().check_fields()
        require(self, "mla_use_nope", self.mla_use_nope is True, "true: there is no position encoding")
        function = self.moe_router_activation_func
        require(self, "moe_router_activation_func", function == "sigmoid", "'sigmoid'")
        require(self, "topk_method", self.topk_method in (None, "noaux_tc"), "'noaux_tc'")
        is_grouped = self.use_grouped_topk is not False or self.n_group == 1
        require(self, "use_grouped_topk", is_grouped, f"true where `num_expert_group` is {self.n_group}")
        bound = self.gate_lower_bound
        is_bound = bound is None or (isinstance(bound, int | float) and -math.inf < bound < 0)
        require(self, "gate_lower_bound", is_bound, "a negative number, or null for a decay without bound")
        activations = ("situ", *ACT2FN)
        require(self, "hidden_act", self.hidden_act in activations, f"'situ' or {one_of(ACT2FN)}")
        if self.hidden_act == "situ":
            beta, linear_beta = self.activation_situ_beta, self.activation_situ_linear_beta
            is_given = isinstance(beta, int | float) and beta > 0
            require(self, "activation_situ_beta", is_given, "a number > 0 where `hidden_act` is 'situ'")
            is_given = linear_beta is None or (isinstance(linear_beta, int | float) and linear_beta > 0)
            require(self, "activation_situ_linear_beta", is_given, "a number > 0, or null")
        width = self.routed_expert_hidden_size
        require(self, "routed_expert_hidden_size", width is None or is_count(width), "an integer >= 1, or null")
        layouts = (COMPOSITE, TEXT)
        require(self, "checkpoint_layout", self.checkpoint_layout in layouts, one_of(layouts))
        gate = self._released_gate()
        allowed = f"{gate!r} where `mla_use_output_gate` is {self.mla_use_output_gate}. Set `mla_use_output_gate` alone"
        require(self, "attention_gate", self.attention_gate == gate, allowed)
        allowed = "those of `num_experts`, `first_k_dense_replace` and `moe_layer_freq`"
        require(self, "mlp_layer_types", self.mlp_layer_types == self._released_mlp_types(), allowed)
        for name, value in self._unknown_fields().items():
            if name.startswith(_OF_ARCHITECTURE):
                raise ValueError(
                    f"`{name}` ({value!r}) may change what the model computes, and this version does not know it. "
                    "Update the code, or remove the field from config.json if it has no effect."
                )

    def _unknown_fields(self) -> dict[str, Any]:
        """Return the fields that this class does not have, unless they are off or known to have no effect."""
        known = self._known_fields()
        fields = {name: value for name, value in vars(self).items() if name not in known and name[0] != "_"}
        return {name: value for name, value in fields.items() if value not in (None, False, "", [], {})}

    def _warn_of_unknown_fields(self) -> None:
        """Warn of fields that are not in this class and are not refused."""
        for name, value in sorted(self._unknown_fields().items()):
            message = (
                f"`{name}` ({value!r}) is not a field of Kimi K3 here, and has no effect. It is kept on saving. If it "
                "changes what the model computes, update the code."
            )
            warnings.warn(message, FamilyWarning, stacklevel=3)

    @classmethod
    def _known_fields(cls) -> set[str]:
        """Return the names of all fields that are not of another version."""
        connections = (name for connection in CONNECTIONS.values() for name in connection.fields)
        names = {*cls.attribute_map, *cls.attribute_map.values(), *connections, *GATE_FIELDS}
        return {*cls.__dataclass_fields__, *_WITHOUT_EFFECT, *_OF_FILE, *names}

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a released `config.json` has them, in the layout of `checkpoint_layout`."""
        fields = super().to_dict()
        text = {"model_type": self.backbone, "architectures": ["KimiLinearForCausalLM"]}
        for name in _TEXT_FIELDS:
            value = getattr(self, name)
            if value is not None or name in _WRITTEN_NULLS:
                text[name] = value
        linear = {name: getattr(self, field) for name, field in _LINEAR_FIELDS.items()}
        text["linear_attn_config"] = {name: value for name, value in linear.items() if value is not None} | {
            name: [i + 1 for i, of_layer in enumerate(self.layer_types) if of_layer == kind]
            for name, kind in _LAYER_LISTS.items()
        }
        if self.residual_connection == "attn_res":
            text["attn_res_block_size"] = self.attn_res_block_size
        elif self.residual_connection != "standard":
            text["residual_connection"] = self.residual_connection
        for name, default in CONNECTIONS[self.residual_connection].fields.items():
            if name != "attn_res_block_size" and fields.get(name, default) != default:
                text[name] = fields[name]
        # Of the common fields of `transformers`, those that were changed; and fields that no one here knows.
        common, written = PreTrainedConfig().to_dict(), {*_TEXT_FIELDS, *self._known_fields()}
        for name, value in fields.items():
            is_changed = name in common and name not in _OF_FILE and value != common[name]
            is_unknown = name not in common and name not in written
            if name not in text and not name.startswith("_") and (is_changed or is_unknown):
                text[name] = value
        outer = {name: fields[name] for name in ("auto_map", "transformers_version") if name in fields}
        if self.checkpoint_layout == TEXT:
            return text | outer
        outer |= {"model_type": self.model_type, "architectures": ["KimiK3ForConditionalGeneration"]}
        names = ("dtype", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
        outer |= {name: text[name] for name in names if name in text}
        return outer | (self.composite_fields or {}) | {"text_config": text}


def _as_object(name: str, value: Any) -> dict[str, Any]:
    """Return the fields of an object in a `config.json`, none for null.

    Raises:
        ValueError: the value is no object.
    """
    if value is None:
        return {}
    if isinstance(value, PreTrainedConfig) or hasattr(value, "to_dict"):
        return value.to_dict()
    if not isinstance(value, Mapping):
        raise ValueError(f"`{name}` is {value!r}, but must be an object with fields.")
    return dict(value)


def _layer_types(lists: Mapping[str, Collection[int]], layers: int) -> list[str]:
    """Return the kind of each layer, of the released lists of layers that count from 1.

    Raises:
        ValueError: a layer is in both lists or in none, or there is no such layer.
    """
    kinds: dict[int, str] = {}
    names = " and ".join(f"`{name}`" for name in _LAYER_LISTS)
    for name, numbers in lists.items():
        if not isinstance(numbers, list | tuple):
            raise ValueError(f"`{name}` is {numbers!r}, but must be a list of layers, which count from 1.")
        for number in numbers:
            if not is_count(number) or number > layers:
                raise ValueError(f"`{name}` has the layer {number!r}, but layers must count from 1 to {layers}.")
            if kinds.setdefault(number, _LAYER_LISTS[name]) != _LAYER_LISTS[name]:
                raise ValueError(f"layer {number} is in both {names}, but must be in one of them.")
    missing = [number for number in range(1, layers + 1) if number not in kinds]
    if missing:
        raise ValueError(f"layer {missing[0]} is in none of {names}, which must hold all {layers} layers.")
    return [kinds[number] for number in range(1, layers + 1)]


def _check_quantization(quantization: Any) -> None:
    """Raise `ValueError` if a checkpoint is quantised in another way than the released one."""
    if quantization is None:
        return
    fields = _as_object("quantization_config", quantization)
    if fields.get("format") != _MXFP4:
        method = fields.get("format") or fields.get("quant_method")
        raise ValueError(
            f"`quantization_config` has the format {method!r}, but must be {_MXFP4!r}. Use a checkpoint in bfloat16 or "
            "MXFP4."
        )


# --- Model -----------------------------------------------------------------------------------------------------------


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """Compute SiTU, `b tanh(gate / b) sigmoid(gate) * l tanh(up / l)`, in float32 or wider.

    Args:
        gate: `[..., width]`.
        up: `[..., width]`.
        beta: `b`.
        linear_beta: `l`; `None` leaves `up` unchanged.

    Returns:
        `[..., width]` in the dtype of `gate`.
    """
    # Transforms and tracers need plain operations, and a compiler fuses them by itself.
    is_transformed = torch.autograd.forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()
    if is_transformed or torch.jit.is_tracing() or torch.compiler.is_compiling():
        return _plain_situ(gate, up, beta, linear_beta)
    if torch.is_grad_enabled():
        return _SiTU.apply(gate, up, beta, linear_beta)
    return _blockwise_situ(gate, up, beta, linear_beta)


def _plain_situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """Compute SiTU as the formula says it."""
    dtype = gate.dtype
    wide = torch.promote_types(dtype, torch.float32)
    gate, up = gate.to(wide), up.to(wide)
    gate = beta * torch.tanh(gate / beta) * torch.sigmoid(gate)
    if linear_beta is not None:
        up = linear_beta * torch.tanh(up / linear_beta)
    return (gate * up).to(dtype)


def _blockwise_situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """Compute SiTU in few passes over blocks."""
    (result,) = _in_blocks(lambda *block: (_fast_situ(*block, beta, linear_beta),), [gate], gate, up)
    return result


def _in_blocks(function: Callable[..., tuple[Tensor, ...]], like: Sequence[Tensor], *tensors: Tensor) -> list[Tensor]:
    """Apply an elementwise function of several passes to one block after another.

    The tensors between its passes then stay in the processor's cache, which saves up to a quarter of the time on a CPU.

    Args:
        function: takes blocks of the tensors, and returns blocks of the results.
        like: tensors with the dtypes of the results.
        tensors: `[..., width]`, all of one shape.

    Returns:
        The results, of the tensors' shape.
    """
    first = tensors[0]
    # In smaller blocks the calls cost more than the cache saves. (For 2^15 elements and less PyTorch takes one thread.)
    size = torch.get_num_threads() << 17
    if first.device.type != "cpu" or first.numel() <= size or any(type(tensor) is not Tensor for tensor in tensors):
        return list(function(*tensors))
    results = [torch.empty(first.shape, dtype=tensor.dtype) for tensor in like]
    rows, width = max(1, size // first.shape[-1]), first.shape[-1]
    inputs, outputs = ([x.reshape(-1, width).split(rows) for x in group] for group in (tensors, results))
    for block, targets in zip(zip(*inputs), zip(*outputs)):
        for target, values in zip(targets, function(*block)):
            target.copy_(values)
    return results


def _fast_situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """Compute SiTU in few passes over memory."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    gate_in, up_in = gate.to(wide), up.to(wide)
    result = _tanh(gate_in, beta).mul_(torch.sigmoid(gate_in))
    if linear_beta is None:
        return result.mul_(up_in).mul_(beta).to(gate.dtype)
    return result.mul_(_tanh(up_in, linear_beta)).mul_(beta * linear_beta).to(gate.dtype)


def _tanh(x: Tensor, scale: float) -> Tensor:
    """Compute `tanh(x / scale)` in a new tensor, as exactly as `torch.tanh` but faster on a CPU."""
    if x.device.type != "cpu":
        return torch.div(x, scale).tanh_()
    # tanh(y) = e / (e + 2) with e = exp(2 y) - 1, which has no cancellation near zero. Beyond 40 it is 1.
    exponential = torch.mul(x, 2 / scale).clamp_max_(80).expm1_()
    return exponential.div_(exponential + 2)


class _SiTU(torch.autograd.Function):
    """SiTU in few passes over memory. For its own backward pass it keeps gate and up, and nothing in between."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.betas = beta, linear_beta
        return _blockwise_situ(gate, up, beta, linear_beta)

    @staticmethod
    def backward(ctx, grad: Tensor):
        gate, up = ctx.saved_tensors
        beta, linear_beta = ctx.betas
        if torch.is_grad_enabled():  # for second derivatives, differentiate the formula
            _, derivative = torch.func.vjp(lambda gate, up: _plain_situ(gate, up, beta, linear_beta), gate, up)
            return *derivative(grad), None, None
        grads = _in_blocks(lambda *block: _fast_situ_grads(*block, beta, linear_beta), [gate, up], gate, up, grad)
        return *grads, None, None


def _fast_situ_grads(
    gate: Tensor, up: Tensor, grad: Tensor, beta: float, linear_beta: float | None
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of gate and up projection in few passes over memory, given that of the result."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    gate_in, grad_in = gate.to(wide), grad.to(wide)
    tanh, sigmoid = _tanh(gate_in, beta), torch.sigmoid(gate_in)
    bounded = up.to(wide) if linear_beta is None else _tanh(up.to(wide), linear_beta)
    # d(b tanh(x / b) s(x)) = s (1 - tanh^2) + b tanh s (1 - s) = s (1 - tanh^2 + b tanh (1 - s))
    slope = torch.addcmul(tanh * beta, tanh, sigmoid, value=-beta)
    slope.addcmul_(tanh, tanh, value=-1).add_(1).mul_(sigmoid).mul_(bounded).mul_(grad_in)
    of_up = tanh.mul_(sigmoid).mul_(grad_in).mul_(beta)
    if linear_beta is None:
        return slope.to(gate.dtype), of_up.to(up.dtype)
    # d(l tanh(u / l)) = 1 - tanh^2
    of_up.addcmul_(of_up * bounded, bounded, value=-1)
    return slope.mul_(linear_beta).to(gate.dtype), of_up.to(up.dtype)


class KimiK3Activation(nn.Module):
    """The activation of all MLPs of a model: SiTU, or a function of the gate times the up projection."""

    def __init__(self, config: AttnResKimiK3Config):
        super().__init__()
        self.beta, self.linear_beta = config.activation_situ_beta, config.activation_situ_linear_beta
        self.of_gate = None if config.hidden_act == "situ" else ACT2FN[config.hidden_act]

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """Compute `[..., width]` for gate and up projection of that shape."""
        return situ(gate, up, self.beta, self.linear_beta) if self.of_gate is None else self.of_gate(gate) * up


def _for_kimi_linear(config: AttnResKimiK3Config) -> AttnResKimiK3Config:
    """Return the configuration for the modules of Kimi Linear, whose activation is a function of one tensor."""
    config = copy(config)
    config.hidden_act = "silu"
    return config


class KimiK3ForgetGate(kimi_linear.KimiLinearForgetGate):
    """Logarithm of the decay: `L sigmoid(exp(A) (f + b))` with the lower bound L, or Kimi Linear's without one."""

    def __init__(self, config: AttnResKimiK3Config):
        super().__init__(config)
        self.lower_bound = config.gate_lower_bound

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Compute the logarithms `[batch, seq, heads, d_k]` in float32, for `[batch, seq, hidden]`."""
        if self.lower_bound is None:
            return super().forward(hidden_states)
        rate = self.f_b_proj(self.f_a_proj(hidden_states)).float() + self.dt_bias.float()
        rate = rate.unflatten(-1, (-1, self.head_dim)) * self.A_log.float().exp()
        return self.lower_bound * torch.sigmoid(rate)


class _CalledConvolution(nn.Conv1d):
    """A convolution that its owner computes in a call of this module.

    The weight stays in float32. So FSDP2 in 16 bits divides it apart from the other weights of delta attention, and
    gathers it when this module is called.
    """

    def forward(self, compute: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Return what `compute` returns for the other arguments."""
        return compute(*args, **kwargs)


class KimiK3DeltaAttention(DeltaAttention):
    """Delta attention with a bounded decay, and a gate of its output of full rank."""

    def __init__(self, config: AttnResKimiK3Config, layer_idx: int):
        super().__init__(_for_kimi_linear(config), layer_idx)
        self.forget_gate = KimiK3ForgetGate(config)
        self.conv1d.__class__ = _CalledConvolution  # a new module would draw its start a second time
        if config.use_full_rank_gate:
            del self.g_a_proj, self.g_b_proj
            self.g_proj = nn.Linear(config.hidden_size, self.qkv_dim, bias=False)

    def run_convolution(self, function: Callable[..., Tensor], *args: Tensor, **kwargs: Any) -> Tensor:
        """Compute the convolution in a call of its module; see the base class."""
        return self.conv1d(super().run_convolution, function, *args, **kwargs)

    def write_rate(self, hidden_states: Tensor) -> Tensor:
        """Compute `beta` in float32; see the base class."""
        return self.b_proj(hidden_states).float().sigmoid()

    def output_gate(self, hidden_states: Tensor) -> Tensor:
        """Compute the logits of the output's gate; see the base class."""
        return self.g_proj(hidden_states) if hasattr(self, "g_proj") else super().output_gate(hidden_states)


class KimiK3MLP(kimi_linear.KimiLinearMLP):
    """MLP whose activation takes gate and up projection."""

    def __init__(self, config: AttnResKimiK3Config, intermediate_size: int | None = None):
        super().__init__(_for_kimi_linear(config), intermediate_size)
        self.config, self.act_fn = config, KimiK3Activation(config)

    def forward(self, x: Tensor) -> Tensor:
        """Compute `[..., hidden]` for an input of that shape."""
        return self.down_proj(self.act_fn(self.gate_proj(x), self.up_proj(x)))


@use_experts_implementation
class KimiK3Experts(kimi_linear.KimiLinearExperts):
    """Routed experts in the latent space, whose activation takes gate and up projection."""

    def __init__(self, config: AttnResKimiK3Config):
        latent = _for_kimi_linear(config)
        latent.hidden_size = config.routed_expert_hidden_size or config.hidden_size
        super().__init__(latent)
        self.act_fn = KimiK3Activation(config)

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        """Compute the activation `[tokens, width]` for `[tokens, 2 width]`; the implementations of experts call it."""
        return self.act_fn(*gate_up.chunk(2, dim=-1))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute the weighted sum of the chosen experts, one expert after another.

        Args:
            hidden_states: `[tokens, hidden]`.
            top_k_index: `[tokens, top_k]`; `num_experts` stands for an expert on another device.
            top_k_weights: `[tokens, top_k]`.

        Returns:
            `[tokens, hidden]`.
        """
        result = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            if expert == self.num_experts:
                continue
            tokens, choices = torch.where(top_k_index == expert)
            output = self._apply_gate(F.linear(hidden_states[tokens], self.gate_up_proj[expert]))
            output = F.linear(output, self.down_proj[expert]) * top_k_weights[tokens, choices, None]
            result.index_add_(0, tokens, output.to(result.dtype))
        return result


class KimiK3MoE(kimi_linear.KimiLinearMoE):
    """Routed experts in a latent space, beside shared experts in the model's own."""

    def __init__(self, config: AttnResKimiK3Config):
        nn.Module.__init__(self)
        self.config = config
        self.gate = kimi_linear.KimiLinearTopkRouter(config)
        # `transformers` 5.24 makes and saves the weight in float32. In the release it has the dtype of the model.
        self.gate.weight = nn.Parameter(self.gate.weight.to(torch.get_default_dtype()))
        # The released code leaves the weight of a single expert as it is.
        self.gate.norm_topk_prob = config.norm_topk_prob and config.num_experts_per_tok > 1
        self.experts = KimiK3Experts(config)
        width, latent = config.hidden_size, config.routed_expert_hidden_size
        self.is_latent = latent is not None
        if self.is_latent:
            self.routed_expert_down_proj = nn.Linear(width, latent, bias=False)
            self.routed_expert_norm = None
            if config.latent_moe_use_norm:
                self.routed_expert_norm = kimi_linear.KimiLinearRMSNorm(latent, config.rms_norm_eps)
            self.routed_expert_up_proj = nn.Linear(latent, width, bias=False)
        self.shared_experts = None
        if config.n_shared_experts:
            self.shared_experts = KimiK3MLP(config, config.moe_intermediate_size * config.n_shared_experts)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Compute `[batch, seq, hidden]` for an input of that shape."""
        _, weights, experts = self.gate(hidden_states)  # the router sees the model's own space
        routed = self.routed_expert_down_proj(hidden_states) if self.is_latent else hidden_states
        routed = self.experts(routed.flatten(0, -2), experts, weights).view(routed.shape)
        if self.is_latent:
            routed = routed if self.routed_expert_norm is None else self.routed_expert_norm(routed)
            routed = self.routed_expert_up_proj(routed)
        return routed if self.shared_experts is None else routed + self.shared_experts(hidden_states)


class AttnResKimiK3DecoderLayer(AttnResDecoderLayer):
    """Decoder layer of Kimi K3."""

    delta_attention_class = KimiK3DeltaAttention

    def __init__(self, config: AttnResKimiK3Config, layer_idx: int):
        # Not Kimi Linear's `__init__`: it would allocate experts of another size.
        GradientCheckpointingLayer.__init__(self)
        self.hidden_size, self.block_type = config.hidden_size, config.layer_types[layer_idx]
        is_full = self.block_type == "full_attention"
        attention_class = kimi_linear.KimiLinearAttention if is_full else KimiK3DeltaAttention
        self.self_attn = attention_class(config, layer_idx)
        self.mlp = KimiK3MoE(config) if config.mlp_layer_types[layer_idx] == "sparse" else KimiK3MLP(config)
        self.input_layernorm = kimi_linear.KimiLinearRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = kimi_linear.KimiLinearRMSNorm(config.hidden_size, config.rms_norm_eps)


class AttnResKimiK3PreTrainedModel(AttnResPreTrainedModel):
    """Base of the models of Kimi K3: start of its tensors, and the released layout."""

    config: AttnResKimiK3Config
    config_class = AttnResKimiK3Config
    _no_split_modules = ["AttnResKimiK3DecoderLayer"]
    # The tensors that the release stores in float32.
    _keep_in_fp32_modules_strict = ["e_score_correction_bias", "dt_bias", "A_log", "conv1d", "o_norm"]
    auto_classes = {"AutoModel": "AttnResKimiK3Model", "AutoModelForCausalLM": "AttnResKimiK3ForCausalLM"}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, KimiK3ForgetGate) and module.lower_bound is not None:
            # As in flash-linear-attention: the sigmoid takes the place of a rate per head.
            init.zeros_(module.A_log)

    @property
    def _weight_conversions(self) -> list[WeightTransform]:
        """Rules that `save_pretrained` of `transformers` applies in reverse.

        The name is private, but the only place where a model can say in which layout it is to be saved.
        """
        return _layout_rules(self.config, is_decoder=isinstance(self, AttnResKimiK3Model))

    @_weight_conversions.setter
    def _weight_conversions(self, rules: list[WeightTransform]) -> None:
        """Ignore the rules by which `transformers` has loaded: they lack those for names that were right already."""

    @staticmethod
    def _load_pretrained_model(
        model: PreTrainedModel,
        state_dict: Mapping[str, Any] | None,
        checkpoint_files: list[str] | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Check a checkpoint's tensors and decode packed ones, then load as `transformers` does.

        The name is private, but the only place between the files, which may come from the Hub, and the weights.
        """
        with ExitStack() as stack:
            if state_dict is None and checkpoint_files:
                state_dict = {}
                for file in checkpoint_files:
                    if file.endswith(".safetensors"):
                        handle = stack.enter_context(safe_open(file, framework="pt"))
                        state_dict |= {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 (it is no dictionary)
                    else:
                        state_dict |= load_state_dict(file)
            if state_dict is not None:
                state_dict = read_release(model.config, state_dict, not isinstance(model, AttnResKimiK3Model))
                state_dict = _in_form_of_model(model.config, state_dict)
            return PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, *args, **kwargs)


class AttnResKimiK3Model(AttnResKimiK3PreTrainedModel, AttnResModel):
    """Decoder of Kimi K3 without a head."""

    layer_class = AttnResKimiK3DecoderLayer

    def __init__(self, config: AttnResKimiK3Config):
        config.check_fields()
        # Not Kimi Linear's `__init__`, which makes its own layers.
        PreTrainedModel.__init__(self, config)
        padding = config.pad_token_id
        has_padding = padding is not None and 0 <= padding < config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, padding if has_padding else None)
        layers = (AttnResKimiK3DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.layers = nn.ModuleList(layers)
        self.norm = kimi_linear.KimiLinearRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.connect()


class AttnResKimiK3ForCausalLM(AttnResKimiK3PreTrainedModel, AttnResForCausalLM):
    """Language model of Kimi K3.

    ```python
    >>> model = AttnResKimiK3ForCausalLM.from_pretrained(folder)  # a release: composite, or of the text model alone
    >>> model.save_pretrained(out)  # in the same layout
    ```
    """

    model_class = AttnResKimiK3Model

    def __init__(self, config: AttnResKimiK3Config):
        PreTrainedModel.__init__(self, config)
        self.model = AttnResKimiK3Model(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


AttnResKimiK3Config.register_for_auto_class()
for _auto, _name in AttnResKimiK3PreTrainedModel.auto_classes.items():
    globals()[_name].register_for_auto_class(_auto)


# --- Released layout -------------------------------------------------------------------------------------------------

_PREFIX = "language_model."
_EXPERT_WEIGHTS = ("w1", "w2", "w3")
_PACKED, _SCALE = "weight_packed", "weight_scale"
# Endings of the names of tensors that belong to a quantised weight, of any method.
_OF_QUANTIZED = (_PACKED, _SCALE, "weight_shape", "weight_global_scale", "weight_zero_point", "input_global_scale")
_OF_QUANTIZED += ("weight_scale_inv", "input_scale")
# Dtypes by their names in safetensors files; those of weights that are not packed are the floats.
_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.uint8: "U8"}
_FLOATS = ("F64", "F32", "F16", "BF16")
# Parts of the names of tensors that a model has or lacks -> the fields that decide it.
_BY_FIELD = {
    (".self_attn.g_proj.",): "`mla_use_output_gate` and `use_full_rank_gate`",
    (".self_attn.g_a_proj.", ".self_attn.g_b_proj."): "`use_full_rank_gate`",
    (".self_attn.q_proj.", ".self_attn.q_a_", ".self_attn.q_b_proj."): "`q_lora_rank`",
    (".routed_expert_down_proj.", ".routed_expert_up_proj."): "`routed_expert_hidden_size`",
    (".routed_expert_norm.",): "`latent_moe_use_norm`",
    (".shared_experts.",): "`num_shared_experts`",
    ("_res_proj.", "_res_norm."): "`attn_res_block_size`",
}
# Number of weights that share a scale.
_GROUP = 32
# Code of the largest scale, 2^125: with the next one a 6 is beyond bfloat16. 255 is the code of NaN.
_LARGEST_SCALE = 252
_HALVES = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]) / 2  # E2M1; bit 3 is the sign


def decode_mxfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """Decode MXFP4 exactly.

    Args:
        packed: `[out, in / 2]` uint8, two numbers of four bits each; the low bits are the even column.
        scale: `[out, in / 32]` uint8, exponents plus 127.

    Returns:
        `[out, in]` in bfloat16, which holds each of the products.
    """
    values = _HALVES.to(device=packed.device, dtype=torch.bfloat16)
    values[8] = -0.0
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), -1)  # by byte: (low bits, high bits)
    numbers = pairs.index_select(0, packed.flatten().int()).view(packed.shape[0], -1)  # (out, in)
    # The bits of the power of two as a float32; exponent 0 stands for the denormal 2^-127.
    powers = scale.int() << 23
    powers = powers.masked_fill_(scale == 0, 1 << 22).view(torch.float32).to(torch.bfloat16)
    return (numbers.unflatten(1, (-1, _GROUP)) * powers.unsqueeze(-1)).flatten(1)


def check_scales(subject: str, scale: Tensor) -> None:
    """Raise `ValueError` if uint8 scales of MXFP4 hold the code of NaN, or one whose weights bfloat16 cannot hold.

    Args:
        subject: the tensor, for the message.
        scale: the scales, of any shape.
    """
    if scale.numel() and scale.max() > _LARGEST_SCALE:
        raise ValueError(f"{subject} holds a scale of NaN or beyond bfloat16. Copy the file again.")


class _Packed:
    """A packed weight that is decoded when it is read, so that no more than the loaded model is in memory.

    It stands in place of a slice of a safetensors file.
    """

    def __init__(self, name: str, packed: Any, scale: Any):
        self.name, self.packed, self.scale = name, packed, scale

    def __getitem__(self, index: Any) -> Tensor:
        scale = self.scale[...]
        check_scales(f"`{self.name}.{_SCALE}`", scale)
        return decode_mxfp4(self.packed[...], scale)[index]

    def get_shape(self) -> list[int]:
        """Return the shape of the decoded weight."""
        rows, columns = shape_of(self.packed)
        return [rows, 2 * columns]

    def get_dtype(self) -> str:
        """Return the dtype of the decoded weight, as a safetensors file names it."""
        return "BF16"


def shape_of(tensor: Any) -> tuple[int, ...]:
    """Return the shape of a tensor, or of a slice of a safetensors file."""
    return tuple(tensor.get_shape() if hasattr(tensor, "get_shape") else tensor.shape)


def _dtype_of(tensor: Any) -> str:
    """Return the dtype of a tensor, or of a slice of a safetensors file, by the name that such a file has for it."""
    return tensor.get_dtype() if hasattr(tensor, "get_dtype") else _DTYPES.get(tensor.dtype, str(tensor.dtype))


def released_shapes(config: AttnResKimiK3Config) -> dict[str, tuple[int, ...]]:
    """Return the tensors of the text model by their released names without prefix, and their shapes.

    The heads of `A_log` are not padded. Experts are not packed.
    """
    hidden, vocab, heads = config.hidden_size, config.vocab_size, config.num_attention_heads
    kda_heads, kda_dim = config.linear_num_heads, config.linear_head_dim
    kda_width, nope, rope = kda_heads * kda_dim, config.qk_nope_head_dim, config.qk_rope_head_dim
    value_width, kv_rank, q_rank = heads * config.v_head_dim, config.kv_lora_rank, config.q_lora_rank
    latent, expert_width = config.routed_expert_hidden_size or hidden, config.moe_intermediate_size

    def mlp(owner: str, width: int) -> dict[str, tuple[int, ...]]:
        shapes = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
        return {f"{owner}.{name}.weight": shape for name, shape in shapes.items()}

    shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    has_res = config.residual_connection == "attn_res"
    for i, (attention, kind) in enumerate(zip(config.layer_types, config.mlp_layer_types)):
        layer, owner = f"model.layers.{i}.", f"model.layers.{i}.self_attn."
        shapes |= {f"{layer}{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        for name in ("self_attention_res", "mlp_res") if has_res else ():
            shapes |= {f"{layer}{name}_proj.weight": (1, hidden), f"{layer}{name}_norm.weight": (hidden,)}
        if attention == "linear_attention":
            for name in "qkv":
                shapes[f"{owner}{name}_proj.weight"] = (kda_width, hidden)
                shapes[f"{owner}{name}_conv1d.weight"] = (kda_width, 1, config.linear_conv_kernel_dim)
            shapes |= {f"{owner}f_a_proj.weight": (kda_dim, hidden), f"{owner}f_b_proj.weight": (kda_width, kda_dim)}
            shapes |= {f"{owner}A_log": (kda_heads,), f"{owner}dt_bias": (kda_width,)}
            shapes |= {f"{owner}b_proj.weight": (kda_heads, hidden), f"{owner}o_norm.weight": (kda_dim,)}
            if config.use_full_rank_gate:
                shapes[f"{owner}g_proj.weight"] = (kda_width, hidden)
            else:
                shapes |= {f"{owner}g_a_proj.weight": (kda_dim, hidden)}
                shapes |= {f"{owner}g_b_proj.weight": (kda_width, kda_dim)}
            shapes[f"{owner}o_proj.weight"] = (hidden, kda_width)
        else:
            if q_rank is None:
                shapes[f"{owner}q_proj.weight"] = (heads * (nope + rope), hidden)
            else:
                shapes |= {f"{owner}q_a_proj.weight": (q_rank, hidden), f"{owner}q_a_layernorm.weight": (q_rank,)}
                shapes[f"{owner}q_b_proj.weight"] = (heads * (nope + rope), q_rank)
            shapes[f"{owner}kv_a_proj_with_mqa.weight"] = (kv_rank + rope, hidden)
            shapes[f"{owner}kv_a_layernorm.weight"] = (kv_rank,)
            shapes[f"{owner}kv_b_proj.weight"] = (heads * nope + value_width, kv_rank)
            shapes[f"{owner}o_proj.weight"] = (hidden, value_width)
            if config.mla_use_output_gate:
                shapes[f"{owner}g_proj.weight"] = (value_width, hidden)
            if config.attention_bias:
                shapes |= {f"{owner}kv_a_proj_with_mqa.bias": (kv_rank + rope,), f"{owner}o_proj.bias": (hidden,)}
                shapes |= {} if q_rank is None else {f"{owner}q_a_proj.bias": (q_rank,)}
        if kind == "dense":
            shapes |= mlp(f"{layer}mlp", config.intermediate_size)
            continue
        moe = f"{layer}block_sparse_moe."
        shapes[f"{moe}gate.weight"] = (config.num_local_experts, hidden)
        shapes[f"{moe}gate.e_score_correction_bias"] = (config.num_local_experts,)
        if config.routed_expert_hidden_size is not None:
            shapes[f"{moe}routed_expert_down_proj.weight"] = (latent, hidden)
            shapes |= {f"{moe}routed_expert_norm.weight": (latent,)} if config.latent_moe_use_norm else {}
            shapes[f"{moe}routed_expert_up_proj.weight"] = (hidden, latent)
        if config.n_shared_experts:
            shapes |= mlp(f"{moe}shared_experts", expert_width * config.n_shared_experts)
        for expert in range(config.num_local_experts):
            for name in _EXPERT_WEIGHTS:
                shape = (latent, expert_width) if name == "w2" else (expert_width, latent)
                shapes[f"{moe}experts.{expert}.{name}.weight"] = shape
    if has_res:
        shapes |= {"model.output_attn_res_proj.weight": (1, hidden), "model.output_attn_res_norm.weight": (hidden,)}
    shapes["model.norm.weight"] = (hidden,)
    return shapes if config.tie_word_embeddings else shapes | {"lm_head.weight": (vocab, hidden)}


def _in_words(names: Iterable[str], limit: int = 3) -> str:
    """Return the first of some names and the number of the others: "`a`, `b` and 5 more"."""
    names = sorted(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(f"`{name}`" for name in names[:limit]) + more


def read_release(config: AttnResKimiK3Config, tensors: Mapping[str, Any], has_head: bool = True) -> dict[str, Any]:
    """Return the text model's tensors of a released checkpoint, checked, with packed experts in decoded form.

    Tensors of a vision part and layers beyond the last one, of multi-token prediction, are left out and named once.
    Tensors under the model's own names, as `Trainer` saves them in its checkpoints, are returned as they are.

    Args:
        config: the model's configuration. The shape of the checkpoint's `A_log` is noted there, for saving.
        tensors: tensors, or slices of safetensors files, by name.
        has_head: whether `lm_head` is needed, too.

    Raises:
        ValueError: a tensor is missing, has another shape or dtype than it must have, or is packed where no rule
            covers it; padding of `A_log` is not zero.
    """
    if any(".forget_gate." in name or name.endswith(".experts.gate_up_proj") for name in tensors):
        return dict(tensors)
    prefix = _PREFIX if any(name.startswith(_PREFIX) for name in tensors) else ""
    text = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    left_out: dict[str, int] = {}
    for name in tensors.keys() - {prefix + name for name in text}:
        part = f"{name.partition('.')[0]}.*"
        left_out[part] = left_out.get(part, 0) + 1
    for name in [*text]:
        layer = name.removeprefix("model.layers.").partition(".")[0] if name.startswith("model.layers.") else ""
        if layer.isdecimal() and int(layer) >= config.num_hidden_layers:
            del text[name]
            part = f"{prefix}model.layers.{layer}.* (beyond the last layer)"
            left_out[part] = left_out.get(part, 0) + 1
    if left_out:
        parts = ", ".join(f"{part}: {count} tensors" for part, count in sorted(left_out.items()))
        logger.warning(f"Left out of the checkpoint, because the text model has no such part: {parts}.")

    shapes = released_shapes(config)
    if not has_head:
        shapes.pop("lm_head.weight", None)
    missing, result = [], {}
    for name, shape in shapes.items():
        if ".experts." in name and f"{name}_packed" in text:
            if name in text:
                raise ValueError(
                    f"the checkpoint holds both `{prefix}{name}` and `{prefix}{name}_packed`. Remove one of them."
                )
            result[name] = _unpack(name.removesuffix(".weight"), shape, text, prefix)
        elif name in text:
            tensor = result[name] = text.pop(name)
            if _dtype_of(tensor) not in _FLOATS:
                raise ValueError(
                    f"`{prefix}{name}` has the dtype {_dtype_of(tensor)}, but must have one of {', '.join(_FLOATS)}. "
                    "Only the weights of routed experts may be packed."
                )
            if name.endswith(".A_log"):
                _check_heads(prefix + name, tensor, shape[0], config)
            elif shape_of(tensor) != shape:
                raise ValueError(
                    f"`{prefix}{name}` has the shape {list(shape_of(tensor))}, but must have {list(shape)}. Use the "
                    "checkpoint's own config.json."
                )
        elif name.startswith("model.layers.0.self_attention_res_"):
            # The first layer reads the embedding alone, and some programs omit its pair.
            result[name] = torch.zeros(shape) if "_proj" in name else torch.ones(shape)
        else:
            missing.append(prefix + name)
    packed = [prefix + name for name in text if name.endswith(_OF_QUANTIZED)]
    if packed:
        raise ValueError(
            f"the checkpoint holds quantised tensors that no rule covers: {_in_words(packed)}. Only the weights of "
            "routed experts may be packed, each with its scale."
        )
    if missing:
        raise ValueError(f"the checkpoint lacks {_in_words(missing)}. Copy all of its files.")
    experts = [prefix + name for name in text if ".experts." in name]
    if experts:
        raise ValueError(
            f"the checkpoint holds {_in_words(experts)}, but `num_experts` of its config.json is "
            f"{config.num_local_experts}. Use the checkpoint's own config.json."
        )
    _warn_of_unread(text, config, prefix)
    return result | text  # of the others `transformers` says that they are not used


def _warn_of_unread(names: Iterable[str], config: AttnResKimiK3Config, prefix: str) -> None:
    """Warn of tensors that the model would read if a field of its configuration had another value."""
    for ends, fields in _BY_FIELD.items():
        unread = [prefix + name for name in names if any(end in name for end in ends)]
        # With other connections it is known that these are not read.
        if unread and ("attn_res_block_size" not in fields or config.attn_res_block_size is None):
            message = (
                f"the checkpoint holds {_in_words(unread)}, but the model does not read them by its {fields}. If you "
                "did not intend that, use the checkpoint's own config.json."
            )
            warnings.warn(message, FamilyWarning, stacklevel=3)


def _in_form_of_model(config: AttnResKimiK3Config, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of a release with the convolutions of each layer joined, and `A_log` without its padding.

    The rules of `transformers` do so too late: it divides tensors among processes before a rule sees them, so that each
    process would join or unpad the parts that it has, which are not its part of the result.
    """
    result, heads = dict(tensors), config.linear_num_heads
    for name in tensors:
        owner, _, end = name.rpartition("self_attn.")
        owner += "self_attn."
        if end == "A_log":
            result[f"{owner}forget_gate.A_log"] = result.pop(name)[...].flatten()[:heads].view(1, 1, heads, 1)
        elif end == "q_conv1d.weight":
            parts = [result.pop(f"{owner}{x}_conv1d.weight")[...] for x in "qkv"]
            result[f"{owner}conv1d.weight"] = torch.cat(parts)
    return result


def _unpack(owner: str, shape: tuple[int, ...], text: dict[str, Any], prefix: str) -> _Packed:
    """Take a packed weight and its scale from `text`, check both, and return the weight."""
    tensors: dict[str, Any] = {}
    groups = math.ceil(shape[1] / _GROUP)
    for part, columns in ((_PACKED, shape[1] // 2), (_SCALE, groups)):
        name, must = f"{owner}.{part}", [shape[0], columns]
        if name not in text:
            raise ValueError(f"the checkpoint lacks `{prefix}{name}`, the scale of a packed weight. Copy all files.")
        tensors[part] = text.pop(name)
        has = list(shape_of(tensors[part]))
        dtype = _dtype_of(tensors[part])
        if dtype != "U8" or has != must or shape[1] % _GROUP:
            raise ValueError(
                f"`{prefix}{name}` has the shape {has} and the dtype {dtype}, but must have {must} and U8, that is "
                f"uint8: MXFP4 has two weights in a byte, and {_GROUP} share a scale."
            )
    return _Packed(f"{prefix}{owner}", packed=tensors[_PACKED], scale=tensors[_SCALE])


def _check_heads(name: str, tensor: Any, heads: int, config: AttnResKimiK3Config) -> None:
    """Check that an `A_log` holds all heads, and zeros beyond them; note its shape in the configuration."""
    shape = list(shape_of(tensor))
    if math.prod(shape) < heads:
        raise ValueError(f"`{name}` has {math.prod(shape)} entries, but must have at least {heads}, one for each head.")
    padding = tensor[...].flatten()[heads:]
    if padding.count_nonzero():
        raise ValueError(f"`{name}` has {heads} heads, but is not zero beyond them. `num_heads` may be wrong.")
    config.stored_A_log_shape = shape


class _LiveHeads(ConversionOps):
    """Take the heads of `A_log` from its padded form; in reverse, pad them."""

    def convert(self, input_dict: dict[str, Any], target_patterns: list[str], config: Any, **kwargs: Any) -> dict:
        """Return the only tensor as `[1, 1, heads, 1]`."""
        (tensor,) = (value[0] if isinstance(value, list) else value for value in input_dict.values())
        heads = config.linear_num_heads
        return {target_patterns[0]: tensor.flatten()[:heads].view(1, 1, heads, 1)}

    @property
    def reverse_op(self) -> ConversionOps:
        """The operation that pads."""
        return _PaddedHeads()


class _PaddedHeads(ConversionOps):
    """Pad the heads of `A_log` with zeros to the shape that the checkpoint had, by default to a multiple of 128."""

    def convert(self, input_dict: dict[str, Any], target_patterns: list[str], config: Any, **kwargs: Any) -> dict:
        """Return the only tensor in its stored shape."""
        (tensor,) = (value[0] if isinstance(value, list) else value for value in input_dict.values())
        tensor = tensor.flatten()
        shape = config.stored_A_log_shape or [128 * math.ceil(len(tensor) / 128)]
        return {target_patterns[0]: F.pad(tensor, (0, math.prod(shape) - len(tensor))).view(shape)}

    @property
    def reverse_op(self) -> ConversionOps:
        """The operation that removes the padding."""
        return _LiveHeads()


def _layout_rules(config: AttnResKimiK3Config | None = None, is_decoder: bool = False) -> list[WeightTransform]:
    """Return the rules from released names to the model's.

    Args:
        config: the configuration of a model to save; `None` for the rules of loading, which take every layout.
        is_decoder: whether the model to save is the decoder without a head.
    """
    rules: list[WeightTransform] = []
    is_composite = config is None or config.checkpoint_layout == COMPOSITE
    if is_decoder:
        rules.append(WeightRenaming(r"^language_model\.model\." if is_composite else r"^model\.", "^"))
    elif is_composite:
        # `transformers` applies the rules in reverse when it saves, so the prefix is the last to be added.
        rules += [WeightRenaming(rf"^language_model\.{part}\.", rf"^{part}\.") for part in ("model", "lm_head")]
    # On saving, `.mlp.` becomes `.block_sparse_moe.` everywhere; these restore the name of a dense MLP.
    rules += [
        WeightRenaming(rf"\.mlp\.{part}\.", rf"\.block_sparse_moe\.{part}\.")
        for part in ("gate_proj", "up_proj", "down_proj")
    ]
    rules.append(WeightRenaming(r"\.block_sparse_moe\.", r"\.mlp\."))
    rules += [
        WeightRenaming(rf"self_attn\.{part}", rf"self_attn\.forget_gate\.{part}")
        for part in (r"f_a_proj\.", r"f_b_proj\.", "dt_bias")
    ]
    convolutions = [f"self_attn.{name}_conv1d.weight" for name in "qkv"]
    rules += [
        WeightConverter("self_attn.A_log", "self_attn.forget_gate.A_log", [_LiveHeads()]),
        WeightConverter(convolutions, "self_attn.conv1d.weight", [Concatenate(dim=0)]),
        WeightConverter(
            [r"\.experts.*.w1.weight", r"\.experts.*.w3.weight"],
            r"\.experts.gate_up_proj",
            [MergeModulelist(dim=0), Concatenate(dim=1)],
        ),
        WeightConverter(r"\.experts.*.w2.weight", r"\.experts.down_proj", [MergeModulelist(dim=0)]),
    ]
    return rules


# A later `transformers` may know the model type, and have rules of its own for it.
IS_KNOWN = AttnResKimiK3Config.model_type in CONFIG_MAPPING_NAMES
for _key in AttnResKimiK3PreTrainedModel.auto_classes.values() if IS_KNOWN else (AttnResKimiK3Config.model_type,):
    # `overwrite`: beside an installed `attnres`, remote code registers the same mapping a second time.
    conversion_mapping.register_checkpoint_conversion_mapping(_key, _layout_rules(), overwrite=True)
