"""Depth attention on a GPU: our Triton kernels, and the operations of other libraries, behind one interface."""

from collections.abc import Callable

import torch

from ..interface import Implementation
from . import choices, direct, implementation
from .fast_attnres import FastAttnRes
from .flash_linear_attention import FlashLinearAttention
from .implementation import kernels_available
from .launch import phase_one, read_fused
from .liger import Liger

LIBRARIES = {library.name: library for library in (FlashLinearAttention(), Liger(), FastAttnRes())}
# Libraries first: they pay only where `choices` prefers them, and our kernels pay everywhere.
IMPLEMENTATIONS = {name: library.implementation() for name, library in LIBRARIES.items()} | {
    "triton": Implementation(
        run=implementation.run,
        supports=implementation.supports,
        pays=implementation.pays,
        inference_plan=implementation.inference_plan,
        training_plan=direct.training_plan,
        direct=direct.attend,
    ),
}


def direct_of_auto() -> Callable:
    """Return the direct path of `auto`: that of our kernels, where `choices` prefers them."""
    if choices.are_all("triton"):
        return direct.attend

    def attend(query, sources, *arguments, **options):
        is_ours = choices.chosen(len(sources), torch.is_grad_enabled()) == "triton"
        return direct.attend(query, sources, *arguments, **options) if is_ours else None

    return attend


__all__ = ["IMPLEMENTATIONS", "LIBRARIES", "direct_of_auto", "kernels_available", "phase_one", "read_fused"]
