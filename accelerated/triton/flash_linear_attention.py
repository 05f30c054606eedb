"""Depth attention by the fused operation of flash-linear-attention, `fla.ops.attnres`.

It tunes itself for seconds at each new width, at the first call.
"""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from .library import LibraryOperation

_BYTES = 16  # the kernels load this many at once, without a check, so every row must begin at a multiple of them
_FORWARD = {"q", "residuals", "res", "w", "ow", "eps", "scale", "checkpoint_level"}
# Arguments of both halves: no norm after the mixture, logits not scaled, no mixture kept for the backward pass.
_OPTIONS = {"ow": None, "scale": 1.0, "checkpoint_level": 1}


class FlashLinearAttention(LibraryOperation):
    """The two halves of `fused_attnres`."""

    name, package, release = "fla", "fla-core", "0.6.0"
    install = "pip install fla-core"
    arguments = {
        "fused_attnres_fwd": _FORWARD,
        "fused_attnres_bwd": _FORWARD | {"do", "o_pre", "rstd", "logit", "lse"},
    }

    def load(self) -> ModuleType:
        """Import `fla.ops.attnres.fused`; older versions lack it."""
        from fla.ops.attnres import fused

        return fused

    def why_unfit(self, sources: Sequence[Tensor]) -> str | None:
        """Return a reason if a row begins elsewhere than the kernels assume; see [`LibraryOperation.why_unfit`]."""
        row = sources[0].shape[-1] * sources[0].element_size()
        if row % _BYTES or any(source.data_ptr() % _BYTES for source in sources):
            return f"{self.package} takes rows that begin at a multiple of {_BYTES} bytes"
        return None

    def compute(
        self, query: Tensor, sources: Sequence[Tensor], eps: float
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """See [`LibraryOperation.compute`]."""
        result, _, *saved = self.operation.fused_attnres_fwd(**_arguments(query, sources, eps))
        _, logits, log_sum = saved
        return result, (logits - log_sum).exp(), tuple(saved)

    def compute_grads(
        self, grad: Tensor, query: Tensor, sources: Sequence[Tensor], saved: Sequence[Tensor], eps: float
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """See [`LibraryOperation.compute_grads`]."""
        statistics = dict(zip(("rstd", "logit", "lse"), saved))
        arguments = _arguments(query, sources, eps)
        grads, grad_query, *_ = self.operation.fused_attnres_bwd(do=grad, o_pre=None, **statistics, **arguments)
        return grad_query, grads


def _arguments(query: Tensor, sources: Sequence[Tensor], eps: float) -> dict:
    # There are kernels for 8, 16, 32, ... pointers.
    number = max(8, 1 << (len(sources) - 1).bit_length())
    pointers = (*sources, *[sources[0]] * (number - len(sources)))
    # The norm's weight is in the query already.
    return _OPTIONS | {
        "q": query, "w": torch.ones_like(query), "residuals": tuple(sources), "res": pointers, "eps": eps,
    }  # fmt: skip


__all__ = ["FlashLinearAttention"]
