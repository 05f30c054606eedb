"""Where the gates of a retrofitted attention start, so that its function stays, and whether they are still there.

At `W = 0`, `Y * 2 sigmoid(X W)` and `Y + silu(X W)` are `Y` exactly; no other form of the gate is, for any `W`.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from attnres import ResidualConfig
from attnres.attention_gate_attnres import GATE_FIELDS, GatedAttention, check_attention_gate

_FUNCTION = ("attention_gate_form", "attention_gate_activation", "attention_gate_scale")
_EXACT = (("multiply", "sigmoid", "double"), ("add", "silu", "unit"))


def plan_gate(config: ResidualConfig, **fields: str | None) -> None:
    """Set the fields of the gate; `attention_gate_scale` becomes `"double"` if only that keeps the function.

    Raises:
        ValueError: a value is not allowed, or would change the function, or the attention has a gate already.
    """
    chosen = {field: value for field, value in fields.items() if value is not None}
    if not chosen:
        return
    if config.attention_gate is not None:
        raise ValueError(f"the model has attention_gate={config.attention_gate!r} already: a retrofit adds the first.")
    if "attention_gate" not in chosen:
        field, value = next(iter(chosen.items()))
        raise ValueError(f"`{field}` is {value!r}, but without `attention_gate` there is no gate: give its place too.")
    scale = "attention_gate_scale"
    function = tuple((GATE_FIELDS | chosen | {scale: chosen.get(scale, "double")})[field] for field in _FUNCTION)
    for field, value in (GATE_FIELDS | {scale: "double" if function in _EXACT else "unit"} | chosen).items():
        setattr(config, field, value)
    check_attention_gate(config)
    if reason := _inexact(config):
        raise ValueError(f"{reason}.")


def differs_from_ungated(config: ResidualConfig, tensors: Mapping[str, Tensor]) -> str | None:
    """Why a model with these tensors of its gates may be another function than one without gates, or `None`."""
    if config.attention_gate is None:
        return None
    for name, tensor in tensors.items():
        if tensor.count_nonzero():
            return f"`{name}` is a trained attention gate, with entries up to {tensor.abs().max():.3g}"
    return _inexact(config)


def is_gated(config: PreTrainedConfig) -> bool:
    return getattr(config, "attention_gate", None) is not None


@torch.no_grad()
def start_gates(model: nn.Module, dtype: torch.dtype) -> None:
    """Give the gates of a model on the meta device their tensors, on the CPU and at zero."""
    for module in model.modules():
        if isinstance(module, GatedAttention):
            module.g_proj.to_empty(device="cpu").to(dtype).weight.zero_()


def _inexact(config: ResidualConfig) -> str | None:
    function = tuple(getattr(config, field) for field in _FUNCTION)
    if function in _EXACT:
        return None
    has = ", ".join(f"`{field}` {value!r}" for field, value in zip(_FUNCTION, function))
    exact = " and ".join("/".join(values) for values in _EXACT)
    return f"a gate with {has} never leaves attention as it was; {exact} do, where its weights are zero"


__all__ = ["differs_from_ungated", "is_gated", "plan_gate", "start_gates"]
