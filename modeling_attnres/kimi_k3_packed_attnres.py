"""Packed weights of Kimi K3's routed experts: their formats, their values, and products with them.

A packed weight has two or three tensors, its *parts*: codes of four bits, a scale for each group of columns, and in
NVFP4 a scale for the whole weight. A model holds the parts as they lie in a checkpoint, as bytes of dtype uint8, so
that `model.to(dtype)` leaves them unchanged.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .functional_attnres import accelerated

# E2M1, by code: two bits of exponent, one of mantissa; bit 3 is the sign, also of zero.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 += tuple(-value for value in _E2M1)
# Code of the largest scale of MXFP4, 2^125: with the next one a 6 is beyond bfloat16. 255 is the code of NaN.
LARGEST_SCALE = 252


def _decode_codes(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values `[out, in]` of codes that are packed as uint8 `[out, in / 2]`.

    The low bits of a byte are the even column. `dtype` must be bfloat16 or float32.
    """
    # A pair of values for each byte.
    values = torch.tensor(_E2M1, dtype=dtype, device=packed.device)
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), -1)
    # A pair is looked up as one number, which takes less than half the time.
    whole = torch.int32 if dtype.itemsize == 2 else torch.int64
    return pairs.view(whole).squeeze(1)[packed.int()].view(dtype)


def decode_mxfp4(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Decode MXFP4 exactly.

    Args:
        packed: `[out, in / 2]` uint8, two numbers of four bits each; the low bits are the even column.
        scale: `[out, in / 32]` uint8, exponents plus 127.
        dtype: dtype of the result. bfloat16 and float32 hold every value exactly.

    Returns:
        `[out, in]`.
    """
    if dtype not in (torch.bfloat16, torch.float32):  # the exponents of others differ
        return decode_mxfp4(packed, scale).to(dtype)
    numbers = _decode_codes(packed, dtype)
    # The bits of the power of two as a float32; exponent 0 stands for the denormal 2^-127.
    powers = scale.int() << 23
    powers = powers.masked_fill_(scale == 0, 1 << 22).view(torch.float32).to(dtype)
    return (numbers.unflatten(1, (-1, 32)) * powers.unsqueeze(-1)).flatten(1)


def decode_nvfp4(packed: Tensor, scale: Tensor, global_scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode NVFP4 as compressed-tensors does: code times (scale / global scale) in float32.

    Args:
        packed: `[out, in / 2]` uint8, as for [`decode_mxfp4`].
        scale: `[out, in / 16]` float8 (E4M3), or its bytes.
        global_scale: `[n]` float32, or its bytes. Each of the n scales belongs to `out / n` rows.
        dtype: dtype of the result, to which the products are rounded once.

    Returns:
        `[out, in]`.
    """
    # The four bytes of a number may lie anywhere in a file or memory, so copy them.
    divisors = global_scale.clone().view(torch.float32)
    scales = scale.view(torch.float8_e4m3fn).float().unflatten(0, (len(divisors), -1)) / divisors[:, None, None]
    numbers = None
    if accelerated is not None and not torch.compiler.is_compiling():
        # MXFP4 has the same codes, and its scale 127 is one.
        ones = torch.full((len(packed), packed.shape[1] // 16), 127, dtype=torch.uint8, device=packed.device)
        numbers = accelerated.decode_mxfp4(packed, ones, torch.float32)
    if numbers is None:
        numbers = _decode_codes(packed, torch.float32)
    return (numbers.unflatten(1, (-1, 16)) * scales.flatten(0, 1).unsqueeze(-1)).flatten(1).to(dtype)


def check_scales(subject: str, scale: Tensor) -> None:
    """Raise `ValueError` if a scale is NaN, has a wrong sign, or is too large for weights in bfloat16.

    Args:
        subject: the tensor, for the message.
        scale: the scales, of any shape: uint8 of MXFP4, float8 or float32 of NVFP4.
    """
    if scale.dtype is torch.uint8:
        is_wrong = bool(scale.numel() and scale.max() > LARGEST_SCALE)
    else:
        wide = scale.float()
        is_divisor = scale.dtype is torch.float32
        is_wrong = not (wide.isfinite() & (wide > 0 if is_divisor else wide >= 0)).all()
    if is_wrong:
        raise ValueError(f"{subject} holds a scale of NaN or beyond bfloat16. Copy the file again.")


class Packing(NamedTuple):
    """A format of packed weights."""

    name: str
    """Its name in a release's `quantization_config`."""
    title: str
    """Its name in messages."""
    group: int
    """Number of columns that share a scale."""
    parts: dict[str, torch.dtype]
    """Names of the parts, each with its dtype in a checkpoint. There each name follows `weight_`."""
    decode: Callable[..., Tensor]
    """Return the weight from its parts, in the dtype that may follow them. The default dtype holds all values."""

    def shapes(self, rows: int, columns: int, weights: int = 1) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parts in a checkpoint. Several weights are joined along their rows.

        Args:
            rows: number of rows of all weights.
            columns: number of columns.
            weights: number of weights.
        """
        shapes = {"packed": (rows, columns // 2), "scale": (rows, columns // self.group), "global_scale": (weights,)}
        return {part: shapes[part] for part in self.parts}

    def byte_shapes(self, rows: int, columns: int, weights: int = 1) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parts as bytes; the arguments are those of [`shapes`]."""
        shapes = self.shapes(rows, columns, weights)
        return {part: (*shape[:-1], shape[-1] * self.parts[part].itemsize) for part, shape in shapes.items()}


MXFP4 = Packing("mxfp4-pack-quantized", "MXFP4", 32, {"packed": torch.uint8, "scale": torch.uint8}, decode_mxfp4)
NVFP4 = Packing(
    "nvfp4-pack-quantized",
    "NVFP4",
    16,
    {"packed": torch.uint8, "scale": torch.float8_e4m3fn, "global_scale": torch.float32},
    decode_nvfp4,
)
PACKINGS = {packing.name: packing for packing in (MXFP4, NVFP4)}


def packed_linear(x: Tensor, packing: Packing, parts: Sequence[Tensor]) -> Tensor:
    """Compute `F.linear` with a packed weight, which is decoded for this call and never trained.

    Args:
        x: `[tokens, in]`.
        packing: format of the weight.
        parts: the parts of the weight `[out, in]`.

    Returns:
        `[tokens, out]`.
    """
    # Transforms and tracers need plain operations.
    is_transformed = torch.autograd.forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()
    if is_transformed or torch.jit.is_tracing() or not (torch.is_grad_enabled() and x.requires_grad):
        return _linear(x, packing.name, parts)
    return _PackedLinear.apply(x, packing.name, *parts)


def _linear(x: Tensor, packing: str, parts: Sequence[Tensor]) -> Tensor:
    """Compute [`packed_linear`] without a gradient, for a few tokens by the loops of an installed `attnres`."""
    result = None
    if accelerated is not None and packing == MXFP4.name and not torch.compiler.is_compiling():
        codes, scales = parts
        result = accelerated.packed_linear(x, codes, scales)
    return F.linear(x, _decode(packing, parts, x.dtype)) if result is None else result


def _decode(packing: str, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Decode a weight, by the loops of an installed `attnres` if they run here."""
    result = None
    if accelerated is not None and packing == MXFP4.name and not torch.compiler.is_compiling():
        codes, scales = parts
        result = accelerated.decode_mxfp4(codes, scales, dtype)
    return PACKINGS[packing].decode(*parts, dtype) if result is None else result


class _PackedLinear(torch.autograd.Function):
    """A product with a packed weight that keeps the packed parts for its backward pass, and decodes them again."""

    @staticmethod
    def forward(ctx, *arguments: Any) -> Tensor:
        # Not `(ctx, x, packing, *parts)`: `torch.compile` would mistake it for a signature without `ctx`.
        x, packing, *parts = arguments
        ctx.save_for_backward(*parts)
        ctx.packing, ctx.dtype = packing, x.dtype
        return _linear(x, packing, parts)

    @staticmethod
    def backward(ctx, grad: Tensor):
        parts = ctx.saved_tensors
        # Under autocast the product was computed in 16 bits, so its gradient comes in 16 bits.
        weight = _decode(ctx.packing, parts, grad.dtype)
        return (grad @ weight).to(ctx.dtype), None, *(None for _ in parts)
