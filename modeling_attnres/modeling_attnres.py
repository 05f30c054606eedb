"""AttnRes on a Kimi Linear backbone. What differs from `transformers`' Kimi Linear:

- each sublayer (attention, MLP) reads its input from the depth state and writes its output to it (`residual_attnres`);
- the final norm reads the aggregate over all blocks and the last partial sum, with a pseudo-query of its own;
- the state passes through the decoder layers in place of `hidden_states`: one explicit value, no hooks;
- `output_hidden_states` records what each layer reads, `output_depth_attentions` the weights of every aggregation.

The files of this folder travel with the weights, so they need only `torch` and `transformers`, and import each other by
single-dot relative imports.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.conversion_mapping import (
    WeightRenaming,
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.models.kimi_linear.modeling_kimi_linear import (
    KimiLinearAttention,
    KimiLinearDecoderLayer,
    KimiLinearForCausalLM,
    KimiLinearModel,
    KimiLinearPreTrainedModel,
    KimiLinearRMSNorm,
    KimiLinearTopkRouter,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.output_capturing import OutputRecorder

from .configuration_attnres import AttnResConfig
from .loading_attnres import check_attn_res_tensors, check_shapes, explain_broken_shard
from .residual_attnres import AttnRes, DepthState, ResidualConnection, ResidualNorm, add_residual_connection


@dataclass
class AttnResCausalLMOutputWithPast(MoeCausalLMOutputWithPast):
    """Adds `depth_attentions`: for each sublayer in turn and then the output, the weights `[sources, batch, seq]`."""

    depth_attentions: tuple[torch.Tensor, ...] | None = None


class AttnResDecoderLayer(KimiLinearDecoderLayer):
    """Attention and MLP of Kimi Linear, each behind a residual connection. Written once for every connection."""

    def __init__(self, config: AttnResConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.is_last = layer_idx == config.num_hidden_layers - 1
        add_residual_connection(self, "self_attention_res", config, sublayer=2 * layer_idx)
        add_residual_connection(self, "mlp_res", config, sublayer=2 * layer_idx + 1)

    def forward(
        self,
        hidden_states: DepthState,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = False,
        read_output: Callable[[DepthState], torch.Tensor] | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> DepthState:
        """State in, state out; the last layer returns what `read_output` makes of the state, if given."""
        state = hidden_states
        attn_input, _ = self.self_attention_res_proj(state, self.self_attention_res_norm())
        attn_input = self.input_layernorm(attn_input)
        if self.block_type == "linear_attention":
            attn_output = self.self_attn(
                hidden_states=attn_input, cache_params=past_key_values, attention_mask=attention_mask, **kwargs
            )
        else:
            attn_output, _ = self.self_attn(
                hidden_states=attn_input,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                **kwargs,
            )
        state = self.self_attention_res_proj.write(state, attn_output)

        mlp_input, _ = self.mlp_res_proj(state, self.mlp_res_norm())
        mlp_output = self.mlp(self.post_attention_layernorm(mlp_input))
        state = self.mlp_res_proj.write(state, mlp_output)
        return read_output(state) if self.is_last and read_output is not None else state


class AttnResPreTrainedModel(KimiLinearPreTrainedModel):
    config: AttnResConfig
    _no_split_modules = ["AttnResDecoderLayer"]
    _can_record_outputs = {
        "router_logits": OutputRecorder(KimiLinearTopkRouter, index=0),
        # The input of every decoder layer, then that of the final norm (whose output takes the place of the latter).
        "hidden_states": [
            OutputRecorder(
                ResidualConnection, index=0, layer_name="self_attention_res_proj", capture_initial_hidden_state=False
            ),
            OutputRecorder(
                ResidualConnection, index=0, layer_name="output_attn_res_proj", capture_initial_hidden_state=False
            ),
        ],
        "attentions": KimiLinearAttention,
        "depth_attentions": OutputRecorder(ResidualConnection, index=1),
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, AttnRes):
            init.zeros_(module.weight)  # uniform depth weights
        elif isinstance(module, ResidualNorm) and module.weight is not None:
            init.ones_(module.weight)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # `transformers` looks for the decorator `@use_experts_implementation` in this file. The experts of the family
        # are Kimi Linear's, which carry it in theirs.
        return True

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
        """As in `transformers`; checkpoints without any AttnRes tensor (Kimi Linear) load with those initialised.

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

    def save_pretrained(self, save_directory, **kwargs):
        # The code travels with the weights: every head of the family loads from it, not only the one that is saved.
        self.config.auto_map = {"AutoConfig": f"configuration_attnres.{AttnResConfig.__name__}"} | {
            auto_class: f"modeling_attnres.{model_class.__name__}" for auto_class, model_class in AUTO_CLASSES.items()
        }
        super().save_pretrained(save_directory, **kwargs)


class AttnResModel(AttnResPreTrainedModel, KimiLinearModel):
    """Kimi Linear's decoder with residual connections through the depth; see the module docstring."""

    def __init__(self, config: AttnResConfig):
        config.check_fields()
        super(KimiLinearModel, self).__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList([AttnResDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = KimiLinearRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        add_residual_connection(self, "output_attn_res", config, sublayer=2 * config.num_hidden_layers)
        self.gradient_checkpointing = False
        self.post_init()

    @wraps(KimiLinearModel.forward)
    def forward(self, *args, **kwargs):
        # Kimi Linear's own loop runs the layers. Between the last of them and the final norm the output is read, which
        # needs tensors of this model: the last layer is told how.
        return super().forward(*args, read_output=self._read_output, **kwargs)

    def _read_output(self, state: DepthState) -> torch.Tensor:
        """The input of the final norm `[batch, seq, hidden]`: the aggregate over all blocks and the partial sum."""
        hidden_states, _ = self.output_attn_res_proj(state, self.output_attn_res_norm())
        return hidden_states


class AttnResForCausalLM(AttnResPreTrainedModel, KimiLinearForCausalLM):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: AttnResConfig):
        super(KimiLinearForCausalLM, self).__init__(config)
        self.model = AttnResModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> AttnResCausalLMOutputWithPast:
        """Logits `[batch, seq, vocab]` and, with `labels`, the next-token loss; as `KimiLinearForCausalLM.forward`."""
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return AttnResCausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=outputs.router_logits,
            depth_attentions=outputs.get("depth_attentions"),
        )


class AttnResForSequenceClassification(GenericForSequenceClassification, AttnResPreTrainedModel):
    """Kimi Linear with a classification head. Depth attentions are recorded by its `model`, not by the head."""

    def __init__(self, config: AttnResConfig):
        super(GenericForSequenceClassification, self).__init__(config)
        self.num_labels = config.num_labels
        # Not through `AutoModel`: loaded as remote code, this file's classes are not registered there.
        self.model = AttnResModel(config)
        self.score = nn.Linear(config.hidden_size, self.num_labels, bias=False)
        self.post_init()


def _with_flat_state(checkpoint_func: Callable) -> Callable:
    """Let a checkpointing function see the tensors of the state, which is a layer's one positional argument.

    Reentrant checkpointing differentiates only with respect to tensors that are themselves positional arguments.
    """

    def checkpoint_layer(forward: partial, state: DepthState) -> DepthState:
        if isinstance(state, tuple):
            return checkpoint_func(lambda *tensors: forward(tensors), *state)
        return checkpoint_func(forward, state)

    return checkpoint_layer


AUTO_CLASSES = {
    "AutoModel": AttnResModel,
    "AutoModelForCausalLM": AttnResForCausalLM,
    "AutoModelForSequenceClassification": AttnResForSequenceClassification,
}
# Marks the classes as ones whose code `save_pretrained` writes beside the weights.
AttnResConfig.register_for_auto_class()
for _auto_class, _model_class in AUTO_CLASSES.items():
    _model_class.register_for_auto_class(_auto_class)
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
