"""Depth attention by the fused operation of flash-linear-attention, `fla.ops.attnres`, behind the seam.

It has no scale `sum`, no gradient through the weights and none of its gradients: those are PyTorch's operations here.
What it takes for granted of addresses is asked first. It is chosen by name alone.
"""

import functools
from collections.abc import Sequence
from importlib.metadata import version
from inspect import signature
from types import ModuleType

import torch
from torch import Tensor

from ..autograd import depth_attention_in_operations, differentiable
from ..compat import looks_at_operations
from .launch import packed

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BYTES = 16  # a row begins where a load of so many bytes may
_FORWARD = {"q", "residuals", "res", "w", "ow", "eps", "scale", "checkpoint_level"}
_BACKWARD = _FORWARD | {"do", "o_pre", "rstd", "logit", "lse"}
# What is alike for both: no norm after the mixture, logits as they are, and no mixture kept for the backward pass.
_OPTIONS = {"ow": None, "scale": 1.0, "checkpoint_level": 1}


@functools.cache
def _operations() -> ModuleType | str:
    """The two halves of the operation; or why they are not here. To load them takes seconds."""
    try:
        from fla.ops.attnres import fused

        halves = {fused.fused_attnres_fwd: _FORWARD, fused.fused_attnres_bwd: _BACKWARD}
    except ModuleNotFoundError:
        return "fla-core is not installed"
    except Exception as error:  # of an older version, or Triton does not load
        return f"fla-core {version('fla-core')} does not load: {error}"
    if any(signature(half).parameters.keys() != names for half, names in halves.items()):
        return f"the operation of fla-core {version('fla-core')} takes other arguments than that of 0.6.0"
    return fused


def supports(query: Tensor, sources: Sequence[Tensor]) -> str | None:
    """Why the operation cannot compute this here, in a few words; `None` where it can."""
    if not query.is_cuda:
        return f"the sources are on {query.device}, not on a GPU"
    who_looks = "the function is compiled" if torch.compiler.is_compiling() else looks_at_operations()
    if who_looks is not None:
        return who_looks
    first = sources[0]
    for source in sources:
        if type(source) not in (Tensor, torch.nn.Parameter) or source.device != query.device:
            return "fla-core takes plain tensors on one GPU"
        if source.dtype != first.dtype or first.dtype not in _DTYPES:
            return "fla-core takes sources of one dtype, float32 or half as wide"
        if source.data_ptr() % _BYTES or source.shape[-1] * source.element_size() % _BYTES:
            return f"fla-core takes rows that begin at a multiple of {_BYTES} bytes"
    if not first.numel():
        return "fla-core takes one token at least"
    operations = _operations()
    return operations if isinstance(operations, str) else None


def pays(query: Tensor, sources: Sequence[Tensor]) -> bool:
    """Never unless asked for by name: it trades seconds of tuning, for each width, for what is not known."""
    return False


def _pointers(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Padded by the first to the number that `fla` makes a kernel for: 8, 16, 32, ..."""
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


def _backward(
    grad: Tensor,
    grad_weights: Tensor | None,
    later_grads: Sequence[Tensor | None],
    query: Tensor,
    sources: Sequence[Tensor],
    saved: Sequence[Tensor],
    eps: float,
    is_sum: bool,
    needs_query: bool,
    needs_sources: Sequence[bool],
) -> tuple[Tensor | None, list[Tensor | None]]:
    grad = packed(grad * len(sources) if is_sum else grad)
    kept = dict(zip(("rstd", "logit", "lse"), saved))
    with torch.cuda.device_of(query):
        grads, grad_query, *_ = _operations().fused_attnres_bwd(
            do=grad, o_pre=None, **kept, **_arguments(query, sources, eps)
        )
    found = [grad_query, *grads]
    if grad_weights is not None:
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in (query, *sources)]
            weights = depth_attention_in_operations(leaves[0], leaves[1:], eps, is_sum)[1]
            through_weights = torch.autograd.grad(weights, leaves, grad_weights)
        found = [ours + theirs for ours, theirs in zip(found, through_weights)]
    found[1:] = [ours if later is None else ours + later for ours, later in zip(found[1:], later_grads)]
    needed = (needs_query, *needs_sources)
    grad_query, *grad_sources = [ours if is_needed else None for ours, is_needed in zip(found, needed)]
    return grad_query, grad_sources


run = differentiable(_forward, _backward)

__all__ = ["pays", "run", "supports"]
