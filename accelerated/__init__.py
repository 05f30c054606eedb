"""Implementations of depth attention for CPUs and GPUs, and readers for passes without gradients.

The models look here for what runs faster than PyTorch's operations: each entry of `IMPLEMENTATIONS` is one way, in
order of preference. This folder is installed and never travels with weights; it imports nothing of `attnres` but
itself, and neither `numba` nor `triton` before they are used.
"""

from collections.abc import MutableMapping
from typing import Any

from torch import nn

from . import numba, registration, triton
from .inference_reader import InferenceReader
from .interface import INTERFACE, Implementation

IMPLEMENTATIONS: dict[str, Implementation] = {"numba": numba.IMPLEMENTATION, **triton.IMPLEMENTATIONS}


def register(interface: MutableMapping) -> None:
    """Add all of them, and an `auto` that chooses among them, to the models' mapping from names to implementations."""
    registration.register(interface, IMPLEMENTATIONS)


def reader(model: nn.Module, connection: type[nn.Module], key_norm: type[nn.Module]) -> Any:
    """What may read in place of the connections of a decoder in a pass without gradients, or `None`.

    Args:
        model: the decoder.
        connection: the class that computes depth attention; what is derived from it may compute more.
        key_norm: the same of its key norm.
    """
    return registration.reader(model, IMPLEMENTATIONS, (connection, key_norm))


def accelerate_delta_attention(attention: nn.Module) -> None:
    """Make a `DeltaAttention` of the model's files, on the same weights, faster where no GPU kernel applies."""
    from .delta_attention import accelerate

    # Code that an earlier version saved beside its weights has the layer of `transformers`, which takes no functions.
    if hasattr(attention, "convolve"):
        accelerate(attention)


__all__ = [
    "IMPLEMENTATIONS",
    "INTERFACE",
    "Implementation",
    "InferenceReader",
    "accelerate_delta_attention",
    "reader",
    "register",
]
