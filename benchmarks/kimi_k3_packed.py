"""Compare Kimi K3 with packed experts with the same model with unpacked ones: decoding and prefill.

The experts of a layer are larger than the processor's caches, as those of any model that is worth packing.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from attnres import AttnResKimiK3Config
from attnres.kimi_k3_packed_attnres import MXFP4

from .shapes import build, token_ids
from .stored import cell, markdown_table, verdict
from .timing import Setting, compare, interleave
from .workloads import decoding, prefill

PACKED = "packed"  # the form in the rows
# Tokens of a prefill: few for each expert, and many.
TOKENS, DECODED = (32, 512), 4
# A token no slower than with unpacked experts; in prefill, each expert is decoded once for all of its tokens.
TARGETS = {"decoding": 1.0, "prefill": 1.2}
RATIO = "packed / unpacked"


def measure(setting: Setting) -> Iterator[dict]:
    """Yield one row per dtype and workload."""
    for dtype in ("float32",) if setting.quick else ("float32", "bfloat16"):
        models = pair(setting.quick, getattr(torch, dtype), setting.device)
        for tokens in (16,) if setting.quick else TOKENS:
            ids = token_ids(models["packed"].config, tokens, 1, setting.device)
            ways = {"prefill": (prefill(models, ids), 1)}
            if tokens <= TOKENS[0]:
                ways["decoding"] = decoding(models, ids), DECODED
            for workload, (prepared, calls) in ways.items():
                seconds = interleave(prepared, replace(setting, repeats=2 * setting.repeats), calls=calls)
                row: dict[str, Any] = {"dtype": dtype, "workload": workload, "form": PACKED, "tokens": tokens}
                yield row | {"products": 1.0} | compare(seconds, {RATIO: ("packed", "unpacked")})


def table(rows: list[dict]) -> str:
    """Return the table of these rows."""
    title = "Packed experts, time as a ratio to the same experts unpacked"
    cells = [
        [
            *(row[key] for key in ("dtype", "workload", "tokens")),
            cell(row, RATIO, 3),
            verdict(row["ratios"][RATIO]["median"], TARGETS[row["workload"]]),
        ]
        for row in rows
    ]
    return markdown_table(title, ["dtype", "workload", "tokens", RATIO, "target"], cells)


@torch.no_grad()
def pair(quick: bool, dtype: torch.dtype, device: str) -> dict[str, PreTrainedModel]:
    """Return a model with packed experts and one with the same experts unpacked."""
    size, layers, experts = (64, 2, 4) if quick else (1024, 3, 16)
    fields: dict[str, Any] = {
        "vocab_size": 256, "hidden_size": size, "num_hidden_layers": layers, "intermediate_size": size,
        "num_attention_heads": 4, "q_lora_rank": None, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16, "v_head_dim": 32, "linear_num_heads": 4, "linear_head_dim": 32,
        "num_experts": experts, "num_experts_per_tok": 4, "n_shared_experts": 1, "moe_intermediate_size": size,
        "routed_expert_hidden_size": size, "attn_res_block_size": 2,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    models = {}
    for name in ("packed", "unpacked"):
        config = AttnResKimiK3Config(**fields, packed_experts=name == "packed")
        config._experts_implementation = "eager"  # the loop that packed experts run
        torch.manual_seed(0)
        models[name] = build(config, dtype, device)
    generator = torch.Generator().manual_seed(0)
    for packed, plain in zip(models["packed"].model.layers[1:], models["unpacked"].model.layers[1:]):
        for name in ("gate_up_proj", "down_proj"):
            codes, scales = (getattr(packed.mlp.experts, f"{name}_{part}") for part in MXFP4.parts)
            codes.copy_(torch.randint(256, codes.shape, dtype=torch.uint8, generator=generator))
            scales.fill_(120)  # as large as weights of such a width are
            for expert, weight in enumerate(getattr(plain.mlp.experts, name)):
                weight.copy_(MXFP4.decode(codes[expert], scales[expert], dtype))
    shared = dict(models["packed"].named_parameters())
    for name, tensor in models["unpacked"].named_parameters():
        if name in shared:
            tensor.copy_(shared[name])
    return models
