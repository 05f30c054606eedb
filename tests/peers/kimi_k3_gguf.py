"""Write a checkpoint of Kimi K3 as a GGUF file for llama.cpp.

Only the saved files are read, by the names and equations of the release; nothing of `attnres` is used. The file has
float32 tensors alone. llama.cpp has its own names for them, and stores some in another form: see [`_tensors`].
"""

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

_ALIGNMENT = 32  # bytes, the format's default
_U32, _F32, _BOOL, _STRING, _ARRAY = 4, 6, 7, 8, 9  # the format's types of metadata
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def write_gguf(folder: Path, path: Path, edit: Callable[[str, Tensor], Tensor] | None = None, **changes: Any) -> None:
    """Write the checkpoint in `folder` to the GGUF file `path`.

    Args:
        folder: a checkpoint in the released layout, of the composite model or the text model alone.
        path: the file to write.
        edit: is called with the released name of each tensor, without the composite model's prefix, and the tensor;
            its result is written instead.
        changes: metadata to write with other values, by the last part of the key; `...` leaves one out.
    """
    config = json.loads((folder / "config.json").read_text())
    fields = config.get("text_config", config)
    stored: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored |= {name.removeprefix("language_model."): tensor for name, tensor in load_file(file).items()}
    if edit is not None:
        stored = {name: edit(name, tensor) for name, tensor in stored.items()}
    metadata = {"general.architecture": "kimi-k3", "tokenizer.ggml.model": "none"}
    metadata |= {f"kimi-k3.{name}": value for name, value in _metadata(fields).items()}
    for name, value in changes.items():
        (key,) = (key for key in metadata if key.endswith(f".{name}"))
        metadata[key] = value
    metadata = {key: value for key, value in metadata.items() if value is not ... and value is not None}
    tensors = {name: tensor.float().contiguous() for name, tensor in _tensors(_Checkpoint(stored), fields)}

    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        header += _string(key) + _value(value)
    offset = 0
    for name, tensor in tensors.items():
        header += _string(name) + struct.pack(f"<I{tensor.ndim}Q", tensor.ndim, *reversed(tensor.shape))
        header += struct.pack("<IQ", 0, offset)  # 0: float32
        offset += _padded(4 * tensor.numel())
    with path.open("wb") as file:
        file.write(header.ljust(_padded(len(header)), b"\0"))
        for tensor in tensors.values():
            file.write(tensor.numpy().tobytes().ljust(_padded(4 * tensor.numel()), b"\0"))


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _value(value: str | bool | int | float | list[int]) -> bytes:
    """Return a value of the metadata after its type."""
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, list):
        return struct.pack(f"<IIQ{len(value)}I", _ARRAY, _U32, len(value), *value)
    kind, form = {bool: (_BOOL, "?"), int: (_U32, "I"), float: (_F32, "f")}[type(value)]
    return struct.pack(f"<I{form}", kind, value)


def _metadata(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return llama.cpp's metadata of a text model without their common prefix; `None` where a feature is absent."""
    linear, layers, experts = fields["linear_attn_config"], fields["num_hidden_layers"], fields["num_experts"]
    rank, rope = fields["kv_lora_rank"], fields["qk_rope_head_dim"]
    assert linear["num_heads"] <= fields["num_attention_heads"], "only heads of delta attention can be padded"
    assert fields.get("moe_layer_freq", 1) == 1, "llama.cpp has no such field"
    assert fields["hidden_act"] == "situ", "llama.cpp has no other activation"
    return {
        "block_count": layers,
        "context_length": fields["max_position_embeddings"],
        "vocab_size": fields["vocab_size"],
        "embedding_length": fields["hidden_size"],
        "feed_forward_length": fields["intermediate_size"],
        "attention.head_count": fields["num_attention_heads"],
        # A layer without heads for keys has delta attention.
        "attention.head_count_kv": [int(i + 1 in linear["full_attn_layers"]) for i in range(layers)],
        "attention.layer_norm_rms_epsilon": float(fields["rms_norm_eps"]),
        "attention.q_lora_rank": fields["q_lora_rank"],
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rope,
        "attention.value_length": rank,
        "attention.key_length_mla": fields["qk_nope_head_dim"] + rope,
        "attention.value_length_mla": fields["v_head_dim"],
        "rope.dimension_count": rope,
        "ssm.conv_kernel": linear["short_conv_kernel_size"],
        "kda.head_dim": linear["head_dim"],
        "kda.gate_lower_bound": linear.get("gate_lower_bound"),
        "attn_res.block_size": fields.get("attn_res_block_size") or 0,
        "activation.situ_beta": float(fields["activation_situ_beta"]),
        "activation.situ_linear_beta": float(fields.get("activation_situ_linear_beta") or 0),
        "expert_count": experts,
        "expert_used_count": experts and fields["num_experts_per_token"],
        "expert_feed_forward_length": fields["moe_intermediate_size"],
        "expert_shared_count": fields["num_shared_experts"],
        "leading_dense_block_count": layers if experts is None else fields["first_k_dense_replace"],
        "expert_gating_func": 2,  # sigmoid
        "expert_latent_length": fields.get("routed_expert_hidden_size"),
        "expert_weights_scale": float(fields["routed_scaling_factor"]),
        "expert_weights_norm": fields["moe_renormalize"],
        "expert_group_count": experts and fields["num_expert_group"],
        "expert_group_used_count": experts and fields["topk_group"],
    }


class _Checkpoint:
    """The tensors of a text model in float32, by released name, with packed weights decoded."""

    def __init__(self, stored: Mapping[str, Tensor]):
        self.stored = stored

    def __call__(self, name: str) -> Tensor:
        if f"{name}_packed" not in self.stored:
            return self.stored[name].float()
        packed, scale = self.stored[f"{name}_packed"].long(), self.stored[f"{name}_scale"].double()
        # Two numbers in a byte, that of the even column in the low bits; 32 numbers share the exponent of a scale.
        codes = torch.stack([packed % 16, packed // 16], dim=-1).flatten(1)
        values = torch.tensor([*_E2M1, *(-x for x in _E2M1)], dtype=torch.float64)[codes]
        return (values * 2.0 ** (scale - 127).repeat_interleave(32, dim=1)).float()

    def __contains__(self, name: str) -> bool:
        return name in self.stored

    def score(self, name: str) -> Tensor:
        """Return the product of a depth query and the weight of its key norm."""
        return self(f"{name}_proj.weight")[0] * self(f"{name}_norm.weight")


def _tensors(released: _Checkpoint, fields: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of the GGUF file. `released` has those of the checkpoint."""
    has_res = bool(fields.get("attn_res_block_size"))
    yield "token_embd.weight", released("model.embed_tokens.weight")
    yield "output.weight", released("lm_head.weight")
    yield "output_norm.weight", released("model.norm.weight")
    if has_res:
        yield "output_res_score.weight", released.score("model.output_attn_res")
    for i in range(fields["num_hidden_layers"]):
        layer, block = f"model.layers.{i}", f"blk.{i}"
        yield f"{block}.attn_norm.weight", released(f"{layer}.input_layernorm.weight")
        yield f"{block}.ffn_norm.weight", released(f"{layer}.post_attention_layernorm.weight")
        if has_res:
            yield f"{block}.attn_res_score.weight", released.score(f"{layer}.self_attention_res")
            yield f"{block}.ffn_res_score.weight", released.score(f"{layer}.mlp_res")
        is_linear = i + 1 in fields["linear_attn_config"]["kda_layers"]
        attention = _delta_attention if is_linear else _full_attention
        is_dense = f"{layer}.mlp.up_proj.weight" in released
        mlp = _mlp(released, f"{layer}.mlp") if is_dense else _experts(released, f"{layer}.block_sparse_moe", fields)
        for name, tensor in (*attention(released, f"{layer}.self_attn", fields), *mlp):
            yield f"{block}.{name}", tensor


def _delta_attention(released: _Checkpoint, owner: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    heads = fields["linear_attn_config"]["num_heads"]
    missing = fields["num_attention_heads"] - heads

    def padded(tensor: Tensor, dim: int = 0) -> Tensor:
        """Add heads of zeros, whose output is zero: llama.cpp has one number of heads for both kinds of attention."""
        shape = [size // heads * missing if i == dim else size for i, size in enumerate(tensor.shape)]
        return torch.cat([tensor, tensor.new_zeros(shape)], dim)

    for x in "qkv":
        convolution = padded(released(f"{owner}.{x}_conv1d.weight"))
        yield f"attn_{x}.weight", padded(released(f"{owner}.{x}_proj.weight"))
        yield f"ssm_conv1d_{x}.weight", convolution.unsqueeze(0)  # [1, width, 1, kernel]
    yield "ssm_f_a.weight", released(f"{owner}.f_a_proj.weight")
    yield "ssm_f_b.weight", padded(released(f"{owner}.f_b_proj.weight"))
    yield "ssm_beta.weight", padded(released(f"{owner}.b_proj.weight"))
    yield "ssm_dt.bias", padded(released(f"{owner}.dt_bias"))
    yield "ssm_a", padded(-released(f"{owner}.A_log")[:heads].exp())  # beyond the heads it is padded
    if f"{owner}.g_proj.weight" in released:
        yield "ssm_g.weight", padded(released(f"{owner}.g_proj.weight"))
    else:  # llama.cpp has the product of the two projections
        first, second = (released(f"{owner}.g_{x}_proj.weight").double() for x in "ab")
        yield "ssm_g.weight", padded(second @ first)
    yield "ssm_norm.weight", released(f"{owner}.o_norm.weight")
    yield "attn_output.weight", padded(released(f"{owner}.o_proj.weight"), dim=1)


def _full_attention(released: _Checkpoint, owner: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    if f"{owner}.q_proj.weight" in released:
        yield "attn_q.weight", released(f"{owner}.q_proj.weight")
    else:
        yield "attn_q_a.weight", released(f"{owner}.q_a_proj.weight")
        yield "attn_q_a_norm.weight", released(f"{owner}.q_a_layernorm.weight")
        yield "attn_q_b.weight", released(f"{owner}.q_b_proj.weight")
    yield "attn_kv_a_mqa.weight", released(f"{owner}.kv_a_proj_with_mqa.weight")
    yield "attn_kv_a_norm.weight", released(f"{owner}.kv_a_layernorm.weight")
    # llama.cpp attends in the latent space: keys and values of a head have a projection each.
    kv = released(f"{owner}.kv_b_proj.weight").unflatten(0, (fields["num_attention_heads"], -1))
    key, value = kv.split([fields["qk_nope_head_dim"], fields["v_head_dim"]], dim=1)  # [heads, dim, rank]
    yield "attn_k_b.weight", key.transpose(1, 2)
    yield "attn_v_b.weight", value
    if f"{owner}.g_proj.weight" in released:
        yield "attn_gate.weight", released(f"{owner}.g_proj.weight")
    yield "attn_output.weight", released(f"{owner}.o_proj.weight")


def _mlp(released: _Checkpoint, owner: str, suffix: str = "") -> Iterator[tuple[str, Tensor]]:
    for part in ("gate", "up", "down"):
        yield f"ffn_{part}{suffix}.weight", released(f"{owner}.{part}_proj.weight")


def _experts(released: _Checkpoint, owner: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    yield "ffn_gate_inp.weight", released(f"{owner}.gate.weight")
    yield "exp_probs_b.bias", released(f"{owner}.gate.e_score_correction_bias")
    for part in ("down_proj", "norm", "up_proj"):
        if f"{owner}.routed_expert_{part}.weight" in released:
            yield f"ffn_routed_{part.partition('_')[0]}.weight", released(f"{owner}.routed_expert_{part}.weight")
    for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        weights = [released(f"{owner}.experts.{expert}.{name}.weight") for expert in range(fields["num_experts"])]
        yield f"ffn_{part}_exps.weight", torch.stack(weights)
    if fields["num_shared_experts"]:
        yield from _mlp(released, f"{owner}.shared_experts", "_shexp")
