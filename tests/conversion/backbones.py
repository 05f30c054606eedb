"""Build small standard models of every backbone, with every feature on and weights far from their defaults.

`CASES` lists them, and `build` makes one. `straight_line` evaluates one without the code under test: it calls the
backbone's own modules, and the steps between them are written out here.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from attnres import BACKBONES

VOCABULARY = 99
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,  # 10 sublayers: the last block is shorter for S = 3 and S = 6
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BIASES = {"attention_bias": True, "mlp_bias": True}
# Shorter than the sequences of the tests, so that every window hides something.
WINDOW = {"sliding_window": 4}
QWEN_WINDOW = WINDOW | {"use_sliding_window": True, "max_window_layers": 2}
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
# Generation crosses from the short factors to the long ones.
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 4.0, 8.0]}
SOFT_CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 15.0, "query_pre_attn_scalar": 5}
MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
GROUPED_EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}

# Case -> (model type, fields that differ from COMMON).
CASES: dict[str, tuple[str, dict]] = {
    "deepseek_v3": (
        "deepseek_v3",
        MLA
        | GROUPED_EXPERTS
        | {"n_routed_experts": 8, "first_k_dense_replace": 2, "attention_bias": True}
        | {"rope_parameters": YARN | {"rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 0.7}},
    ),
    "gemma2": ("gemma2", SOFT_CAPS | WINDOW | {"head_dim": 12, "layer_types": LAYER_TYPES, "attention_bias": True}),
    "gemma3_text": (
        "gemma3_text",
        SOFT_CAPS
        | WINDOW
        | {"head_dim": 12, "layer_types": LAYER_TYPES, "attention_bias": True}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
    "gpt_neox": (
        "gpt_neox",
        {"num_hidden_layers": 8, "hidden_dropout": 0.2, "attention_dropout": 0.2}
        | {"use_parallel_residual": True, "rotary_pct": 0.5},
    ),
    "gpt_neox, sequential": (
        "gpt_neox",
        {"use_parallel_residual": False, "rotary_pct": 0.5, "tie_word_embeddings": True},
    ),
    "granite": (
        "granite",
        BIASES
        | {"residual_multiplier": 0.4, "embedding_multiplier": 3.0, "attention_multiplier": 0.2}
        | {"logits_scaling": 0.5, "tie_word_embeddings": True},
    ),
    "kimi_linear": (
        "kimi_linear",
        MLA
        | GROUPED_EXPERTS
        | {"num_local_experts": 8, "linear_head_dim": 16, "linear_num_heads": 2}
        | {"layer_types": ["linear_attention", "full_attention"] * 2 + ["linear_attention"]},
    ),
    "llama": (
        "llama",
        BIASES
        | {"head_dim": 12, "rope_parameters": LLAMA3 | {"rope_theta": 1e4, "original_max_position_embeddings": 16}},
    ),
    "llama, tied": ("llama", {"tie_word_embeddings": True, "rope_parameters": YARN | {"rope_theta": 1e4}}),
    "mistral": ("mistral", WINDOW | {"head_dim": 12, "tie_word_embeddings": True}),
    "mixtral": ("mixtral", WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmo2": ("olmo2", {"attention_bias": True}),
    "phi3": (
        "phi3",
        {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attention_dropout": 0.2, "sliding_window": 7}
        | {"original_max_position_embeddings": 16}
        | {"rope_parameters": LONG | {"rope_theta": 1e4, "partial_rotary_factor": 0.75}},
    ),
    "qwen2": ("qwen2", QWEN_WINDOW | {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", QWEN_WINDOW | {"head_dim": 12, "attention_bias": True}),
    "qwen3_moe": (
        "qwen3_moe",
        WINDOW
        | {"use_sliding_window": True, "head_dim": 12, "attention_bias": True, "norm_topk_prob": True}
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [1, 3]},
    ),
    "smollm3": (
        "smollm3",
        BIASES | WINDOW | {"use_sliding_window": True, "no_rope_layers": [1, 0, 1, 1, 0], "tie_word_embeddings": False},
    ),
}
# A backbone without a case of its own has a plain one.
CASES |= {name: (name, {}) for name in BACKBONES if name not in CASES}


def build(case: str, **overrides) -> PreTrainedModel:
    """Return the standard model of a case, in eval mode and always with the same weights."""
    model_type, fields = CASES[case]
    config = AutoConfig.for_model(model_type, **{**COMMON, **fields, **overrides})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    make_vivid(model)
    return model


def member_config(case: str, **fields) -> PreTrainedConfig:
    """Return the family's configuration of a case, with `fields` of the backbone or of the family."""
    backbone, case_fields = CASES[case]
    model_type = "attnres" if backbone == "kimi_linear" else f"attnres_{backbone}"
    return AutoConfig.for_model(model_type, **{**COMMON, **case_fields, **fields})


def build_member(case: str, auto_class: type = AutoModelForCausalLM, **fields) -> PreTrainedModel:
    """Return a model of the family in eval mode: the weights of `build(case)`, and depth weights far from uniform."""
    model = auto_class.from_config(member_config(case, **fields)).eval()
    standard, names = build(case), model.state_dict().keys()
    tensors = {**standard.state_dict(), **standard.base_model.state_dict()}
    model.load_state_dict({name: tensor for name, tensor in tensors.items() if name in names}, strict=False)
    torch.manual_seed(1)
    for name, tensor in model.named_parameters():
        if name.endswith("_res_proj.weight"):
            nn.init.normal_(tensor, std=0.5)
        elif name.endswith("_res_norm.weight"):
            nn.init.normal_(tensor, mean=1.0, std=0.3)
    return model


@torch.no_grad()
def make_vivid(model: nn.Module) -> None:
    """Set weights so large that every term moves the logits, and no norm, bias or router at its default."""
    embedding = model.get_input_embeddings()
    # Gemma multiplies the embedding by sqrt(hidden_size) and uses it as the head as well.
    std = 0.4 if hasattr(embedding, "embed_scale") else 1.0
    for name, parameter in model.named_parameters():
        if name.endswith(("A_log", "dt_bias")):
            continue  # decay rates: their initial values are drawn at random already
        if parameter.ndim == 1:  # norms and biases
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
        elif parameter is embedding.weight:
            parameter.normal_(std=std)
        else:
            gain = 3.0 if name == "lm_head.weight" else 1.5
            parameter.normal_(std=gain * parameter.shape[-1] ** -0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.2)


def token_ids() -> Tensor:
    """Return two sequences of 11 tokens without special tokens, `[2, 11]`."""
    return torch.randint(3, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(1))


# ---- Without the code under test

Function = Callable[[Tensor], Tensor]


def layer_functions(model_type: str, layer: nn.Module, attend: Function) -> list[Function]:
    """Return the sublayers `f_l` of a layer, made of the backbone's own modules. `attend` calls its attention."""
    if model_type == "gpt_neox":

        def attention(h: Tensor) -> Tensor:
            return attend(layer.input_layernorm(h))

        def mlp(h: Tensor) -> Tensor:
            return layer.mlp(layer.post_attention_layernorm(h))

        return [lambda h: attention(h) + mlp(h)] if layer.use_parallel_residual else [attention, mlp]
    if model_type == "olmo2":
        return [
            lambda h: layer.post_attention_layernorm(attend(h)),
            lambda h: layer.post_feedforward_layernorm(layer.mlp(h)),
        ]
    if model_type.startswith("gemma"):
        return [
            lambda h: layer.post_attention_layernorm(attend(layer.input_layernorm(h))),
            lambda h: layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(h))),
        ]
    multiplier = layer.residual_multiplier if model_type == "granite" else 1.0
    return [
        lambda h: attend(layer.input_layernorm(h)) * multiplier,
        lambda h: layer.mlp(layer.post_attention_layernorm(h)) * multiplier,
    ]


@torch.no_grad()
def straight_line(model: PreTrainedModel, ids: Tensor, read: Callable[[list[Tensor]], Tensor]) -> Tensor:
    """Return the logits of a standard model in which every sublayer and the final norm read `read([v_0, v_1, ...])`.

    A run of the standard model records the arguments of every layer and attention. A second run with another input of
    the final norm applies the head.
    """
    decoder, calls, handles = model.base_model, {}, []

    def note(module: nn.Module, args: tuple, kwargs: dict) -> None:
        calls[module] = (args, kwargs)

    attentions = [layer.attention if hasattr(layer, "attention") else layer.self_attn for layer in decoder.layers]
    for module in (decoder.layers[0], *attentions):
        handles.append(module.register_forward_pre_hook(note, with_kwargs=True))
    model(ids, use_cache=False)
    for handle in handles:
        handle.remove()

    def attend(attention: nn.Module) -> Function:
        args, kwargs = calls[attention]
        kwargs = {name: value for name, value in kwargs.items() if name != "hidden_states"}

        def call(h: Tensor) -> Tensor:
            output = attention(h, *args[1:], **kwargs)
            return output[0] if isinstance(output, tuple) else output

        return call

    outputs = [calls[decoder.layers[0]][0][0]]  # v_0, v_1, ...
    for layer, attention in zip(decoder.layers, attentions):
        for function in layer_functions(model.config.model_type, layer, attend(attention)):
            outputs.append(function(read(outputs)))
    norm = decoder.final_layer_norm if hasattr(decoder, "final_layer_norm") else decoder.norm
    handle = norm.register_forward_pre_hook(lambda module, args: (read(outputs),))
    logits = model(ids, use_cache=False).logits
    handle.remove()
    return logits


def depth_recurrence(
    queries: Sequence[Tensor], norms: Sequence[Tensor], block_size: int, scale: str, eps: float
) -> Callable[[list[Tensor]], Tensor]:
    """Return AttnRes's `read`: `h = sum_i a_i s_i`, `a = softmax_i(w . (g * RMSNorm(s_i)))`, with w and g of l."""

    def read(v: list[Tensor]) -> Tensor:
        l = len(v) - 1  # noqa: E741
        s = [v[0], *(sum(v[i : i + block_size]) for i in range(1, len(v), block_size))]
        s = torch.stack(s)  # [sources, batch, seq, hidden]
        keys = norms[l] * s / (s.square().mean(-1, keepdim=True) + eps).sqrt()
        a = torch.softmax(keys @ queries[l], dim=0)
        return (a[..., None] * s).sum(0) * (len(s) if scale == "sum" else 1)

    return read
