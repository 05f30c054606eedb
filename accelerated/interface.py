"""What an implementation of depth attention gives to the models: five answers under one name.

    l_i = query . s_i / sqrt(mean(s_i^2) + eps),   a = softmax(l),   h = sum_i a_i s_i  (times n for the scale `sum`)

`query` is `w * g` `[D]`, the pseudo-query times the key norm's weight. The models ask by these names alone, so that
models of one version and implementations of another find out by `INTERFACE` whether they understand each other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

INTERFACE = 1


@dataclass(frozen=True)
class Implementation:
    """One way to compute depth attention.

    Args:
        run: `(query, sources, eps, is_sum, fuse_later_grads=False) -> (h, a, sources)`, differentiable. `query` `[D]`
            in float32, `sources` n >= 1 tensors `[..., D]` of one shape; `h` in their dtype, `a` `[n, ...]` in float32,
            and the sources to go on with: those given or, with `fuse_later_grads`, such that the gradients of those who
            read them later are added as this read writes its own.
        supports: `(query, sources)` -> why it cannot run on these tensors here, in a few words; `None` where it can.
            May take seconds, once: what compiles is tried.
        pays: `(query, sources)` -> whether it is worth it for these sizes; asked, and first, if nobody chose by name.
        reader: `(reads) -> InferenceReader | None`, for a pass without gradients; see `reader`.
    """

    run: Callable[..., tuple[Tensor, Tensor, Sequence[Tensor]]]
    supports: Callable[[Tensor, Sequence[Tensor]], str | None]
    pays: Callable[[Tensor, Sequence[Tensor]], bool]
    reader: Callable[[Sequence[tuple]], Any] | None = None


__all__ = ["INTERFACE", "Implementation"]
