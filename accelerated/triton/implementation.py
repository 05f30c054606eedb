"""Depth attention by the Triton kernels: a check that they run on a device, and the functions of [`Implementation`]."""

import functools
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from ..autograd import BackwardRequest, Gradients, differentiable
from ..compat import why_operations_are_observed
from ..inference_plan import InferencePlan, make_plan
from ..plain import Read
from ..tensors import PLAIN, packed
from . import launch
from .plan import GpuPlan


def kernels_available(device: torch.device | str, width: int = 1) -> bool:
    """Return whether the kernels run on a device for sources of `width` numbers."""
    return why_not_on(torch.device(device), width) is None


def why_not_on(device: torch.device, width: int) -> str | None:
    """Return why the kernels do not run on a device for sources of `width` numbers, or `None` if they do.

    They need Triton, a GPU with a driver that is new enough, and the C compiler that Triton calls. The first call
    compiles small kernels and runs them.
    """
    if device.type != "cuda":
        return f"the sources are on {device}, not on a GPU"
    if width > launch.MAX_WIDTH:
        return f"the sources are {width} wide, and the kernels take at most {launch.MAX_WIDTH}"
    return _tried_on(device)


@torch.compiler.assume_constant_result
def _tried_on(device: torch.device) -> str | None:
    # Separate from `_trial`, because `torch.compile` would trace through the wrapper of `functools.cache`.
    return _trial(device)


@functools.cache
@torch.no_grad()
def _trial(device: torch.device) -> str | None:
    """Run each kernel for inference once; return why they do not run, or `None` if their results are right."""
    if not torch.cuda.is_available():
        return "PyTorch sees no GPU"
    if (reason := launch.why_no_kernels()) is not None:
        return reason
    try:
        ones = torch.ones(2, 5, dtype=torch.float32, device=device)
        result, *_ = launch.forward(ones[0], [ones, ones], 1e-6, True)
        phase = tuple(tensor[0] for tensor in launch.phase_one(ones[:1], 1e-6, ones, ones))
        normed = launch.read_fused(ones[0], 1e-6, 3, [ones], phase, norm_weight=2 * ones[0], norm_eps=1e-6)
        if bool((result == 2).all() and (normed.round() == 2).all()):
            return None
        why_not = f"the Triton kernels compute wrong numbers on {device}"
    except Exception as error:
        why_not = f"the Triton kernels do not run on {device}: {error}"
    warnings.warn(f"{why_not}. PyTorch's operations are used.", stacklevel=2)
    return why_not


def supports(query: Tensor, sources: Sequence[Tensor]) -> str | None:
    """Return why the kernels cannot run on these tensors, or `None` if they can; see [`Implementation`]."""
    why_not = why_not_on(query.device, query.shape[-1])
    if why_not is not None:
        return why_not
    for tensor in (query, *sources):
        if type(tensor) not in PLAIN:
            return f"the kernels take plain tensors, not {type(tensor).__name__}"
        if tensor.device != query.device:
            return f"the tensors are on {query.device} and {tensor.device}"
        if tensor.dtype not in launch.DTYPES:
            return f"the kernels take float32, bfloat16 and float16, not {tensor.dtype}"
    return None if torch.compiler.is_compiling() else why_operations_are_observed()


def pays(query: Tensor, sources: Sequence[Tensor]) -> bool:
    """Return true: even for one token, a kernel takes less time than the operations that it replaces."""
    return True


def _forward(
    query: Tensor, sources: Sequence[Tensor], eps: float, is_sum: bool
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    result, statistics = launch.forward(packed(query), [packed(source) for source in sources], eps, is_sum)
    return result, statistics[0], (statistics,)


def _backward(request: BackwardRequest) -> Gradients:
    partial, grads = launch.backward(
        packed(request.grad),
        None if request.grad_weights is None else packed(request.grad_weights),
        all_or_none(request.later_grads),
        packed(request.query),
        [packed(source) for source in request.sources],
        *request.saved,
        request.is_sum,
        any(request.needs_sources),
    )
    grad_sources = [grads[i] if is_needed else None for i, is_needed in enumerate(request.needs_sources)]
    return partial.sum(0) if request.needs_query else None, grad_sources


def all_or_none(grads: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the gradients, packed, with zeros for each that is missing, or an empty list if all are missing."""
    present = [grad for grad in grads if grad is not None]
    if len(present) == len(grads) or not present:
        return [packed(grad) for grad in present]
    zeros = torch.zeros_like(present[0], memory_format=torch.contiguous_format)
    return [zeros if grad is None else packed(grad) for grad in grads]


_attend = differentiable(_forward, _backward)


def run(
    query: Tensor, sources: Sequence[Tensor], eps: float, is_sum: bool, fuse_later_grads: bool = False
) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    """Compute depth attention; see [`Implementation`].

    Sources of several dtypes are cast to their common dtype for the kernels. The returned sources are those given.
    """
    dtype = launch.common_dtype(sources)
    if all(source.dtype is dtype for source in sources):
        return _attend(query, sources, eps, is_sum, fuse_later_grads)
    result, weights, _ = _attend(query, [source.to(dtype) for source in sources], eps, is_sum)
    return result, weights, sources


def inference_plan(reads: Sequence[Read]) -> InferencePlan | None:
    """Make a plan that reads by the kernels in a pass without gradients; see [`Implementation`]."""
    first = reads[0][0].weight
    return make_plan(GpuPlan, "cuda", reads) if kernels_available(first.device, first.shape[-1]) else None


__all__ = ["all_or_none", "inference_plan", "kernels_available", "pays", "run", "supports", "why_not_on"]
