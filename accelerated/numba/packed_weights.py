"""Weights in MXFP4 by the compiled loops: products with a few tokens that read the codes, and decoding.

PyTorch has no operation on numbers of four bits. Its lookups of each byte take several times as long as the product.
"""

import torch
from torch import Tensor

from .. import compat
from ..tensors import packed
from . import call, engine
from .activation import WIDE

# For more tokens, the product of matrices with a decoded weight is faster than one product after another.
_FEW = 4


def packed_linear(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor | None:
    """Compute `F.linear` of a few tokens with a packed weight, in float32, without decoding it in memory.

    Args:
        x: `[tokens, in]`.
        codes: `[out, in / 2]` uint8.
        scales: `[out, in / 32]` uint8.

    Returns:
        `[tokens, out]` in the dtype of `x`, without a gradient; `None` for many tokens, or if the loops do not run on
        these tensors.
    """
    if x.ndim != 2 or not 0 < len(x) <= _FEW or torch.is_autocast_enabled("cpu"):  # which would change the dtype
        return None
    if call.why_unfit(x) is not None or not _runs(codes, scales, x.dtype):
        return None
    tokens, columns = x.shape
    # Of each 32 columns the even ones first, as the loops take them.
    vectors = packed(x.detach().float().view(tokens, -1, 16, 2).transpose(-1, -2).reshape(tokens, columns))
    result = torch.empty((tokens, len(codes)), dtype=x.dtype, device="cpu")
    call.packed_product(packed(codes), packed(scales), vectors, result)
    return result


def decode_mxfp4(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Decode a packed weight exactly.

    Args:
        codes: `[out, in / 2]` uint8.
        scales: `[out, in / 32]` uint8.
        dtype: dtype of the result.

    Returns:
        `[out, in]`; `None` if the loops do not run on these tensors.
    """
    if not _runs(codes, scales, dtype):
        return None
    result = torch.empty((len(codes), 2 * codes.shape[1]), dtype=dtype, device="cpu")
    call.unpack(packed(codes), packed(scales), result)
    return result


def _runs(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the loops run: on wide rows of plain tensors, if nothing observes them."""
    if codes.ndim != 2 or 2 * codes.shape[1] < WIDE or codes.shape[1] % 16 or dtype not in call.DTYPES:
        return False
    if call.why_unfit(codes) is not None or call.why_unfit(scales) is not None:
        return False
    return compat.why_operations_are_observed() is None and engine.why_loops_do_not_run(_trial, dtype) is None


def _trial(dtype: torch.dtype) -> None:
    """Compile the loops and run them once, on a weight of ones.

    Args:
        dtype: dtype of the numbers.

    Raises:
        RuntimeError: the numbers are wrong.
    """
    codes = torch.full((3, 32), 0x22, dtype=torch.uint8, device="cpu")
    scales = torch.full((3, 2), 127, dtype=torch.uint8, device="cpu")
    weight, result = (torch.zeros(shape, dtype=dtype, device="cpu") for shape in ((3, 64), (2, 3)))
    call.unpack(codes, scales, weight)
    call.packed_product(codes, scales, torch.ones((2, 64), device="cpu"), result)
    if not ((weight == 1).all() and (result == 64).all()):
        raise RuntimeError("the first call returned wrong numbers")


__all__ = ["decode_mxfp4", "packed_linear"]
