"""Checks and copies of tensors that every implementation makes before a kernel gets an address."""

from torch import Tensor, nn

# Types whose numbers lie at `data_ptr()`. A subclass may be distributed, quantised or on another device.
PLAIN = (Tensor, nn.Parameter)


def packed(tensor: Tensor) -> Tensor:
    """Return the tensor contiguous and without a pending negation: itself if it is so already, or else a copy."""
    # The checks take a fraction of the time of the two operations, which would return the tensor as it is.
    return tensor if tensor.is_contiguous() and not tensor.is_neg() else tensor.contiguous().resolve_neg()


__all__ = ["PLAIN", "packed"]
