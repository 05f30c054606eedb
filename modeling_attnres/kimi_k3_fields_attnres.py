"""The fields of Kimi K3 in a released `config.json`: their names there and here, and the forms of their values."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from .kimi_k3_packed_attnres import PACKINGS
from .residual_attnres import is_count, one_of, require_value


class ReleasedField(NamedTuple):
    """A field of the text model in a released `config.json`."""

    released: str
    """Its name in the file; a dot leads into an object."""
    name: str
    """Its name in the configuration here."""
    absent: Any = ...
    """The value where the file lacks the field, as in the released class: the feature is off. `...`: the default."""
    null: Any = ...
    """The value that null stands for; with `None`, null is also written. `...`: the field is left out of the file."""


LINEAR = "linear_attn_config"
# Fields with one name, whose default holds where a file lacks them.
_SAME = (
    "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "initializer_range",
    "max_position_embeddings", "num_attention_heads", "num_key_value_heads", "kv_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim", "mla_use_nope", "attention_bias", "attention_dropout", "moe_intermediate_size",
    "moe_layer_freq", "moe_router_activation_func", "topk_method", "use_grouped_topk", "topk_group",
    "routed_scaling_factor", "num_nextn_predict_layers", "tie_word_embeddings", "use_cache", "bos_token_id",
    "eos_token_id", "pad_token_id",
)  # fmt: skip
FIELDS = (
    *(ReleasedField(name, name) for name in _SAME),
    ReleasedField("hidden_act", "hidden_act", absent="silu"),
    ReleasedField("activation_situ_beta", "activation_situ_beta", absent=None),
    ReleasedField("activation_situ_linear_beta", "activation_situ_linear_beta", absent=None),
    ReleasedField("rms_norm_eps", "rms_norm_eps", absent=1e-6),
    ReleasedField("q_lora_rank", "q_lora_rank", absent=None, null=None),
    ReleasedField("mla_use_output_gate", "mla_use_output_gate", absent=False),
    ReleasedField("linear_attn_config.num_heads", "linear_num_heads"),
    ReleasedField("linear_attn_config.head_dim", "linear_head_dim"),
    ReleasedField("linear_attn_config.short_conv_kernel_size", "linear_conv_kernel_dim"),
    ReleasedField("linear_attn_config.gate_lower_bound", "gate_lower_bound", absent=None),
    ReleasedField("linear_attn_config.use_full_rank_gate", "use_full_rank_gate", absent=False),
    ReleasedField("num_experts", "num_local_experts", absent=None, null=None),
    ReleasedField("num_experts_per_token", "num_experts_per_tok"),
    ReleasedField("num_shared_experts", "n_shared_experts", absent=0, null=0),
    ReleasedField("routed_expert_hidden_size", "routed_expert_hidden_size", absent=None),
    ReleasedField("latent_moe_use_norm", "latent_moe_use_norm", absent=False),
    ReleasedField("first_k_dense_replace", "first_k_dense_replace", absent=0),
    ReleasedField("moe_renormalize", "norm_topk_prob"),
    ReleasedField("num_expert_group", "n_group"),
    ReleasedField("attn_res_block_size", "attn_res_block_size", absent=None),
)
NAMES = {field.released: field.name for field in FIELDS}
LAYER_LISTS = {"full_attn_layers": "full_attention", "kda_layers": "linear_attention"}
# Fields of SiTU. With another activation they are null.
OF_SITU = ("activation_situ_beta", "activation_situ_linear_beta")
# Fields that are true or false. `transformers` does not check the types of fields that Kimi Linear does not have.
FLAGS = ("mla_use_output_gate", "use_full_rank_gate", "latent_moe_use_norm")
# Fields that are not in this class and have no effect: releases, older releases of the same authors or `transformers`
# have them, and this model needs no such number. Any other field that is not off is refused.
WITHOUT_EFFECT = (
    "aux_loss_alpha", "ep_size", "head_dim", "model_max_length", "pretraining_tp",
    "rope_parameters", "rope_scaling", "rope_theta", "seq_aux", "qk_head_dim", "output_router_logits",
    "_name_or_path", "attn_implementation", "experts_implementation", "name_or_path", "num_labels", "torch_dtype",
    "output_attentions", "pruned_heads", "torchscript", "use_bfloat16", "tf_legacy_loss", "return_dict",
    "add_cross_attention", "cross_attention_hidden_size", "is_decoder", "tie_encoder_decoder",
    "distributed_config",  # an object that `transformers` sets on the configuration of a sharded model
)  # fmt: skip
# Fields that describe the file, not the model.
OF_FILE = ("architectures", "auto_map", "model_type", "quantization_config", "transformers_version")
# Fields that name code. A saved model refers to the code of this package alone.
OF_CODE = ("auto_map", "custom_pipelines", "custom_generate")
QUANTIZATION = "quantization_config"


def quantization_of(objects: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the field `stored_quantization` for the objects of a file, by name; nothing where none is quantised."""
    stored = {name: fields.get(QUANTIZATION) for name, fields in objects.items()}
    stored = {name: as_object(QUANTIZATION, value) for name, value in stored.items() if value}
    for value in stored.values():
        # Activations are not quantised here, and the scales that this needs are not kept.
        groups = as_object("config_groups", value.get("config_groups"))
        if any(isinstance(group, Mapping) and group.get("input_activations") for group in groups.values()):
            value["config_groups"] = {name: {**group, "input_activations": None} for name, group in groups.items()}
    return {"stored_quantization": stored} if stored else {}


def gate_of_family(has_output_gate: bool) -> str | None:
    """Return the family's `attention_gate` that the released `mla_use_output_gate` stands for."""
    return "sdpa" if has_output_gate else None


def check_without_situ(fields: Mapping[str, Any]) -> None:
    """Raise `ValueError` if fields with another activation than SiTU have bounds of SiTU, which it would ignore."""
    for name in OF_SITU:
        allowed = f"null where `hidden_act` is {fields['hidden_act']!r}, or `hidden_act` must be 'situ'"
        require_value(name, fields[name], fields[name] is None, allowed)


def fields_without_experts(num_layers: int) -> dict[str, int]:
    """Return fields of a release without experts. They have no effect here, but llama.cpp refuses other values."""
    return {"num_experts_per_token": 0, "first_k_dense_replace": num_layers}


def as_object(name: str, value: Any) -> dict[str, Any]:
    """Return the fields of an object in a `config.json`, none for null.

    Raises:
        ValueError: the value is no object.
    """
    if value is None:
        return {}
    if isinstance(value, PreTrainedConfig) or hasattr(value, "to_dict"):
        return value.to_dict()
    require_value(name, value, isinstance(value, Mapping), "an object with fields")
    return dict(value)


def layer_types_of(lists: Mapping[str, Collection[int]], layers: int) -> list[str]:
    """Return the kind of each layer, of the released lists of layers that count from 1.

    Raises:
        ValueError: a layer is in both lists or in none, or there is no such layer.
    """
    require_value("num_hidden_layers", layers, is_count(layers), "an integer >= 1")
    kinds: dict[int, str] = {}
    one, other = (f"`{name}`" for name in LAYER_LISTS)
    for name, numbers in lists.items():
        require_value(name, numbers, isinstance(numbers, list | tuple), "a list of layers, which count from 1")
        for number in numbers:
            if not is_count(number) or number > layers:
                raise ValueError(f"`{name}` has the layer {number!r}, but layers must count from 1 to {layers}.")
            if kinds.setdefault(number, LAYER_LISTS[name]) != LAYER_LISTS[name]:
                raise ValueError(f"layer {number} is in both {one} and {other}, but must be in one of them.")
    # One at a time: a number of layers in a file may be huge.
    missing = next((number for number in range(1, layers + 1) if number not in kinds), None)
    if missing is not None:
        raise ValueError(
            f"layer {missing} is in neither {one} nor {other}. Together they must hold all {layers} layers."
        )
    return [kinds[number] for number in range(1, layers + 1)]


def check_quantization(stored: Mapping[str, Mapping[str, Any]] | None) -> None:
    """Raise `ValueError` if a checkpoint is quantised in another way than those that are read here."""
    for fields in (stored or {}).values():
        if fields.get("format") not in [*PACKINGS]:  # a list, since the value may be an object
            method = fields.get("format") or fields.get("quant_method")
            titles = " or ".join(packing.title for packing in PACKINGS.values())
            raise ValueError(
                f"`{QUANTIZATION}` has the format {method!r}, but must be {one_of(PACKINGS)}. Use a checkpoint in "
                f"bfloat16 or {titles}."
            )
