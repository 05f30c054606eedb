"""Plan the reads of one forward pass with gradients: each is computed together with a norm that follows it.

In training a norm by PyTorch's operations takes the host longer than the read before it. The plan validates the model
once per pass. Each read then looks up its tensors, because engines may replace parameters during a pass.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .autograd import FollowingNorm
from .plain import Read, are_plain, is_plain_rms_norm

if TYPE_CHECKING:
    from .interface import Connection

Sources = tuple[Tensor, ...]
# Dtypes of sources for which a norm must compute what the kernels do.
_DTYPES = torch.float32, torch.bfloat16, torch.float16


class TrainingPlan:
    """The reads of one pass. [`make_training_plan`] makes an instance.

    Args:
        reads: all reads of the pass, in order.
        attend: computes a read, and a norm of it if one is given, or returns `None` for tensors that it does not take;
            see `read` of `numba/training.py`.
    """

    def __init__(self, reads: Sequence[Read], attend: Callable):
        self._attend = attend
        self._modules = {
            id(connection): (key_norm, norm if norm is not None and is_plain_rms_norm(norm, *_DTYPES) else None)
            for connection, key_norm, norm in reads
        }

    def read(self, connection: "Connection", state: Tensor | Sources) -> tuple[Tensor, bool, Tensor | Sources]:
        """Compute the input of a sublayer, or of the output.

        Args:
            connection: one of the plan's connections.
            state: the sources, each `[batch, seq, hidden]`; the embedding alone before the first write.

        Returns:
            The input `[batch, seq, hidden]`, whether the norm that runs next is already applied to it, and the sources
            for the next read.
        """
        key_norm, norm = self._modules[id(connection)]
        if not torch.compiler.is_compiling():
            weight = None if norm is None else norm._parameters["weight"]
            following = None if weight is None else FollowingNorm(weight, vars(norm)["variance_epsilon"])
            attended = self._attend(
                connection._parameters["weight"],
                state if isinstance(state, tuple) else (state,),
                key_norm._parameters["weight"],
                connection.eps,
                connection.scale == "sum",
                True,
                following,
            )
            if attended is not None:
                result, _, sources = attended
                return result, following is not None, sources
        result, _, state = connection(state, key_norm())
        return result, False, state


def make_training_plan(reads: Sequence[Read], attend: Callable) -> TrainingPlan | None:
    """Make a plan for a pass, if every connection and key norm computes what its class defines.

    Args:
        reads: all reads of the pass, in order.
        attend: see [`TrainingPlan`].

    Returns:
        The plan, or `None` if the model must call its connections and norms one by one.
    """
    if not torch.is_grad_enabled() or not are_plain(reads):
        return None
    return TrainingPlan(reads, attend)


__all__ = ["TrainingPlan", "make_training_plan"]
