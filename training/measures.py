"""Measures of a training run: FLOPs, and the spread of depth attention over its sources.

model FLOP use = tokens/s * FLOPs/token / (peak FLOP/s * devices)
FLOPs/token    = 6 N + 3 A,   N: activated parameters without the embedding table, A: forward FLOPs of mixing tokens
"""

import re
from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from attnres.analysis.depth_attention import share_measures
from attnres.configuration import count_parameters

# Pattern of a device's name -> peak dense bfloat16 FLOP/s, with float32 accumulation, from the vendors' data sheets
# (NVIDIA's data sheets give twice as much, "with sparsity"). The first pattern that matches the name counts.
PEAK_FLOPS = {
    r"\bMIG\b": None,  # a part of a device
    r"\bB200\b": 2250e12,
    r"\bH200 NVL\b": 835e12,
    r"\bG?H200\b": 989e12,
    r"\bH100 PCIe\b": 756e12,
    r"\bH100 NVL\b": 835e12,
    r"\bG?H100\b": 989e12,
    r"\bH800\b": 989e12,
    r"\bH20\b": 148e12,
    r"\bA[18]00\b": 312e12,
    r"\bA40\b": 149.7e12,
    r"\bA30\b": 165e12,
    r"\bA10\b": 125e12,
    r"\bL40S\b": 362e12,
    r"\bL40\b": 181e12,
    r"\bL4\b": 121e12,
    r"\bRTX 4090$": 165.2e12,
    r"\bRTX 3090$": 71e12,
    r"\bMI3(00|25)X\b": 1307.4e12,
    r"\bMI250X\b": 191.5e12,  # one of its two dies, which PyTorch shows as a device
}


def device_name(device: torch.device) -> str:
    """Return the name of a device, as [`peak_flops`] knows it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def peak_flops(device_name: str) -> float | None:
    """Return the peak dense bfloat16 FLOP/s of a device by its name in PyTorch; `None` if it is unknown."""
    return next((peak for pattern, peak in PEAK_FLOPS.items() if re.search(pattern, device_name)), None)


def flops_per_token(config: PreTrainedConfig, length: int) -> float:
    """Count the FLOPs of training on one token, forward and backward: `6 N + 3 A`.

    `N` counts the activated parameters, with the output head and without the embedding table. Each parameter multiplies
    and adds once forward and twice backward. `A` counts the forward FLOPs of mixing tokens: for softmax attention
    `2 heads (qk_dim + v_dim) length` (PaLM's convention, which does not halve it for causality), and for KDA's
    recurrence, on a state `[k_dim, v_dim]` per head, `6 heads k_dim v_dim`. Norms, activations, depth attention (under
    1%) and the recomputation of gradient checkpointing are left out.

    Args:
        config: The configuration of a causal language model, of this family or of `transformers`.
        length: The length of the sequences in tokens.

    Returns:
        FLOPs per token.

    Raises:
        AttributeError, ValueError: No causal language model can be built from this configuration.
    """
    config = config.get_text_config()
    count = count_parameters(config)
    # The loss of a layer for multi-token prediction takes this layer and another call of the head.
    ahead = bool(getattr(config, "mtp_loss_weight", 0))
    parameters = count.activated_non_embedding + (1 + ahead) * config.vocab_size * config.hidden_size
    layers = config.num_hidden_layers + ahead
    heads = config.num_attention_heads
    linear_layers = (getattr(config, "layer_types", None) or []).count("linear_attention")
    if getattr(config, "qk_nope_head_dim", None):
        query_and_value = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    else:
        query_and_value = 2 * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    mixing = (layers - linear_layers) * 2 * heads * query_and_value * length
    if linear_layers:
        mixing += linear_layers * 6 * config.linear_num_heads * config.linear_head_dim**2
    return 6 * parameters + 3 * mixing


def depth_attention_summary(depth_attentions: Iterable[Tensor | None]) -> dict[str, float]:
    """Summarise how the depth attention weights `a` of the sublayers and the output are spread over their K sources.

    Weights are divided by their sum first, since sigmoids do not add up to one.

    Args:
        depth_attentions: The weights of each sublayer and of the output, `[sources, batch, seq]`, of any dtype; `None`
            for a sublayer without weights.

    Returns:
        Means over tokens and over the sublayers with K > 1 sources, empty if there is none. `depth_entropy`:
        `H(a) / log K`, 1 for uniform weights, 0 for a single source. `depth_distance`: the distance from uniform
        weights, `sum_i |a_i - 1/K| / 2`, the share of the weight that would have to move. `depth_weight_nearest` and
        `depth_weight_embedding`: the weight on the last and on the first source.
    """
    several = [weights.float() for weights in depth_attentions if weights is not None and len(weights) > 1]
    if not several:
        return {}
    spread = [share_measures(a) for a in several]
    measures = {
        "depth_entropy": [entropy for entropy, _ in spread],
        "depth_distance": [distance for _, distance in spread],
        "depth_weight_nearest": [a[-1] / a.sum(0) for a in several],
        "depth_weight_embedding": [a[0] / a.sum(0) for a in several],
    }
    return {name: torch.stack([value.mean() for value in values]).mean().item() for name, values in measures.items()}


__all__ = ["depth_attention_summary", "device_name", "flops_per_token", "peak_flops"]
