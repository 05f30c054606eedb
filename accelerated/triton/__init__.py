"""Depth attention on a GPU: our Triton kernels, and the operation of flash-linear-attention, behind one interface."""

from dataclasses import replace

from ..interface import Implementation
from . import direct, flash_linear_attention, implementation, tested
from .implementation import kernels_available
from .launch import phase_one, read_fused

_KERNELS = Implementation(
    device="cuda",
    run=implementation.run,
    supports=implementation.supports,
    pays=implementation.pays,
    inference_plan=implementation.inference_plan,
)
_WITH_DIRECT_PATH = replace(_KERNELS, training_plan=direct.training_plan, direct=direct.attend)
IMPLEMENTATIONS = {flash_linear_attention.NAME: flash_linear_attention.IMPLEMENTATION, "triton": _WITH_DIRECT_PATH}
# What `auto` takes of these.
OF_AUTO = _WITH_DIRECT_PATH if tested.have_passed() else _KERNELS

__all__ = ["IMPLEMENTATIONS", "OF_AUTO", "kernels_available", "phase_one", "read_fused"]
