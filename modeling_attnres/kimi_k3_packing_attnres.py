"""Pack the routed experts of Kimi K3 as MXFP4, as a release has them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from .kimi_k3_packed_attnres import LARGEST_SCALE, MXFP4

GROUP = MXFP4.group
# Halfway between two neighbours of 0, 0.5, 1, 1.5, 2, 3, 4 and 6. A weight there goes to the even code.
_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)

# `quantization_config` of a model whose experts were packed here. The released one does not name the projections of the
# latent space and the queries of attention residuals, which are not packed either.
QUANTIZATION = {
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "dynamic": False,
                "group_size": GROUP,
                "num_bits": 4,
                "scale_dtype": "torch.uint8",
                "strategy": "group",
                "symmetric": True,
                "type": "float",
            },
            "input_activations": None,
            "output_activations": None,
        }
    },
    "format": MXFP4.name,
    "ignore": [
        r"re:.*self_attn.*",
        r"re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        r"re:.*routed_expert_(down|up)_proj.*",
        r"re:.*_res_proj.*",
        r"re:.*lm_head.*",
        r"re:.*vision_tower.*",
        r"re:.*mm_projector.*",
    ],
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}


def encode_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Pack a weight as MXFP4, with the scale of each group by the rule EVEN.

    compressed-tensors and torchao have the same rule. The largest absolute weight of a group is rounded to one binary
    digit after the point, such as 1.75 * 2^n to 2^(n + 1). The scale is the power of two of this number, divided by 4.
    So the largest weight is less than 7 times the scale, and weights between 6 and 7 times the scale become 6 times the
    scale. Zeros keep their sign.

    Args:
        weight: `[..., out, in]`, of any floating point dtype.

    Returns:
        Codes `[..., out, in / 2]` and scales `[..., out, in / 32]`, both uint8; see [`decode_mxfp4`].

    Raises:
        ValueError: `in` is not a multiple of 32, or a weight is not finite.
    """
    if weight.shape[-1] % GROUP:
        raise ValueError(f"MXFP4 packs {GROUP} inputs as a group, but the weight has {weight.shape[-1]} of them.")
    groups = weight.to(torch.promote_types(weight.dtype, torch.float32)).unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1)
    if not largest.isfinite().all():
        raise ValueError("the weight holds NaN or infinite values, which MXFP4 cannot hold.")
    significand, exponent = torch.frexp(largest)  # the significand is in [0.5, 1)
    scale = (exponent + (significand >= 0.875) + 124).masked_fill_(largest == 0, 0).clamp_(0, LARGEST_SCALE)
    inverse = ((254 - scale) << 23).view(torch.float32)  # the bits of the power of two
    numbers = (groups * inverse.unsqueeze(-1)).abs_()
    codes = (groups.signbit()).to(torch.uint8) << 3
    for code, tie in enumerate(_TIES):
        codes += numbers >= tie if code % 2 else numbers > tie
    codes = codes.flatten(-2)  # (..., out, in)
    return codes[..., 0::2] | codes[..., 1::2] << 4, scale.to(torch.uint8)


def pack_experts(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict with the routed experts packed, under the names of a model whose experts are packed.

    Raises:
        ValueError: a width is not a multiple of 32, or a weight is not finite.
    """
    result = dict(state_dict)
    for name in state_dict:
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            try:
                packed, scale = encode_mxfp4(result.pop(name))
            except ValueError as error:
                raise ValueError(f"`{name}` cannot be packed: {error}") from error
            result |= {f"{name}_packed": packed, f"{name}_scale": scale}
    return result


__all__ = ["GROUP", "QUANTIZATION", "encode_mxfp4", "pack_experts"]
