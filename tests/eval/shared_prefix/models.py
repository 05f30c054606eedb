"""Small models of `transformers`, with windows and caches of several kinds."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SMALL = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# The windows are shorter than the tests' sequences. In Gemma, layers with and without a window alternate.
OTHERS = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "gemma2": {"sliding_window": 8, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512},
}
MODELS = [*OTHERS, "block size 1", "block size 2", "block size 4", "retrofit of gemma2", "Kimi K3"]


def small(name: str, **overrides: object) -> PreTrainedModel:
    """Return a new model of a family, the same at each call."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SMALL | overrides)).eval()
