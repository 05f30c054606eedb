"""Checks and copies of tensors that every implementation makes before a kernel gets an address."""

import torch
from torch import Tensor, nn

# Types whose numbers lie at `data_ptr()`. A subclass may be distributed, quantised or on another device.
PLAIN = (Tensor, nn.Parameter)


def packed(tensor: Tensor) -> Tensor:
    """Return the tensor contiguous and without a pending negation: itself if it is so already, or else a copy."""
    # The checks take a fraction of the time of the two operations, but a compiler cannot trace `is_neg`.
    if not torch.compiler.is_compiling() and tensor.is_contiguous() and not tensor.is_neg():
        return tensor
    return tensor.contiguous().resolve_neg()


__all__ = ["PLAIN", "packed"]
