"""The Triton kernels behind the seam: where they run, and depth attention by them."""

import functools
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from ..autograd import differentiable
from ..compat import looks_at_operations
from ..inference_reader import InferenceReader, Read, read_on_gpu
from . import launch
from .launch import packed


def kernels_available(device: torch.device | str, width: int = 1) -> bool:
    """Whether the kernels run on this device for sources of this width."""
    return why_not_on(torch.device(device), width) is None


def why_not_on(device: torch.device, width: int) -> str | None:
    """Why the kernels do not run on this device for sources of this width; `None` where they do: tried once, if small.

    They do not without Triton, without a GPU, with a driver too old for it, or without the C compiler that it needs.
    """
    if device.type != "cuda":
        return f"the sources are on {device}, not on a GPU"
    if width > launch.MAX_WIDTH:
        return f"the sources are {width} wide, and the kernels take {launch.MAX_WIDTH} at most"
    return _tried_on(device)


@torch.compiler.assume_constant_result
def _tried_on(device: torch.device) -> str | None:
    return _trial(device)  # apart, since `torch.compile` looks through a cache


@functools.cache
@torch.no_grad()
def _trial(device: torch.device) -> str | None:
    if not torch.cuda.is_available():
        return "PyTorch sees no GPU"
    if isinstance(launch.kernels(), str):
        return launch.kernels()
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
    """Why the kernels cannot compute this here, in a few words; `None` where they can."""
    why_not = why_not_on(query.device, query.shape[-1])
    if why_not is not None:
        return why_not
    for tensor in (query, *sources):
        if type(tensor) not in launch.PLAIN:
            return f"the kernels take plain tensors, not {type(tensor).__name__}"
        if tensor.device != query.device:
            return f"the tensors are on {query.device} and {tensor.device}"
        if tensor.dtype not in launch.DTYPES:
            return f"the kernels compute in float32, and a tensor is {tensor.dtype}"
    return None if torch.compiler.is_compiling() else looks_at_operations()


def pays(query: Tensor, sources: Sequence[Tensor]) -> bool:
    """Always: even for a token, one kernel takes less time than the operations that it replaces."""
    return True


def _forward(
    query: Tensor, sources: Sequence[Tensor], eps: float, is_sum: bool
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    result, *saved = launch.forward(packed(query), [packed(source) for source in sources], eps, is_sum)
    return result, saved[0], tuple(saved)


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
    partial, grads = launch.backward(
        packed(grad),
        None if grad_weights is None else packed(grad_weights),
        _all_or_none(later_grads),
        packed(query),
        [packed(source) for source in sources],
        *saved,
        is_sum,
        any(needs_sources),
    )
    grad_sources = [grads[i] if is_needed else None for i, is_needed in enumerate(needs_sources)]
    return partial.sum(0) if needs_query else None, grad_sources


def _all_or_none(grads: Sequence[Tensor | None]) -> list[Tensor]:
    """The gradients, one tensor of zeros in place of each that is missing; nothing if all are."""
    present = [grad for grad in grads if grad is not None]
    if len(present) == len(grads) or not present:
        return [packed(grad) for grad in present]
    zeros = torch.zeros_like(present[0], memory_format=torch.contiguous_format)
    return [zeros if grad is None else packed(grad) for grad in grads]


_attend = differentiable(_forward, _backward)


def run(
    query: Tensor, sources: Sequence[Tensor], eps: float, is_sum: bool, fuse_later_grads: bool = False
) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    """`h = sum_i a_i s_i`, `a = softmax_i(query . RMSNorm(s_i))`; see [`Implementation`].

    Sources of several dtypes are cast to the one that all promote to; they go on as they were.
    """
    dtype = launch.common_dtype(sources)
    if all(source.dtype is dtype for source in sources):
        return _attend(query, sources, eps, is_sum, fuse_later_grads)
    result, weights, _ = _attend(query, [source.to(dtype) for source in sources], eps, is_sum)
    return result, weights, sources


def reader(reads: Sequence[Read]) -> InferenceReader | None:
    """The reads of a pass without gradients; `None` where the kernels do not run, or it may not act."""
    return read_on_gpu(reads)


__all__ = ["kernels_available", "pays", "reader", "run", "supports", "why_not_on"]
