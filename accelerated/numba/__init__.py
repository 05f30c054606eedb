"""Depth attention by loops that `numba` compiles for the processor at hand (the extra `cpu`).

Importing this folder does not import `numba`. The first call of [`supports`] does.
"""

from collections.abc import Sequence

from ..autograd import differentiable
from ..inference_plan import InferencePlan, make_plan
from ..interface import Implementation
from ..plain import Read
from . import kernels
from .plan import CpuPlan
from .support import pays, supports
from .training import training_plan

run = differentiable(kernels.forward, kernels.backward)


def inference_plan(reads: Sequence[Read]) -> InferencePlan | None:
    """Make a plan that reads by the loops in a pass without gradients; see [`Implementation`]."""
    return make_plan(CpuPlan, "cpu", reads)


IMPLEMENTATION = Implementation(
    device="cpu", run=run, supports=supports, pays=pays, inference_plan=inference_plan, training_plan=training_plan
)

__all__ = ["IMPLEMENTATION"]
