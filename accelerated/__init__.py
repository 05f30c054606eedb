"""Implementations of depth attention for CPUs and GPUs, and inference plans for passes without gradients.

The models look here for implementations that are faster than PyTorch's operations: `IMPLEMENTATIONS` holds them in
order of preference. This folder is installed and never travels with weights. It imports no other part of `attnres`,
and neither `numba` nor `triton` before they are used.
"""

from collections.abc import MutableMapping

from torch import nn

from . import numba, registration, triton
from .inference_plan import InferencePlan
from .interface import INTERFACE, Implementation

IMPLEMENTATIONS: dict[str, Implementation] = {"numba": numba.IMPLEMENTATION, **triton.IMPLEMENTATIONS}


def register(interface: MutableMapping) -> None:
    """Add all implementations, and an `auto` that chooses among them, to the models' mapping `DEPTH_ATTENTION`."""
    registration.register(interface, IMPLEMENTATIONS)


def inference_plan(model: nn.Module, connection: type[nn.Module], key_norm: type[nn.Module]) -> InferencePlan | None:
    """Make a plan that reads in place of a decoder's connections in a pass without gradients.

    Args:
        model: the decoder.
        connection: the class that computes depth attention; a class derived from it may compute more.
        key_norm: the class of its key norm.

    Returns:
        The plan, or `None` where the connections must be called themselves.
    """
    return registration.inference_plan(model, IMPLEMENTATIONS, (connection, key_norm))


def accelerate_delta_attention(attention: nn.Module) -> None:
    """Make a layer of delta attention faster where no GPU kernel applies; its weights stay.

    Args:
        attention: a `DeltaAttention` of the model's files.
    """
    from .delta_attention import accelerate

    # Model code that an earlier version saved has the layer of `transformers`, whose functions cannot be replaced.
    if hasattr(attention, "convolve"):
        accelerate(attention)


__all__ = [
    "IMPLEMENTATIONS",
    "INTERFACE",
    "Implementation",
    "InferencePlan",
    "accelerate_delta_attention",
    "inference_plan",
    "register",
]
