"""Checks and copies of tensors that every implementation needs before a kernel sees an address."""

from torch import Tensor, nn

# No subclass: those are tensors of other devices, distributed or quantised ones, and have no plain address.
PLAIN = (Tensor, nn.Parameter)


def packed(tensor: Tensor) -> Tensor:
    """Return the tensor with its numbers in a row; a copy where they are not."""
    return tensor.contiguous().resolve_neg()


__all__ = ["PLAIN", "packed"]
