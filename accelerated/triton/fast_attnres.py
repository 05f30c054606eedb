"""Depth attention by the operation of fast-attnres, for sources in bfloat16.

The package has the import name `attnres`, as this one has, so the two cannot be installed side by side. But its files
import each other relatively. Installed with `--target fast_attnres` in a folder of Python's path, its package is
`fast_attnres.attnres`.

It rounds the query and the query's gradient to bfloat16. It tunes itself for each number of sources and each width, by
hundreds of compiled kernels.
"""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from .library import LibraryOperation

_MOST_SOURCES, _MOST_WIDE = 129, 8192  # what the package's `attnres` validates


class FastAttnRes(LibraryOperation):
    """The two halves of `source_attnres`."""

    name, package, release = "fast-attnres", "fast-attnres", "2.1.0"
    install = "pip install --no-deps --target fast_attnres fast-attnres"
    dtypes = (torch.bfloat16,)
    arguments = {
        "forward": {"sources", "query", "eps", "scale"},
        "backward": {
            "sources", "query", "saved_mixed", "grad_output", "saved_inv_rms", "saved_logit", "softmax_stats", "scale",
        },
    }  # fmt: skip

    def load(self) -> ModuleType:
        """Import the kernels for separate sources. They are private, but the public operation returns no weights."""
        from fast_attnres.attnres._kernels import fla_full_sources

        return fla_full_sources

    def why_unfit(self, sources: Sequence[Tensor]) -> str | None:
        """Return a reason for more or wider sources than the package takes; see [`LibraryOperation.why_unfit`]."""
        if len(sources) > _MOST_SOURCES or sources[0].shape[-1] > _MOST_WIDE:
            given = f"{len(sources)} of {sources[0].shape[-1]}"
            return f"{self.package} takes up to {_MOST_SOURCES} sources of up to {_MOST_WIDE} numbers, not {given}"
        return None

    def compute(
        self, query: Tensor, sources: Sequence[Tensor], eps: float
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """See [`LibraryOperation.compute`]."""
        result, *saved = self.operation.forward(sources, query.to(torch.bfloat16), eps, 1.0)
        _, _, logits, _ = saved  # `[n, tokens]`
        return result, logits.softmax(0).view(len(sources), *sources[0].shape[:-1]), tuple(saved)

    def compute_grads(
        self, grad: Tensor, query: Tensor, sources: Sequence[Tensor], saved: Sequence[Tensor], eps: float
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """See [`LibraryOperation.compute_grads`]."""
        mixed, inverse_rms, logits, statistics = saved
        *grads, grad_query = self.operation.backward(
            sources, query.to(torch.bfloat16), mixed, grad, inverse_rms, logits, statistics, 1.0
        )
        return grad_query.to(query.dtype), grads


__all__ = ["FastAttnRes"]
