"""A decoder outside of `transformers`: a few classes of its own around Llama's attention, MLP and norm."""

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationMixin, LlamaConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding


class OwnConfig(LlamaConfig):
    """Configuration of the decoder."""

    model_type = "own"


class OwnLayer(GradientCheckpointingLayer):
    """A layer with the usual two sublayers."""

    def __init__(self, config: OwnConfig, layer_idx: int):
        super().__init__()
        self.self_attn, self.mlp = LlamaAttention(config, layer_idx), LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states: Tensor, **kwargs) -> Tensor:
        """Compute `[batch, seq, hidden]`."""
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), **kwargs)[0]
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class OwnModel(PreTrainedModel):
    """The decoder."""

    config_class, base_model_prefix, _no_split_modules = OwnConfig, "model", ["OwnLayer"]
    _supports_sdpa = True

    def __init__(self, config: OwnConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(OwnLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm, self.rotary_emb = LlamaRMSNorm(config.hidden_size), LlamaRotaryEmbedding(config)
        self.post_init()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs) -> BaseModelOutputWithPast:
        """Compute the last hidden state `[batch, seq, hidden]`; there is no cache."""
        hidden_states = self.embed_tokens(input_ids)
        position_ids = torch.arange(input_ids.shape[1])[None]
        mask = create_causal_mask(self.config, hidden_states, attention_mask, None, position_ids=position_ids)
        embeddings = self.rotary_emb(hidden_states, position_ids)
        extra = {key: value for key, value in kwargs.items() if key in ("reader",)}
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask=mask, position_embeddings=embeddings, **extra)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states))


class OwnLM(PreTrainedModel, GenerationMixin):
    """The language model."""

    config_class, base_model_prefix = OwnConfig, "model"
    _supports_sdpa = True

    def __init__(self, config: OwnConfig):
        super().__init__(config)
        self.model = OwnModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs) -> CausalLMOutputWithPast:
        """Compute the logits `[batch, seq, vocab]`."""
        return CausalLMOutputWithPast(logits=self.lm_head(self.model(input_ids, attention_mask, **kwargs)[0]))


AutoConfig.register("own", OwnConfig)
AutoModel.register(OwnConfig, OwnModel)
AutoModelForCausalLM.register(OwnConfig, OwnLM)
