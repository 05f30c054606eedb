"""Depth attention by loops that `numba` compiles for the processor at hand (the extra `cpu`).

Importing this folder does not import `numba`. The first call of [`supports`] does.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import compat
from ..autograd import FollowingNorm, differentiable
from ..inference_plan import InferencePlan, Read
from ..interface import Implementation
from ..training_plan import TrainingPlan, make_training_plan
from . import call, engine, kernels
from .normed import read_with_norm
from .plan import make_cpu_plan

# A small model is not worth the seconds that the loops take to load. The size alone decides, whether they are loaded
# already or not, so that the same call always gives the same bits.
_WIDE, _MANY = 256, 1 << 15  # numbers in a row, and in all sources; from either on, the loops are used

run = differentiable(kernels.forward, kernels.backward)


def supports(query: Tensor, sources: Sequence[Tensor]) -> str | None:
    """Return why the loops cannot run on these tensors, or `None` if they can; see [`Implementation`].

    They take plain tensors on the CPU: the query in float32, the sources all in float32 or all in bfloat16.
    """
    if torch.compiler.is_compiling():
        return "torch.compile fuses PyTorch's operations instead"
    if (reason := compat.why_operations_are_observed()) is not None:
        return reason
    if not query.numel():
        return "the sources have no width"
    if query.dtype is not torch.float32:
        return f"the query is {query.dtype}, not float32"
    dtype = sources[0].dtype
    if dtype not in call.DTYPES:
        return f"the sources are {dtype}, not float32 or bfloat16"
    for tensor in (query, *sources):
        if (reason := call.why_unfit(tensor)) is not None:
            return reason
    if any(source.dtype is not dtype for source in sources):
        return "the sources are of several dtypes"
    return engine.why_loops_do_not_run(kernels.trial, dtype)


def pays(query: Tensor, sources: Sequence[Tensor]) -> bool:
    """Return whether the sources are large enough; see [`Implementation`]."""
    return sources[0].shape[-1] >= _WIDE or len(sources) * sources[0].numel() >= _MANY


def inference_plan(reads: Sequence[Read]) -> InferencePlan | None:
    """Make a plan that reads by the loops in a pass without gradients; see [`Implementation`]."""
    return make_cpu_plan(reads, supports, pays)


def attend_with_norm(
    query: Tensor,
    sources: Sequence[Tensor],
    key_norm_weight: Tensor,
    eps: float,
    is_sum: bool,
    fuse_later_grads: bool,
    norm: FollowingNorm,
) -> tuple[Tensor, None, Sequence[Tensor]] | None:
    """Compute a read and the norm after it by the loops; see [`TrainingPlan`].

    Returns:
        The normed result, `None` for the weights, which are not kept, and the sources for the next read; `None` if the
        modules must be called.
    """
    if not pays(query, sources) or supports(query.detach().to(torch.float32), sources) is not None:
        return None
    attended = read_with_norm(query, key_norm_weight, norm.weight, sources, eps, norm.eps, is_sum)
    return None if attended is None else (attended[0], None, attended[1])


def training_plan(reads: Sequence[Read]) -> TrainingPlan | None:
    """Make a plan that reads by the loops in a pass with gradients; see [`Implementation`]."""
    return make_training_plan(reads, attend_with_norm) if reads[0][0].weight.is_cpu else None


IMPLEMENTATION = Implementation(
    run=run, supports=supports, pays=pays, inference_plan=inference_plan, training_plan=training_plan
)

__all__ = ["IMPLEMENTATION"]
