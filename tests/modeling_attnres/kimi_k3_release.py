"""Small checkpoints in the released layout of Kimi K3, written tensor by tensor, without the code under test."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

# The fields of the released text model, with smaller numbers. Two blocks of three layers and one of a single layer;
# the last two layers of full attention do not follow each other in the usual pattern.
TEXT: dict[str, Any] = {
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "architectures": ["KimiLinearForCausalLM"],
    "attn_res_block_size": 3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "first_k_dense_replace": 1,
    "hidden_act": "situ",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "kv_lora_rank": 12,
    "latent_moe_use_norm": True,
    "linear_attn_config": {
        "full_attn_layers": [4, 6, 7],
        "gate_lower_bound": -5.0,
        "head_dim": 8,
        "kda_layers": [1, 2, 3, 5],
        "num_heads": 3,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
    },
    "max_position_embeddings": 4096,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 32,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 4,
    "num_expert_group": 1,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_hidden_layers": 7,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 2,
    "pad_token_id": 0,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "rms_norm_eps": 2e-5,
    "routed_expert_hidden_size": 32,
    "routed_scaling_factor": 1.7,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_cache": True,
    "v_head_dim": 6,
    "vocab_size": 64,
}
# The fields of the released vision part, with smaller numbers. Its heads are wider than its width divided by them.
VISION: dict[str, Any] = {
    "_attn_implementation": "flash_attention_2",
    "activation_func": "gelu_pytorch_tanh",
    "attn_bias": False,
    "init_pos_emb_height": 4,
    "init_pos_emb_time": 4,
    "init_pos_emb_width": 4,
    "linear_bias": False,
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "mlp_type": "mlp2",
    "mm_hidden_size": 16,
    "mm_projector_type": "patchmergerv2",
    "norm_type": "rmsnorm",
    "patch_embed_proj_bias": False,
    "patch_size": 2,
    "pos_emb_interpolation_mode": "bilinear",
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-5,
    "qkv_hidden_size": 24,
    "text_hidden_size": 64,
    "vt_hidden_size": 16,
    "vt_intermediate_size": 24,
    "vt_num_attention_heads": 3,
    "vt_num_hidden_layers": 2,
}
PLACEHOLDER = 40  # id of the token that holds the place of a token of an image
A_LOG_LENGTH = 128  # 3 heads and zeros
_FLOAT32 = ("A_log", "dt_bias", "_conv1d.weight", "o_norm.weight", "e_score_correction_bias")


def text_fields(**changes: Any) -> dict[str, Any]:
    """`TEXT` with other values; those of `linear_attn_config` may be given beside the others. `...` removes a field."""
    fields = TEXT | {"linear_attn_config": dict(TEXT["linear_attn_config"])}
    for name, value in changes.items():
        owner = fields["linear_attn_config"] if name in TEXT["linear_attn_config"] else fields
        owner[name] = value
        if value is ...:
            del owner[name]
    return fields


def shapes(fields: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the text model's tensors, without a prefix."""
    hidden, heads, linear = fields["hidden_size"], fields["num_attention_heads"], fields["linear_attn_config"]
    nope, rope, value, rank = (
        fields[f] for f in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
    )
    kda_heads, kda_dim = linear["num_heads"], linear["head_dim"]
    width, latent = fields["moe_intermediate_size"], fields.get("routed_expert_hidden_size")

    def mlp(owner: str, size: int) -> dict[str, tuple[int, ...]]:
        return {
            f"{owner}.gate_proj.weight": (size, hidden),
            f"{owner}.up_proj.weight": (size, hidden),
            f"{owner}.down_proj.weight": (hidden, size),
        }

    result: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (fields["vocab_size"], hidden)}
    layers = fields["num_hidden_layers"]
    for i in range(layers + fields["num_nextn_predict_layers"]):
        layer, attention = f"model.layers.{i}", f"model.layers.{i}.self_attn"
        result[f"{layer}.input_layernorm.weight"] = result[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        if i >= layers:  # for multi-token prediction, as in vLLM
            result |= {f"{layer}.{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
            result[f"{layer}.eh_proj.weight"] = (hidden, 2 * hidden)
        elif fields.get("attn_res_block_size"):
            for name in ("self_attention_res", "mlp_res"):
                result |= {f"{layer}.{name}_proj.weight": (1, hidden), f"{layer}.{name}_norm.weight": (hidden,)}
        if i + 1 in linear["kda_layers"]:
            for x in "qkv":
                result[f"{attention}.{x}_proj.weight"] = (kda_heads * kda_dim, hidden)
                result[f"{attention}.{x}_conv1d.weight"] = (kda_heads * kda_dim, 1, linear["short_conv_kernel_size"])
            low_rank = "f" if linear.get("use_full_rank_gate") else "fg"
            result |= {f"{attention}.{x}_a_proj.weight": (kda_dim, hidden) for x in low_rank}
            result |= {f"{attention}.{x}_b_proj.weight": (kda_heads * kda_dim, kda_dim) for x in low_rank}
            if linear.get("use_full_rank_gate"):
                result[f"{attention}.g_proj.weight"] = (kda_heads * kda_dim, hidden)
            result[f"{attention}.b_proj.weight"] = (kda_heads, hidden)
            result[f"{attention}.A_log"] = (A_LOG_LENGTH,)
            result[f"{attention}.dt_bias"] = (kda_heads * kda_dim,)
            result[f"{attention}.o_norm.weight"] = (kda_dim,)
            result[f"{attention}.o_proj.weight"] = (hidden, kda_heads * kda_dim)
        else:
            if fields["q_lora_rank"] is None:
                result[f"{attention}.q_proj.weight"] = (heads * (nope + rope), hidden)
            else:
                result[f"{attention}.q_a_proj.weight"] = (fields["q_lora_rank"], hidden)
                result[f"{attention}.q_a_layernorm.weight"] = (fields["q_lora_rank"],)
                result[f"{attention}.q_b_proj.weight"] = (heads * (nope + rope), fields["q_lora_rank"])
            result[f"{attention}.kv_a_proj_with_mqa.weight"] = (rank + rope, hidden)
            result[f"{attention}.kv_a_layernorm.weight"] = (rank,)
            result[f"{attention}.kv_b_proj.weight"] = (heads * (nope + value), rank)
            if fields.get("mla_use_output_gate"):
                result[f"{attention}.g_proj.weight"] = (heads * value, hidden)
            result[f"{attention}.o_proj.weight"] = (hidden, heads * value)
        if fields["num_experts"] is None or i < fields["first_k_dense_replace"] or i % fields["moe_layer_freq"]:
            result |= mlp(f"{layer}.mlp", fields["intermediate_size"])
            continue
        moe = f"{layer}.block_sparse_moe"
        result[f"{moe}.gate.weight"] = (fields["num_experts"], hidden)
        result[f"{moe}.gate.e_score_correction_bias"] = (fields["num_experts"],)
        if latent:
            result[f"{moe}.routed_expert_down_proj.weight"] = (latent, hidden)
            result[f"{moe}.routed_expert_up_proj.weight"] = (hidden, latent)
            if fields.get("latent_moe_use_norm"):
                result[f"{moe}.routed_expert_norm.weight"] = (latent,)
        if fields["num_shared_experts"]:
            result |= mlp(f"{moe}.shared_experts", width * fields["num_shared_experts"])
        for expert in range(fields["num_experts"]):
            result |= {f"{moe}.experts.{expert}.{w}.weight": (width, latent or hidden) for w in ("w1", "w3")}
            result[f"{moe}.experts.{expert}.w2.weight"] = (latent or hidden, width)
    if fields.get("attn_res_block_size"):
        result |= {"model.output_attn_res_proj.weight": (1, hidden), "model.output_attn_res_norm.weight": (hidden,)}
    result["model.norm.weight"] = (hidden,)
    return result if fields["tie_word_embeddings"] else result | {"lm_head.weight": (fields["vocab_size"], hidden)}


def random_tensors(fields: dict[str, Any], dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> dict[str, Tensor]:
    """Random tensors, so large that every term of the equations moves the logits; in the dtypes of the release."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, shape in shapes(fields).items():
        tensor = torch.randn(shape, generator=generator)
        if name.endswith("A_log"):
            tensor = 0.5 * tensor
            tensor[fields["linear_attn_config"]["num_heads"] :] = 0
        elif name.endswith("dt_bias"):
            tensor = 0.5 * tensor - 1
        elif name.endswith("e_score_correction_bias"):
            tensor = 0.2 * tensor
        elif "norm.weight" in name:
            tensor = 1 + 0.3 * tensor
        elif name.endswith("_res_proj.weight"):
            tensor = 0.3 * tensor
        elif "embed_tokens" not in name:
            # SiTU is hardly different from other activations near zero.
            tensor = tensor * shape[-1] ** -0.5 * (3 if ".gate_proj." in name or ".up_proj." in name else 1)
            tensor = 3 * tensor if ".w1." in name or ".w3." in name else tensor
        tensors[name] = tensor.to(torch.float32 if name.endswith(_FLOAT32) else dtype)
    return tensors


def vision_shapes(hidden_size: int, vision: dict[str, Any] = VISION) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the vision part's tensors, for a text model of this width."""
    width, inner, mlp = (vision[name] for name in ("vt_hidden_size", "qkv_hidden_size", "vt_intermediate_size"))
    patch, merged = vision["patch_size"], 4 * width
    table = vision["init_pos_emb_height"], vision["init_pos_emb_width"], width
    result = {"vision_tower.patch_embed.proj.weight": (width, 3, patch, patch)}
    result["vision_tower.patch_embed.pos_emb.weight"] = table
    for i in range(vision["vt_num_hidden_layers"]):
        block = f"vision_tower.encoder.blocks.{i}"
        result |= {f"{block}.norm0.weight": (width,), f"{block}.norm1.weight": (width,)}
        result |= {f"{block}.wqkv.weight": (3 * inner, width), f"{block}.wo.weight": (width, inner)}
        result |= {f"{block}.mlp.fc0.weight": (mlp, width), f"{block}.mlp.fc1.weight": (width, mlp)}
    result["vision_tower.encoder.final_layernorm.weight"] = (width,)
    result |= {"mm_projector.proj.0.weight": (merged, merged), "mm_projector.proj.2.weight": (hidden_size, merged)}
    return result | {"mm_projector.post_norm.weight": (hidden_size,)}


def vision_tensors(hidden_size: int, vision: dict[str, Any] = VISION, seed: int = 1) -> dict[str, Tensor]:
    """Random tensors of a vision part, so large that every term of the equations moves its output; in bfloat16."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, shape in vision_shapes(hidden_size, vision).items():
        tensor = torch.randn(shape, generator=generator)
        is_norm = "norm" in name
        tensors[name] = (
            1 + 0.3 * tensor if is_norm else tensor * (1 if "pos_emb" in name else 2 * shape[-1] ** -0.5)
        ).bfloat16()
    return tensors


def encode_mxfp4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Pack a weight `[out, in]` as MXFP4: the two tensors by the ends of their names, and the weight that they mean.

    It is slow and plain: each number goes to the nearest of the sixteen.
    """
    values = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    groups = weight.float().unflatten(1, (-1, 32))
    exponents = groups.abs().amax(-1).clamp(min=2.0**-100).log2().floor() - 2
    scaled = groups / 2.0 ** exponents.unsqueeze(-1)
    codes = (scaled.abs().unsqueeze(-1) - values).abs().argmin(-1)
    meant = (values[codes] * torch.where(scaled < 0, -1.0, 1.0) * 2.0 ** exponents.unsqueeze(-1)).flatten(1)
    codes = (codes + 8 * (scaled < 0)).flatten(1).to(torch.uint8)
    packed = codes[:, 0::2] + 16 * codes[:, 1::2]
    return {"weight_packed": packed, "weight_scale": (exponents + 127).to(torch.uint8)}, meant.to(torch.bfloat16)


def encode_nvfp4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Pack a weight `[out, in]` as NVFP4, as [`encode_mxfp4`]: float8 scales of 16 numbers, and a divisor of them."""
    values = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    groups = weight.float().unflatten(1, (-1, 16))
    divisor = 6 * 448 / groups.abs().max()
    scales = (groups.abs().amax(-1) / 6 * divisor).to(torch.float8_e4m3fn)
    steps = (scales.float() / divisor).unsqueeze(-1)
    scaled = groups / steps
    codes = (scaled.abs().unsqueeze(-1) - values).abs().argmin(-1)
    meant = (values[codes] * torch.where(scaled < 0, -1.0, 1.0) * steps).flatten(1)
    codes = (codes + 8 * (scaled < 0)).flatten(1).to(torch.uint8)
    packed = codes[:, 0::2] + 16 * codes[:, 1::2]
    parts = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": divisor.reshape(1)}
    return parts, meant.to(torch.bfloat16)


def pack_experts(
    tensors: dict[str, Tensor], encode: Callable[[Tensor], tuple[dict[str, Tensor], Tensor]] = encode_mxfp4
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Pack all routed experts: the tensors of the packed checkpoint, and those of the one that it means."""
    packed, meant = {}, {}
    for name, tensor in tensors.items():
        if ".experts." in name:
            parts, meant[name] = encode(tensor)
            packed |= {name.removesuffix("weight") + part: value for part, value in parts.items()}
        else:
            packed[name] = meant[name] = tensor
    return packed, meant


QUANTIZATION = {
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"group_size": 32, "num_bits": 4, "type": "float"}}
    },
    "format": "mxfp4-pack-quantized",
    "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "lm_head"],
    "quant_method": "compressed-tensors",
}


def write(
    folder: Path,
    fields: dict[str, Any],
    tensors: dict[str, Tensor],
    layout: str = "composite",
    vision: bool | dict[str, Tensor] = False,
    shards: int = 2,
) -> Path:
    """Write a checkpoint: `config.json`, shards, and their index.

    Args:
        folder: where to.
        fields: the text model's.
        tensors: the text model's, without a prefix.
        layout: `"composite"` or `"text"`.
        vision: whether a composite checkpoint has a vision part, or its tensors.
        shards: number of files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = dict(fields)
    if layout == "composite":
        tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
        ids = {name: fields[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        config = {
            "architectures": ["KimiK3ForConditionalGeneration"],
            "auto_map": {"AutoConfig": "configuration_kimi_k3.KimiK3Config"},
            "dtype": "bfloat16",
            "media_placeholder_token_id": PLACEHOLDER,
            "model_type": "kimi_k3",
            "text_config": fields,
            "vision_config": VISION | {"text_hidden_size": fields["hidden_size"]},
            **ids,
        }
    if vision:
        tensors = tensors | (vision_tensors(fields["hidden_size"]) if vision is True else vision)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    names = sorted(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name].contiguous() for name in names[shard::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_packed(folder: Path, layout: str = "composite", vision: bool = False, **changes: Any) -> Path:
    """Write a release with random weights and packed experts; `changes` are those of [`text_fields`]."""
    fields = text_fields(**changes)
    packed, _ = pack_experts(random_tensors(fields))
    return write(folder, fields | {"quantization_config": QUANTIZATION}, packed, layout, vision)
