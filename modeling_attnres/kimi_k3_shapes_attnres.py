"""The tensors of Kimi K3's text model in the released layout: their names and shapes."""

from .kimi_k3_configuration_attnres import AttnResKimiK3Config


def released_shapes(config: AttnResKimiK3Config) -> dict[str, tuple[int, ...]]:
    """Return the tensors of the text model by their released names without prefix, and their shapes.

    The heads of `A_log` are not padded. Experts are not packed.
    """
    hidden, vocab, heads = config.hidden_size, config.vocab_size, config.num_attention_heads
    kda_heads, kda_dim = config.linear_num_heads, config.linear_head_dim
    kda_width, nope, rope = kda_heads * kda_dim, config.qk_nope_head_dim, config.qk_rope_head_dim
    value_width, kv_rank, q_rank = heads * config.v_head_dim, config.kv_lora_rank, config.q_lora_rank
    latent, expert_width = config.routed_expert_hidden_size or hidden, config.moe_intermediate_size
    experts = config.num_local_experts or 0

    def mlp(owner: str, width: int) -> dict[str, tuple[int, ...]]:
        shapes = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
        return {f"{owner}.{name}.weight": shape for name, shape in shapes.items()}

    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    kinds = [*zip(config.layer_types, config.mlp_layer_types)]
    kinds += [("full_attention", kinds[-1][1])] * (config.num_nextn_predict_layers or 0)
    for i, (attention, kind) in enumerate(kinds):
        layer, owner = f"model.layers.{i}.", f"model.layers.{i}.self_attn."
        is_ahead = i >= config.num_hidden_layers  # the layer for multi-token prediction
        has_res = config.residual_connection == "attn_res" and not is_ahead
        if is_ahead:
            shapes |= {f"{layer}{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
            shapes[f"{layer}eh_proj.weight"] = (hidden, 2 * hidden)
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
        shapes[f"{moe}gate.weight"] = (experts, hidden)
        shapes[f"{moe}gate.e_score_correction_bias"] = (experts,)
        if config.routed_expert_hidden_size is not None:
            shapes[f"{moe}routed_expert_down_proj.weight"] = (latent, hidden)
            shapes |= {f"{moe}routed_expert_norm.weight": (latent,)} if config.latent_moe_use_norm else {}
            shapes[f"{moe}routed_expert_up_proj.weight"] = (hidden, latent)
        if config.n_shared_experts:
            shapes |= mlp(f"{moe}shared_experts", expert_width * config.n_shared_experts)
        for expert in range(experts):
            for name in ("w1", "w2", "w3"):
                shape = (latent, expert_width) if name == "w2" else (expert_width, latent)
                shapes[f"{moe}experts.{expert}.{name}.weight"] = shape
    if config.residual_connection == "attn_res":
        shapes |= {"model.output_attn_res_proj.weight": (1, hidden), "model.output_attn_res_norm.weight": (hidden,)}
    shapes["model.norm.weight"] = (hidden,)
    return shapes if config.tie_word_embeddings else shapes | {"lm_head.weight": (vocab, hidden)}
