"""Implementations of depth attention for CPUs and GPUs, and plans for all reads of a pass.

Functions for delta attention, and for SiTU, the activation of Kimi K3, make these faster on CPUs.

`IMPLEMENTATIONS` holds the implementations that are faster than PyTorch's operations, in order of preference where
they pay. This folder is installed and never travels with weights. It imports no other part of `attnres`, and imports
`numba` and `triton` at their first use only.
"""

from typing import TYPE_CHECKING

from torch import nn

from . import numba, registration, triton
from .inference_plan import InferencePlan
from .interface import INTERFACE, Decoder, Implementation
from .numba.activation import situ, situ_grads
from .training_plan import TrainingPlan

if TYPE_CHECKING:
    from transformers.utils.generic import GeneralInterface

    from .interface import DeltaAttention

IMPLEMENTATIONS: dict[str, Implementation] = {"numba": numba.IMPLEMENTATION, **triton.IMPLEMENTATIONS}


def register(interface: "GeneralInterface") -> None:
    """Add all implementations, and an `auto` that chooses among them, to the models' mapping `DEPTH_ATTENTION`."""
    registration.register(interface, IMPLEMENTATIONS, IMPLEMENTATIONS["triton"].direct)


def inference_plan(model: Decoder, connection: type[nn.Module], key_norm: type[nn.Module]) -> InferencePlan | None:
    """Make a plan that reads in place of a decoder's connections in a pass without gradients.

    Args:
        model: the decoder.
        connection: the class of all connections. A derived class gets no plan, because it may compute more.
        key_norm: the class of all key norms.

    Returns:
        The plan, or `None` if the model must call its connections one by one.
    """
    return registration.inference_plan(model, IMPLEMENTATIONS, (connection, key_norm))


def training_plan(model: Decoder, connection: type[nn.Module], key_norm: type[nn.Module]) -> TrainingPlan | None:
    """Make a plan that reads in place of a decoder's connections in a pass with gradients, as [`inference_plan`].

    It computes each read together with the norm that follows.

    Args:
        model: the decoder.
        connection: the class of all connections.
        key_norm: the class of all key norms.

    Returns:
        The plan, or `None` if the model must call its connections one by one.
    """
    return registration.training_plan(model, IMPLEMENTATIONS, (connection, key_norm))


def accelerate_delta_attention(attention: "DeltaAttention") -> None:
    """Replace functions of a delta attention layer by ones that are faster without a GPU kernel; its weights stay.

    Args:
        attention: a `DeltaAttention` of the model's files.
    """
    from .delta_attention import accelerate

    # Model code that an earlier version saved uses the layer of `transformers`, whose functions cannot be replaced.
    if hasattr(attention, "convolve"):
        accelerate(attention)


__all__ = [
    "IMPLEMENTATIONS",
    "INTERFACE",
    "Implementation",
    "InferencePlan",
    "TrainingPlan",
    "accelerate_delta_attention",
    "inference_plan",
    "register",
    "situ",
    "situ_grads",
    "training_plan",
]
