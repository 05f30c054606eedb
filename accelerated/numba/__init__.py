"""Depth attention by loops that `numba` compiles for the processor at hand (the extra `cpu`).

Importing this folder does not import `numba`. The first call of [`supports`] does.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..autograd import FollowingNorm, differentiable
from ..inference_plan import InferencePlan, Read, make_plan
from ..interface import Implementation
from ..training_plan import TrainingPlan, make_training_plan
from . import kernels
from .normed import read_with_norm
from .plan import CpuPlan
from .support import pays, supports

run = differentiable(kernels.forward, kernels.backward)


def inference_plan(reads: Sequence[Read]) -> InferencePlan | None:
    """Make a plan that reads by the loops in a pass without gradients; see [`Implementation`]."""
    return make_plan(CpuPlan, "cpu", reads)


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
