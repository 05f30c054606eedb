"""Implementations of depth attention for CPUs and GPUs, and plans for all reads of a pass.

Functions for delta attention, and for SiTU and the packed weights of Kimi K3, make these faster on CPUs.

`IMPLEMENTATIONS` holds the implementations that are faster than PyTorch's operations. This folder is installed and
never travels with weights. It imports no other part of `attnres`, and imports `numba` and `triton` at their first use
only.
"""

from typing import TYPE_CHECKING

from .inference_plan import InferencePlan
from .interface import INTERFACE, Implementation
from .numba.activation import situ, situ_grads
from .numba.packed_weights import decode_mxfp4, packed_linear
from .registration import IMPLEMENTATIONS, inference_plan, register, training_plan
from .training_plan import TrainingPlan

if TYPE_CHECKING:
    from .interface import DeltaAttentionLayer


def accelerate_delta_attention(attention: "DeltaAttentionLayer") -> None:
    """Replace functions of a delta attention layer by ones that are faster without a GPU kernel; its weights stay.

    Args:
        attention: a `DeltaAttention` of the model's files.
    """
    from .delta_attention import accelerate  # at first use, because it imports Kimi Linear of `transformers`

    accelerate(attention)


__all__ = [
    "IMPLEMENTATIONS",
    "INTERFACE",
    "Implementation",
    "InferencePlan",
    "TrainingPlan",
    "accelerate_delta_attention",
    "decode_mxfp4",
    "inference_plan",
    "packed_linear",
    "register",
    "situ",
    "situ_grads",
    "training_plan",
]
