"""A whole AttnRes model as straight-line code in float64, written from the equations. `test_equations.py` and
`test_attention_gate.py` compare models with it. The backbone is Kimi Linear or, without `layer_types`, Llama.

It uses nothing of the package or of transformers' models, and caches, chunks, fuses and batches nothing. It computes a
sublayer's input from the list `v_0, v_1, ...` of sublayer outputs by index arithmetic:

    v_0 = embedding,  v_l = f_l(RMSNorm(h_l)),  h_l = sum_i a_i s_i,  a = softmax_i(w_l . (g_l * RMSNorm(s_i)))

where the sources `s_i` are `v_0` and the sums of `v_1 .. v_{l-1}` in runs of `S`. Activation: silu.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

LATENT_EPS = 1e-6  # epsilon of the norms of MLA's latents and of KDA's queries and keys
MIN_DENOMINATOR = 1e-20


def logits(tensors: Mapping[str, Tensor], config: Any, token_ids: Tensor) -> Tensor:
    """Compute float64 logits `[batch, seq, vocab]` of `token_ids` `[batch, seq]` from the state dict `tensors`."""
    tensors = {name.removeprefix("model."): tensor.detach().double() for name, tensor in tensors.items()}
    outputs = [tensors["embed_tokens.weight"][token_ids]]  # v_0, v_1, ...
    first_values: list[Tensor] = []  # V_1 of value residuals, after the first layer
    for layer in range(config.num_hidden_layers):
        weights = _below(tensors, f"layers.{layer}.")
        x = _rms_norm(_read(outputs, weights, "self_attention_res", config), config.rms_norm_eps)
        kind = "llama" if config.backbone == "llama" else config.layer_types[layer]
        attention = {"linear_attention": _kda, "full_attention": _mla, "llama": _grouped}[kind]
        x, below = x * weights["input_layernorm.weight"], _below(weights, "self_attn.")
        outputs.append(attention(x, below, config, first_values))
        x = _rms_norm(_read(outputs, weights, "mlp_res", config), config.rms_norm_eps)
        mlp = _moe if kind != "llama" and config.mlp_layer_types[layer] == "sparse" else _mlp
        outputs.append(mlp(x * weights["post_attention_layernorm.weight"], _below(weights, "mlp."), config))
    x = _rms_norm(_read(outputs, tensors, "output_attn_res", config), config.rms_norm_eps)
    return x * tensors["norm.weight"] @ tensors["lm_head.weight"].T


def _read(outputs: list[Tensor], weights: Mapping[str, Tensor], name: str, config: Any) -> Tensor:
    """Compute `h_l`, which the sublayer after the outputs `v_0 .. v_{l-1}` reads."""
    if config.residual_connection == "standard":
        return sum(outputs)
    size, length = config.attn_res_block_size, len(outputs)
    # Block n >= 1 is v_{(n-1)S+1} + ... + v_{nS}; the last block ends with the last output.
    sources = [outputs[0]]
    sources += [sum(outputs[start : min(start + size, length)]) for start in range(1, length, size)]
    query, key_norm = weights[f"{name}_proj.weight"][0], weights[f"{name}_norm.weight"]
    exponentials = [
        torch.exp((query * key_norm * _rms_norm(source, config.rms_norm_eps)).sum(-1, keepdim=True))
        for source in sources
    ]
    total = sum(exponentials)
    h = sum(exponential / total * source for exponential, source in zip(exponentials, sources))
    return h * len(sources) if config.attn_res_scale == "sum" else h


def _kda(x: Tensor, weights: Mapping[str, Tensor], config: Any, first_values: list[Tensor]) -> Tensor:
    """Kimi Delta Attention, token by token, with a state `S` `[keys, values]` per head:

    S_t = diag(exp(g_t)) S_{t-1};  S_t += beta_t k_t (v_t - S_t^T k_t)^T;  o_t = S_t^T q_t / sqrt(keys)
    """
    batch, length, _ = x.shape
    heads, width, kernel = config.linear_num_heads, config.linear_head_dim, config.linear_conv_kernel_dim
    qkv = torch.cat([x @ weights[f"{name}_proj.weight"].T for name in "qkv"], dim=-1)
    taps = weights["conv1d.weight"][:, 0]  # [channels, kernel]; the last tap is for the token itself
    history = torch.cat([torch.zeros(batch, kernel - 1, qkv.shape[-1], dtype=torch.float64), qkv], dim=1)
    qkv = _silu(sum(history[:, tap : tap + length] * taps[:, tap] for tap in range(kernel)))
    q, k, v = qkv.reshape(batch, length, 3, heads, width).unbind(2)
    q, k = (y / torch.sqrt((y * y).sum(-1, keepdim=True) + LATENT_EPS) for y in (q, k))
    beta = torch.sigmoid(x @ weights["b_proj.weight"].T)  # [batch, length, heads]
    step = x @ weights["forget_gate.f_a_proj.weight"].T @ weights["forget_gate.f_b_proj.weight"].T
    step = torch.log1p(torch.exp(step + weights["forget_gate.dt_bias"])).reshape(batch, length, heads, width)
    decay = torch.exp(-torch.exp(weights["forget_gate.A_log"].reshape(heads, 1)) * step)

    state = torch.zeros(batch, heads, width, width, dtype=torch.float64)
    tokens = []
    for t in range(length):
        state = decay[:, t, :, :, None] * state
        recalled = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        correction = beta[:, t, :, None] * (v[:, t] - recalled)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], correction)
        tokens.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) / width**0.5)
    gate = (x @ weights["g_a_proj.weight"].T @ weights["g_b_proj.weight"].T).reshape(batch, length, heads, width)
    o = _rms_norm(torch.stack(tokens, dim=1), config.rms_norm_eps) * weights["o_norm.weight"] * torch.sigmoid(gate)
    return o.reshape(batch, length, heads * width) @ weights["o_proj.weight"].T


def _mla(x: Tensor, weights: Mapping[str, Tensor], config: Any, first_values: list[Tensor]) -> Tensor:
    """Multi-head latent attention without position encoding: keys and values come from one latent per token."""
    batch, length, _ = x.shape
    heads, rank, own = config.num_attention_heads, config.kv_lora_rank, config.qk_nope_head_dim
    if config.q_lora_rank is None:
        q = x @ weights["q_proj.weight"].T
    else:
        q = _rms_norm(x @ weights["q_a_proj.weight"].T, LATENT_EPS) * weights["q_a_layernorm.weight"]
        q = q @ weights["q_b_proj.weight"].T
    q = _gated("query", q, x, weights, config, heads)
    q = q.reshape(batch, length, heads, own + config.qk_rope_head_dim)
    latent = x @ weights["kv_a_proj_with_mqa.weight"].T
    k_shared = latent[..., rank:]  # one key for all heads
    latent = _rms_norm(latent[..., :rank], LATENT_EPS) * weights["kv_a_layernorm.weight"]
    latent = _mixed(latent, weights, first_values)
    kv = (latent @ weights["kv_b_proj.weight"].T).reshape(batch, length, heads, own + config.v_head_dim)
    k_own, v = kv[..., :own], kv[..., own:]

    o = torch.zeros(batch, length, heads, config.v_head_dim, dtype=torch.float64)
    for t in range(length):
        scores = torch.einsum("bhd,bshd->bhs", q[:, t, :, :own], k_own[:, : t + 1])
        scores = scores + torch.einsum("bhd,bsd->bhs", q[:, t, :, own:], k_shared[:, : t + 1])
        attention = torch.exp(scores / (own + config.qk_rope_head_dim) ** 0.5)
        attention = attention / attention.sum(-1, keepdim=True)
        o[:, t] = torch.einsum("bhs,bshd->bhd", attention, v[:, : t + 1])
    return _project_output(o, x, weights, config)


def _grouped(x: Tensor, weights: Mapping[str, Tensor], config: Any, first_values: list[Tensor]) -> Tensor:
    """Attention of Llama: several query heads share a key and value head, channels `c` and `c + width / 2` rotate."""
    batch, length, _ = x.shape
    heads, groups, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    projected = {place: x @ weights[f"{place[0]}_proj.weight"].T for place in ("query", "key", "value")}
    projected["value"] = _mixed(projected["value"], weights, first_values)
    q, k, v = (
        _gated(place, projected[place], x, weights, config, count).reshape(batch, length, count, width)
        for place, count in (("query", heads), ("key", groups), ("value", groups))
    )
    pair = torch.arange(width // 2, dtype=torch.float64)
    angle = torch.arange(length)[:, None] * config.rope_parameters["rope_theta"] ** (-2 * pair / width)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]  # [length, 1, width / 2]
    q, k = (
        torch.cat([cos * a - sin * b, cos * b + sin * a], dim=-1)
        for a, b in (y.split(width // 2, dim=-1) for y in (q, k))
    )
    o = torch.zeros(batch, length, heads, width, dtype=torch.float64)
    for t in range(length):
        for head in range(heads):
            group = head // (heads // groups)
            scores = torch.einsum("bd,bsd->bs", q[:, t, head], k[:, : t + 1, group]) / width**0.5
            o[:, t, head] = torch.einsum("bs,bsd->bd", scores.softmax(-1), v[:, : t + 1, group])
    return _project_output(o, x, weights, config)


def _mixed(values: Tensor, weights: Mapping[str, Tensor], first_values: list[Tensor]) -> Tensor:
    """Compute `c_1 V_1 + c_2 V_l`, if there are value residuals; the first layer's values become `V_1`."""
    if not first_values:
        first_values.append(values)
    if "value_residual.weight" not in weights:
        return values
    c_1, rest = weights["value_residual.weight"]
    return c_1 * first_values[0] + (1 + rest) * values


def _project_output(o: Tensor, x: Tensor, weights: Mapping[str, Tensor], config: Any) -> Tensor:
    heads = o.shape[2]
    y = _gated("sdpa", o.reshape(*o.shape[:2], -1), x, weights, config, heads) @ weights["o_proj.weight"].T
    return _gated("output", y, x, weights, config, heads)


def _gated(place: str, y: Tensor, x: Tensor, weights: Mapping[str, Tensor], config: Any, heads: int) -> Tensor:
    """`y` `[batch, length, heads * width]` times, or plus, `s(x W)`, channel by channel, if the gate has this place."""
    if config.attention_gate != place:
        return y
    s = x @ weights["g_proj.weight"].T
    s = _silu(s) if config.attention_gate_activation == "silu" else torch.sigmoid(s)
    if config.attention_gate_scale == "double":
        s = s + s
    result, width = torch.zeros_like(y), y.shape[-1] // heads
    for channel in range(y.shape[-1]):
        numbers = {"elementwise": channel, "headwise": channel // width, "head_shared": channel % width}
        one = s[..., numbers[config.attention_gate_granularity]]
        is_factor = config.attention_gate_form == "multiply"
        result[..., channel] = y[..., channel] * one if is_factor else y[..., channel] + one
    return result


def _mlp(x: Tensor, weights: Mapping[str, Tensor], config: Any) -> Tensor:
    hidden = _silu(x @ weights["gate_proj.weight"].T) * (x @ weights["up_proj.weight"].T)
    return hidden @ weights["down_proj.weight"].T


def _moe(x: Tensor, weights: Mapping[str, Tensor], config: Any) -> Tensor:
    """One shared expert and the `k` chosen ones, token by token. The bias takes part in the choice, not in the mix."""
    result = _mlp(x, _below(weights, "shared_experts."), config)
    affinity = torch.sigmoid(x @ weights["gate.weight"].T)
    per_group = config.num_local_experts // config.n_group
    for token in torch.cartesian_prod(torch.arange(x.shape[0]), torch.arange(x.shape[1])).tolist():
        batch, t = token
        merit = (affinity[batch, t] + weights["gate.e_score_correction_bias"]).tolist()
        groups = [range(first, first + per_group) for first in range(0, len(merit), per_group)]
        groups.sort(key=lambda group: -sum(sorted((merit[expert] for expert in group), reverse=True)[:2]))
        candidates = [expert for group in groups[: config.topk_group] for expert in group]
        chosen = sorted(candidates, key=lambda expert: -merit[expert])[: config.num_experts_per_tok]
        shares = affinity[batch, t, chosen]
        if config.norm_topk_prob:
            shares = shares / (shares.sum() + MIN_DENOMINATOR)
        for share, expert in zip(shares * config.routed_scaling_factor, chosen):
            gate, up = (weights["experts.gate_up_proj"][expert] @ x[batch, t]).chunk(2)
            result[batch, t] += share * (weights["experts.down_proj"][expert] @ (_silu(gate) * up))
    return result


def _rms_norm(x: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def _silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
