"""Parameter groups for AttnRes models: what decays, what does not, and at which learning rate."""

from typing import Any

from torch import nn

from attnres.loading_attnres import attn_res_tensors


def parameter_groups(
    model: nn.Module, learning_rate: float, weight_decay: float, residual_lr_factor: float = 1.0
) -> list[dict[str, Any]]:
    """Groups for a PyTorch optimizer: matrices with weight decay, vectors without, and the AttnRes tensors apart.

    Args:
        model: any model; only parameters that require a gradient are taken.
        learning_rate: of the backbone.
        weight_decay: of matrices. Vectors (norms, biases) and AttnRes tensors do not decay.
        residual_lr_factor: times `learning_rate`, the rate of the pseudo-queries and key norms.
    """
    residual = set(attn_res_tensors(model))
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    backbone = [parameter for name, parameter in trainable if name not in residual]
    groups = [
        {"params": [p for p in backbone if p.ndim > 1], "lr": learning_rate, "weight_decay": weight_decay},
        {"params": [p for p in backbone if p.ndim <= 1], "lr": learning_rate, "weight_decay": 0.0},
        {
            "params": [parameter for name, parameter in trainable if name in residual],
            "lr": learning_rate * residual_lr_factor,
            "weight_decay": 0.0,
        },
    ]
    return [group for group in groups if group["params"]]
