"""The call of a module with routed experts, with an error that says which setting helps.

By default `transformers` multiplies all experts at once, by `grouped_mm` of PyTorch. That takes some widths and dtypes
only, and its errors name neither the weights nor the setting.
"""

import torch
from torch import Tensor, nn

_ALIGNMENT = 16  # bytes
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def call_experts(module: nn.Module, hidden_states: Tensor) -> Tensor:
    """Compute the output `[batch, seq, hidden]` of an MLP with experts for an input of that shape.

    Raises:
        ValueError: `grouped_mm` cannot multiply the weights of the experts, because of their width or dtype.
    """
    # A graph has no handlers of exceptions, and other kernels for some of these weights.
    if torch.compiler.is_compiling():
        return module(hidden_states)
    try:
        return module(hidden_states)
    except RuntimeError as error:
        weight = _unfit_weight(module)
        if weight is None:
            raise
        raise ValueError(
            f"the experts' weights of shape {list(weight.shape)} and dtype {weight.dtype} cannot be multiplied by "
            f"`grouped_mm`, which takes 16 or 32 bits and rows of a multiple of {_ALIGNMENT} bytes. Make or load the "
            "model with `experts_implementation='eager'`, or call `model.set_experts_implementation('eager')`."
        ) from error


def _unfit_weight(module: nn.Module) -> Tensor | None:
    """Return a weight of a module's experts that `grouped_mm` does not take; `None` if it is not used or takes all."""
    experts = getattr(module, "experts", None)
    # A private field, but `transformers` has no other that holds the setting of a module.
    if getattr(getattr(experts, "config", None), "_experts_implementation", None) != "grouped_mm":
        return None
    weights = (weight for weight in experts.parameters() if weight.ndim == 3)  # (experts, out, in)
    return next((w for w in weights if w.dtype not in _DTYPES or w.shape[-1] * w.itemsize % _ALIGNMENT), None)
