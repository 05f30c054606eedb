"""AttnRes on a Kimi Linear backbone. What differs from `transformers`' Kimi Linear:

- each sublayer (attention, MLP) reads its input from the depth state and writes its output to it (`residual_attnres`);
- the final norm reads the aggregate over all blocks and the last partial sum, with a pseudo-query of its own;
- the delta attention is an exact and faster one where no GPU kernel applies (`kda_attnres`);
- the published layout of Kimi Linear checkpoints loads and is written.

How, for this and any other backbone, stands in `decoder_attnres`. The experts are Kimi Linear's; tools that look in
this file for the name of their decorator, `@use_experts_implementation`, find it here.
"""

from torch import Tensor, nn
from transformers.conversion_mapping import (
    WeightRenaming,
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.models.kimi_linear.modeling_kimi_linear import (
    KimiLinearDecoderLayer,
    KimiLinearForCausalLM,
    KimiLinearModel,
    KimiLinearPreTrainedModel,
)

from .configuration_attnres import AttnResConfig
from .decoder_attnres import (
    ResidualDecoderLayer,
    ResidualForCausalLM,
    ResidualForSequenceClassification,
    ResidualModel,
    ResidualPreTrainedModel,
)
from .kda_attnres import AttnResDeltaAttention
from .sublayers_attnres import Sublayers


class AttnResDecoderLayer(ResidualDecoderLayer, KimiLinearDecoderLayer):
    """Attention and MLP of Kimi Linear, each behind a residual connection."""

    def connect(self, config: AttnResConfig, sublayers: Sublayers, layer_idx: int) -> None:
        super().connect(config, sublayers, layer_idx)
        if self.block_type != "full_attention":
            self.self_attn.__class__ = AttnResDeltaAttention  # the same weights, faster where there is no GPU kernel

    def attend(self, attention: nn.Module, hidden_states: Tensor, **kwargs) -> Tensor:
        if self.block_type == "full_attention":
            return super().attend(attention, hidden_states, **kwargs)
        # KDA takes its cache under another name, needs no positions, and returns the output alone.
        cache = kwargs.pop("past_key_values", None)
        kwargs = {name: value for name, value in kwargs.items() if name not in ("position_ids", "use_cache")}
        return attention(hidden_states, cache_params=cache, **kwargs)


class AttnResPreTrainedModel(ResidualPreTrainedModel, KimiLinearPreTrainedModel):
    config: AttnResConfig
    _no_split_modules = ["AttnResDecoderLayer"]
    auto_classes = {
        "AutoModel": "AttnResModel",
        "AutoModelForCausalLM": "AttnResForCausalLM",
        "AutoModelForSequenceClassification": "AttnResForSequenceClassification",
    }


class AttnResModel(ResidualModel, AttnResPreTrainedModel, KimiLinearModel):
    """Kimi Linear's decoder with residual connections through the depth."""

    layer_class = AttnResDecoderLayer


class AttnResForCausalLM(ResidualForCausalLM, AttnResPreTrainedModel, KimiLinearForCausalLM):
    """Kimi Linear with residual connections through the depth, and a language modelling head."""

    model_class = AttnResModel
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}


class AttnResForSequenceClassification(ResidualForSequenceClassification, AttnResPreTrainedModel):
    """Kimi Linear with residual connections through the depth, and a classification head."""

    model_class = AttnResModel


# Marks the classes as ones whose code `save_pretrained` writes beside the weights.
AttnResConfig.register_for_auto_class()
for _auto_class, _name in AttnResPreTrainedModel.auto_classes.items():
    globals()[_name].register_for_auto_class(_auto_class)
# The published Kimi Linear layout loads and is written. `transformers`' mapping for it reads that layout, but writes a
# dense MLP as `block_sparse_moe` too. Reversed, on saving, these come last and give that one its published name; on
# loading they cancel out, and both names load.
_DENSE_MLP = [
    WeightRenaming(source_patterns=rf"\.mlp\.{part}\.", target_patterns=rf"\.block_sparse_moe\.{part}\.")
    for part in ("gate_proj", "up_proj", "down_proj")
]
_LAYOUT = _DENSE_MLP + get_checkpoint_conversion_mapping("kimi_linear")
# Loaded as remote code beside an installed `attnres`, this file runs twice, with the same mapping.
register_checkpoint_conversion_mapping(AttnResConfig.model_type, _LAYOUT, overwrite=True)

__all__ = ["AttnResForCausalLM", "AttnResForSequenceClassification", "AttnResModel", "AttnResPreTrainedModel"]
