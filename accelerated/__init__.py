"""Implementations of depth attention for CPUs and GPUs, and inference plans for passes without gradients.

Functions for delta attention, and for SiTU, the activation of Kimi K3, make these faster on CPUs.

`IMPLEMENTATIONS` holds the implementations that are faster than PyTorch's operations, in order of preference. This
folder is installed and never travels with weights. It imports no other part of `attnres`, and imports `numba` and
`triton` at their first use only.
"""

from collections.abc import MutableMapping, Sequence

from torch import Tensor, nn

from . import numba, registration, training_read, triton
from .inference_plan import InferencePlan
from .interface import INTERFACE, Implementation
from .numba.activation import situ, situ_grads

IMPLEMENTATIONS: dict[str, Implementation] = {"numba": numba.IMPLEMENTATION, **triton.IMPLEMENTATIONS}


def register(interface: MutableMapping) -> None:
    """Add all implementations, and an `auto` that chooses among them, to the models' mapping `DEPTH_ATTENTION`."""
    registration.register(interface, IMPLEMENTATIONS)


def inference_plan(model: nn.Module, connection: type[nn.Module], key_norm: type[nn.Module]) -> InferencePlan | None:
    """Make a plan that reads in place of a decoder's connections in a pass without gradients.

    Args:
        model: the decoder.
        connection: the class of all connections. A derived class gets no plan, because it may compute more.
        key_norm: the class of all key norms.

    Returns:
        The plan, or `None` if the model must call its connections one by one.
    """
    return registration.inference_plan(model, IMPLEMENTATIONS, (connection, key_norm))


def read_with_norm(
    connection: nn.Module, key_norm: nn.Module, norm: nn.Module, sources: Sequence[Tensor]
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """Read the input of a sublayer in training, and apply the norm that the sublayer begins with.

    Args:
        connection: the connection of the sublayer, of a class whose `forward` is depth attention.
        key_norm: its key norm.
        norm: the module that the sublayer begins with, called on the read's result alone.
        sources: the sources, each `[batch, seq, hidden]`.

    Returns:
        The normed input `[batch, seq, hidden]`, and the sources for the next read; `None` if the modules must be called
        one by one.
    """
    return training_read.read_with_norm(connection, key_norm, norm, sources, IMPLEMENTATIONS)


def accelerate_delta_attention(attention: nn.Module) -> None:
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
    "accelerate_delta_attention",
    "inference_plan",
    "read_with_norm",
    "register",
    "situ",
    "situ_grads",
]
