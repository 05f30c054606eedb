"""SiTU, the activation of Kimi K3, by the compiled loops. It reads and writes each number once.

PyTorch's operations make about fourteen passes over memory forward, and twice as many backward.
"""

import torch
from torch import Tensor

from .. import compat
from ..tensors import packed
from . import call, engine

# Rows from this width on run by the loops, as in depth attention. The number of rows does not decide: it depends on
# other tokens, which may go to the same expert, and the same token must always get the same bits.
WIDE = 256


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor | None:
    """Compute SiTU, `b tanh(gate / b) sigmoid(gate) * l tanh(up / l)`, in float32.

    Args:
        gate: `[..., width]`.
        up: `[..., width]`.
        beta: `b`.
        linear_beta: `l`; `None` leaves `up` unchanged.

    Returns:
        `[..., width]` in the dtype of `gate`, without a gradient; `None` if the loops do not run on these tensors.
    """
    if not _runs(gate, up):
        return None
    result = torch.empty(gate.shape, dtype=gate.dtype, device="cpu")
    call.situ(_in_rows(gate), _in_rows(up), result, beta, linear_beta)
    return result


def situ_grads(
    gate: Tensor, up: Tensor, grad: Tensor, beta: float, linear_beta: float | None
) -> tuple[Tensor, Tensor] | None:
    """Compute the gradients of `gate` and `up` in SiTU.

    Args:
        gate: `[..., width]`.
        up: `[..., width]`.
        grad: gradient of the result, `[..., width]`.
        beta: `b`.
        linear_beta: `l` or `None`.

    Returns:
        Both gradients `[..., width]`; `None` if the loops do not run on these tensors.
    """
    if not _runs(gate, up, grad):
        return None
    grad_gate, grad_up = (torch.empty(gate.shape, dtype=gate.dtype, device="cpu") for _ in range(2))
    call.situ_grads(_in_rows(gate), _in_rows(up), packed(grad), grad_gate, grad_up, beta, linear_beta)
    return grad_gate, grad_up


def _runs(*tensors: Tensor) -> bool:
    """Return whether the loops run: on wide rows of plain tensors of one shape and dtype, if nothing observes them."""
    shape, dtype = tensors[0].shape, tensors[0].dtype
    if not shape or shape[-1] < WIDE or dtype not in call.DTYPES:
        return False
    for tensor in tensors:
        if tensor.shape != shape or tensor.dtype is not dtype or call.why_unfit(tensor) is not None:
            return False
    return compat.why_operations_are_observed() is None and engine.why_loops_do_not_run(_trial, dtype) is None


def _in_rows(tensor: Tensor) -> Tensor:
    """Return the tensor as the loops take it: itself, or a copy if its rows do not lie at equal distances."""
    has_rows = tensor.is_contiguous() or (tensor.ndim == 2 and tensor.stride(1) == 1)
    return tensor if has_rows and not tensor.is_neg() else packed(tensor)


def _trial(dtype: torch.dtype) -> None:
    """Compile the loops and run them once: where the gate is large and negative, SiTU and its gradients are zero.

    Args:
        dtype: dtype of the rows.

    Raises:
        RuntimeError: the numbers are wrong.
    """
    gate, up, result = (torch.full((2, 5), fill, dtype=dtype, device="cpu") for fill in (-1e4, 1.0, 9.0))
    grads = gate.clone(), gate.clone()
    call.situ(gate, up, result, 4.0, 25.0)
    call.situ_grads(gate, up, up, *grads, 4.0, 25.0)
    if any(tensor.count_nonzero() for tensor in (result, *grads)):
        raise RuntimeError("the first call returned wrong numbers")


__all__ = ["WIDE", "situ", "situ_grads"]
