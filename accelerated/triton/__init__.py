"""Depth attention on a GPU: our Triton kernels, and the operation of flash-linear-attention, behind one interface."""

from ..interface import Implementation
from . import direct, flash_linear_attention, implementation
from .implementation import kernels_available
from .launch import phase_one, read_fused

IMPLEMENTATIONS = {
    flash_linear_attention.NAME: flash_linear_attention.IMPLEMENTATION,
    "triton": Implementation(
        run=implementation.run,
        supports=implementation.supports,
        pays=implementation.pays,
        inference_plan=implementation.inference_plan,
        training_plan=direct.training_plan,
        direct=direct.attend,
    ),
}

__all__ = ["IMPLEMENTATIONS", "kernels_available", "phase_one", "read_fused"]
