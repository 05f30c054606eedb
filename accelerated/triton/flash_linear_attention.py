"""Depth attention by the fused operation of flash-linear-attention, `fla.ops.attnres`, which users choose by name.

`auto` never takes it. It tunes itself for seconds at each new width, at the first call. It lacks the scale `sum`, a
gradient through the weights, the addition of gradients from later reads, and second derivatives. These are added by
PyTorch's operations, and tensors that it would misread are refused.
"""

import functools
from collections.abc import Sequence
from inspect import signature
from types import ModuleType

import torch
from torch import Tensor

from ..autograd import BackwardRequest, Gradients, add_later_grad, depth_attention_in_operations, differentiable
from ..compat import why_operations_are_observed
from ..interface import Implementation
from ..tensors import PLAIN, packed
from .launch import DTYPES

NAME, RELEASE = "fla", "0.6.0"
_BYTES = 16  # the kernels load this many at once, without a check, so every row must begin at a multiple of them
_FORWARD = {"q", "residuals", "res", "w", "ow", "eps", "scale", "checkpoint_level"}
# The two halves of `fused_attnres`, with the names of their arguments.
ARGUMENTS = {
    "fused_attnres_fwd": _FORWARD,
    "fused_attnres_bwd": _FORWARD | {"do", "o_pre", "rstd", "logit", "lse"},
}
# Arguments of both halves: no norm after the mixture, logits not scaled, no mixture kept for the backward pass.
_OPTIONS = {"ow": None, "scale": 1.0, "checkpoint_level": 1}


@functools.cache
def operation() -> ModuleType | str:
    """Return the module `fla.ops.attnres.fused`, whose import takes seconds, or why it cannot be used."""
    try:
        from fla.ops.attnres import fused

        functions = {name: getattr(fused, name) for name in ARGUMENTS}
    except ModuleNotFoundError as error:
        return f"fla-core is not installed, or lacks {error.name} (pip install fla-core)"
    except Exception as error:  # another version lacks the functions, or Triton does not load
        return f"fla-core does not load: {error}"
    if any(signature(function).parameters.keys() != ARGUMENTS[name] for name, function in functions.items()):
        return f"the operation of this fla-core takes other arguments than that of {RELEASE}"
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
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            return f"fla-core takes sources of one dtype, of {names}"
    if not first.numel():
        return "fla-core takes at least one token"
    if not all(source.data_ptr() for source in sources):
        return "the memory of a source was freed"
    row = first.shape[-1] * first.element_size()
    if row % _BYTES or any(source.data_ptr() % _BYTES for source in sources):
        return f"fla-core takes rows that begin at a multiple of {_BYTES} bytes"
    module = operation()
    return module if isinstance(module, str) else None


def _forward(
    query: Tensor, sources: Sequence[Tensor], eps: float, is_sum: bool
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    with torch.cuda.device_of(query):
        arguments = _arguments(packed(query), [packed(source) for source in sources], eps)
        # pyrefly: ignore[missing-attribute]  # `supports` has found that it is a module
        result, _, *saved = operation().fused_attnres_fwd(**arguments)
    _, logits, log_sum = saved
    return result.mul_(len(sources)) if is_sum else result, (logits - log_sum).exp(), tuple(saved)


def _backward(request: BackwardRequest) -> Gradients:
    query, sources = packed(request.query), [packed(source) for source in request.sources]
    grad = packed(request.grad * len(sources) if request.is_sum else request.grad)
    statistics = dict(zip(("rstd", "logit", "lse"), request.saved))
    with torch.cuda.device_of(query):
        arguments = _arguments(query, sources, request.eps)
        # pyrefly: ignore[missing-attribute]  # as in `_forward`
        grads, grad_query, *_ = operation().fused_attnres_bwd(do=grad, o_pre=None, **statistics, **arguments)
    all_grads = [grad_query, *grads]
    if request.grad_weights is not None:  # the operation has no gradient through the weights
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in (query, *sources)]
            weights = depth_attention_in_operations(leaves[0], leaves[1:], request.eps, request.is_sum)[1]
            through_weights = torch.autograd.grad(weights, leaves, request.grad_weights)
        all_grads = [grad + through for grad, through in zip(all_grads, through_weights)]
    all_grads[1:] = [add_later_grad(*both) for both in zip(all_grads[1:], request.later_grads)]
    needed = (request.needs_query, *request.needs_sources)
    grad_query, *grad_sources = [grad if is_needed else None for grad, is_needed in zip(all_grads, needed)]
    return grad_query, grad_sources


def _arguments(query: Tensor, sources: Sequence[Tensor], eps: float) -> dict:
    # There are kernels for 8, 16, 32, ... pointers.
    number = max(8, 1 << (len(sources) - 1).bit_length())
    pointers = (*sources, *[sources[0]] * (number - len(sources)))
    # The norm's weight is in the query already.
    return _OPTIONS | {
        "q": query, "w": torch.ones_like(query), "residuals": tuple(sources), "res": pointers, "eps": eps,
    }  # fmt: skip


IMPLEMENTATION = Implementation(
    device="cuda", run=differentiable(_forward, _backward), supports=supports, pays=lambda query, sources: False
)

__all__ = ["ARGUMENTS", "IMPLEMENTATION", "NAME", "operation", "supports"]
