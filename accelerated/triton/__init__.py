"""Depth attention on a GPU: our Triton kernels, and the operation of flash-linear-attention, by one interface."""

from ..interface import Implementation
from . import flash_linear_attention, implementation
from .implementation import kernels_available
from .launch import phase_one, read_fused

IMPLEMENTATIONS = {
    "triton": Implementation(
        implementation.run, implementation.supports, implementation.pays, implementation.inference_plan
    ),
    "fla": Implementation(flash_linear_attention.run, flash_linear_attention.supports, flash_linear_attention.pays),
}

__all__ = ["IMPLEMENTATIONS", "kernels_available", "phase_one", "read_fused"]
