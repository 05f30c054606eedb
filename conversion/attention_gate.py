"""Add gates to the attention of a retrofitted model, with initial values that keep the function the same.

At `W = 0`, `Y * 2 sigmoid(X W)` and `Y + silu(X W)` are exactly `Y`, the ungated attention. The other forms of the gate
differ from `Y` for every `W`, so a retrofit refuses them.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from attnres import ResidualConfig
from attnres.attention_gate_attnres import GATE_FIELDS, GatedAttention, check_attention_gate

# The fields that define the gate's function, and their values for which zero weights leave attention unchanged.
_FUNCTION = ("attention_gate_form", "attention_gate_activation", "attention_gate_scale")
_EXACT = (("multiply", "sigmoid", "double"), ("add", "silu", "unit"))


def plan_gate(config: ResidualConfig, **fields: str | None) -> None:
    """Set the fields of the gate in the configuration of a retrofit. Without any field, nothing changes.

    Args:
        config: The configuration of an ungated model. It is changed.
        fields: Fields of the gate; None stands for the default. The default of `attention_gate_scale` is `"double"`
            where only that keeps the function the same.

    Raises:
        ValueError: A value is not allowed, or would change the function, or the attention has a gate already.
    """
    chosen = {field: value for field, value in fields.items() if value is not None}
    if not chosen:
        return
    if config.attention_gate is not None:
        raise ValueError(f"the model has attention_gate={config.attention_gate!r} already, and takes no second gate.")
    if "attention_gate" not in chosen:
        field, value = next(iter(chosen.items()))
        raise ValueError(f"`{field}` is {value!r}, but without `attention_gate` there is no gate. Set that field too.")
    scale = "attention_gate_scale"
    # The sigmoid of zero is 1/2, so a gate that multiplies by it keeps the function only at twice the scale.
    doubled = GATE_FIELDS | {scale: "double"} | chosen
    is_exact = tuple(doubled[field] for field in _FUNCTION) in _EXACT
    for field, value in (doubled if is_exact else GATE_FIELDS | chosen).items():
        setattr(config, field, value)
    check_attention_gate(config)
    if reason := _inexact(config):
        raise ValueError(f"{reason}.")


def differs_from_ungated(config: ResidualConfig, tensors: Mapping[str, Tensor]) -> str | None:
    """Explain why a model with gates may compute another function than the same model without gates.

    Args:
        config: The configuration of the model.
        tensors: The tensors of its gates, by name.

    Returns:
        The reason, or None if the functions are the same.
    """
    if config.attention_gate is None:
        return None
    for name, tensor in tensors.items():
        if tensor.count_nonzero():
            return f"`{name}` is a trained attention gate, with entries up to {tensor.abs().max():.3g}"
    return _inexact(config)


def is_gated(config: PreTrainedConfig) -> bool:
    """Return whether the attention of a configuration's model has gates."""
    return getattr(config, "attention_gate", None) is not None


@torch.no_grad()
def start_gates(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace the gates' weights of a model on the meta device by zeros on the CPU.

    Args:
        model: The model.
        dtype: The dtype of the weights.
    """
    for module in model.modules():
        if isinstance(module, GatedAttention):
            module.g_proj.to_empty(device="cpu").to(dtype).weight.zero_()


def _inexact(config: ResidualConfig) -> str | None:
    """Return why a gate with zero weights changes attention, or None if it does not."""
    function = tuple(getattr(config, field) for field in _FUNCTION)
    if function in _EXACT:
        return None
    has = ", ".join(f"`{field}` {value!r}" for field, value in zip(_FUNCTION, function))
    exact = " and ".join("/".join(values) for values in _EXACT)
    return f"a gate with {has} changes attention even at zero weights; {exact} do not"


__all__ = ["differs_from_ungated", "is_gated", "plan_gate", "start_gates"]
