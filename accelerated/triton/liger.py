"""Depth attention by Liger Kernel's operation, `liger_kernel.ops.attn_res`.

It takes one stacked tensor, so each pass copies all sources first. Its autograd function keeps that copy until the
backward pass. In a model every read would then hold a copy of all its sources, so here the backward pass stacks again.
"""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from .launch import MAX_WIDTH
from .library import LibraryOperation

_MOST_NUMBERS = 2**31 - 1  # offsets in the kernels have 32 bits


class Liger(LibraryOperation):
    """The two halves of `LigerAttnResFunction`."""

    name, package, release = "liger", "liger-kernel", "0.8.5"
    install = "pip install liger-kernel"
    arguments = {
        "attn_res_forward": {"blocks", "w_query", "w_norm", "eps"},
        "attn_res_backward": {"dh", "V_3d", "w_query", "w_norm", "Alpha", "RSTD", "eps"},
    }

    def load(self) -> ModuleType:
        """Import `liger_kernel.ops.attn_res`; versions before 0.8 lack it."""
        from liger_kernel.ops import attn_res

        return attn_res

    def why_unfit(self, sources: Sequence[Tensor]) -> str | None:
        """Return a reason for wide rows, many numbers, or if sums must be in a fixed order."""
        width, numbers = sources[0].shape[-1], len(sources) * sources[0].numel()
        if width > MAX_WIDTH:
            return f"the sources are {width} wide, and {self.package} is tried up to {MAX_WIDTH}"
        if numbers > _MOST_NUMBERS:
            return f"{self.package} counts in 32 bits, and the sources have {numbers:,} numbers"
        if torch.are_deterministic_algorithms_enabled():
            return f"{self.package} adds gradients in any order, and deterministic algorithms are required"
        return None

    def compute(
        self, query: Tensor, sources: Sequence[Tensor], eps: float
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """See [`LibraryOperation.compute`]."""
        # A norm's weight in float32 keeps the keys in float32. Its values are in the query already.
        result, _, weights, inverse_rms = self.operation.attn_res_forward(
            torch.stack(sources), query, torch.ones_like(query), eps
        )
        by_source = weights.t().contiguous().view(len(sources), *sources[0].shape[:-1])  # from (tokens, n)
        return result, by_source, (weights, inverse_rms)

    def compute_grads(
        self, grad: Tensor, query: Tensor, sources: Sequence[Tensor], saved: Sequence[Tensor], eps: float
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """See [`LibraryOperation.compute_grads`]."""
        stacked = torch.stack(sources).flatten(1, -2) if sources[0].ndim > 1 else torch.stack(sources).unsqueeze(1)
        grads, grad_query, _ = self.operation.attn_res_backward(
            grad, stacked, query, torch.ones_like(query), *saved, eps
        )
        return grad_query, grads.view(len(sources), *sources[0].shape).unbind()


__all__ = ["Liger"]
