"""Depth attention by the fused operation of flash-linear-attention, `fla.ops.attnres`. Users choose it by name only.

The operation has no scale `sum`, no gradient through the weights and no second derivatives. PyTorch's operations add
these here. The operation does not check addresses, so [`supports`] does.
"""

import functools
from collections.abc import Sequence
from importlib.metadata import version
from inspect import signature
from types import ModuleType

import torch
from torch import Tensor

from ..autograd import (
    BackwardRequest,
    Gradients,
    add_later_grad,
    depth_attention_in_operations,
    differentiable,
)
from ..compat import why_operations_are_observed
from ..tensors import PLAIN, packed
from .launch import DTYPES

_BYTES = 16  # the kernels load this many at once, so every row must begin at a multiple of them
_FORWARD = {"q", "residuals", "res", "w", "ow", "eps", "scale", "checkpoint_level"}
_BACKWARD = _FORWARD | {"do", "o_pre", "rstd", "logit", "lse"}
# Arguments of both halves: no norm after the mixture, logits not scaled, no mixture kept for the backward pass.
_OPTIONS = {"ow": None, "scale": 1.0, "checkpoint_level": 1}


@functools.cache
def _operations() -> ModuleType | str:
    """Return the module with both halves of the operation, or why they cannot be used. Loading it takes seconds."""
    try:
        from fla.ops.attnres import fused

        halves = {fused.fused_attnres_fwd: _FORWARD, fused.fused_attnres_bwd: _BACKWARD}
    except ModuleNotFoundError:
        return "fla-core is not installed"
    except Exception as error:  # an older version lacks the halves, or Triton does not load
        return f"fla-core {version('fla-core')} does not load: {error}"
    if any(signature(half).parameters.keys() != names for half, names in halves.items()):
        return f"the operation of fla-core {version('fla-core')} takes other arguments than that of 0.6.0"
    return fused


def supports(query: Tensor, sources: Sequence[Tensor]) -> str | None:
    """Return why the operation cannot run on these tensors, or `None` if it can; see [`Implementation`]."""
    if not query.is_cuda:
        return f"the sources are on {query.device}, not on a GPU"
    reason = "the function is compiled" if torch.compiler.is_compiling() else why_operations_are_observed()
    if reason is not None:
        return reason
    first = sources[0]
    for source in sources:
        if type(source) not in PLAIN or source.device != query.device:
            return "fla-core takes plain tensors on one GPU"
        if source.dtype != first.dtype or first.dtype not in DTYPES:
            return "fla-core takes sources of one dtype: float32, bfloat16 or float16"
        if source.data_ptr() % _BYTES or source.shape[-1] * source.element_size() % _BYTES:
            return f"fla-core takes rows that begin at a multiple of {_BYTES} bytes"
    if not first.numel():
        return "fla-core takes at least one token"
    operations = _operations()
    return operations if isinstance(operations, str) else None


def pays(query: Tensor, sources: Sequence[Tensor]) -> bool:
    """Return false: `auto` does not choose an operation that tunes itself for seconds at each new width."""
    return False


def _pointers(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the tensors, padded by the first one to a number that `fla` has a kernel for: 8, 16, 32, ..."""
    number = max(8, 1 << (len(tensors) - 1).bit_length())
    return (*tensors, *[tensors[0]] * (number - len(tensors)))


def _arguments(query: Tensor, sources: Sequence[Tensor], eps: float) -> dict:
    sources = tuple(packed(source) for source in sources)
    query = packed(query)
    # The norm's weight is in the query already.
    return _OPTIONS | {
        "q": query, "w": torch.ones_like(query), "residuals": sources, "res": _pointers(sources), "eps": eps,
    }  # fmt: skip


def _forward(
    query: Tensor, sources: Sequence[Tensor], eps: float, is_sum: bool
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    with torch.cuda.device_of(query):
        result, _, *saved = _operations().fused_attnres_fwd(**_arguments(query, sources, eps))
    _, logits, log_sum = saved
    return result.mul_(len(sources)) if is_sum else result, (logits - log_sum).exp(), tuple(saved)


def _backward(request: BackwardRequest) -> Gradients:
    query, sources = request.query, request.sources
    grad = packed(request.grad * len(sources) if request.is_sum else request.grad)
    saved = dict(zip(("rstd", "logit", "lse"), request.saved))
    with torch.cuda.device_of(query):
        grads, grad_query, *_ = _operations().fused_attnres_bwd(
            do=grad, o_pre=None, **saved, **_arguments(query, sources, request.eps)
        )
    all_grads = [grad_query, *grads]
    if request.grad_weights is not None:  # the operation ignores gradients of the weights
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in (query, *sources)]
            weights = depth_attention_in_operations(leaves[0], leaves[1:], request.eps, request.is_sum)[1]
            through_weights = torch.autograd.grad(weights, leaves, request.grad_weights)
        all_grads = [grad + through for grad, through in zip(all_grads, through_weights)]
    all_grads[1:] = [add_later_grad(*both) for both in zip(all_grads[1:], request.later_grads)]
    needed = (request.needs_query, *request.needs_sources)
    grad_query, *grad_sources = [grad if is_needed else None for grad, is_needed in zip(all_grads, needed)]
    return grad_query, grad_sources


run = differentiable(_forward, _backward)

__all__ = ["pays", "run", "supports"]
