"""The interface between the models and an implementation of depth attention.

    l_i = query . s_i / sqrt(mean(s_i^2) + eps),   a = softmax(l),   h = sum_i a_i s_i  (times n for the scale `sum`)

`query` is `w * g` `[D]`, the pseudo-query times the key norm's weight. Model code that was saved beside weights may be
older or newer than this package: both compare `INTERFACE`, and the model runs in plain PyTorch where it differs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

INTERFACE = 2


@dataclass(frozen=True)
class Implementation:
    """One way to compute depth attention.

    Args:
        run: `(query, sources, eps, is_sum, fuse_later_grads=False) -> (h, a, sources)`, differentiable. `query` is
            `[D]` in float32, `sources` are n >= 1 tensors `[..., D]` of one shape, `h` has their dtype, `a` is
            `[n, ...]` in float32. The returned sources are those given; with `fuse_later_grads`, the backward pass of
            this read also adds the gradients that later reads send to them.
        supports: `(query, sources) -> reason`, why it cannot run on these tensors here, in a few words; `None` where it
            can. The first call may take seconds, because it compiles and tries the kernels.
        pays: `(query, sources) -> bool`, whether it is worth loading for these sizes. `auto` asks it before `supports`.
        inference_plan: `(reads) -> InferencePlan | None`, a plan for a pass without gradients.
    """

    run: Callable[..., tuple[Tensor, Tensor, Sequence[Tensor]]]
    supports: Callable[[Tensor, Sequence[Tensor]], str | None]
    pays: Callable[[Tensor, Sequence[Tensor]], bool]
    inference_plan: Callable[[Sequence[tuple]], Any] | None = None


__all__ = ["INTERFACE", "Implementation"]
