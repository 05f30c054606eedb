"""Add value residuals to a retrofitted model, with coefficients that keep the function the same: 0 and 1."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from attnres import ResidualConfig
from attnres.value_residual_attnres import ValueResidual, check_value_residual


def plan_value_residual(config: ResidualConfig, value_residual: str | None = None) -> None:
    """Set the field of value residuals in the configuration of a retrofit. Without a value, nothing changes.

    Args:
        config: The configuration of a model without value residuals. It is changed.
        value_residual: The start of the coefficients.

    Raises:
        ValueError: The value is not allowed, or would change the function, or the model has value residuals already.
    """
    if value_residual is None:
        return
    if config.value_residual is not None:
        raise ValueError(f"the model has value_residual={config.value_residual!r} already.")
    config.value_residual = value_residual
    check_value_residual(config)
    if value_residual != "standard":
        raise ValueError(f"`value_residual` is {value_residual!r}, but must be 'standard' in a retrofit.")


def differs_from_unmixed(tensors: Mapping[str, Tensor]) -> str | None:
    """Explain why a model with value residuals may compute another function than without; None if it does not.

    Args:
        tensors: The coefficients, by name.
    """
    for name, tensor in tensors.items():
        if tensor.count_nonzero():
            return f"`{name}` is not zero: its attention sees values of the first layer"
    return None


def mixes_values(config: PreTrainedConfig) -> bool:
    """Return whether the model of a configuration has value residuals."""
    return getattr(config, "value_residual", None) is not None


def start_value_residuals(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace the coefficients of a model on the meta device by their start on the CPU.

    Args:
        model: The model.
        dtype: The dtype of the weights. The coefficients get at least float32.
    """
    for module in model.modules():
        if isinstance(module, ValueResidual):
            module.to_empty(device="cpu").to(torch.promote_types(dtype, torch.float32)).reset_parameters()


__all__ = ["differs_from_unmixed", "mixes_values", "plan_value_residual", "start_value_residuals"]
