"""The interface between the models and an implementation of depth attention.

    l_i = query . s_i / sqrt(mean(s_i^2) + eps),   a = softmax(l),   h = sum_i a_i s_i  (times n for the scale `sum`)

`query` is `w * g` `[D]`, the pseudo-query times the key norm's weight. Model code that was saved beside weights may be
older or newer than this package. It has an `INTERFACE` too, and runs in plain PyTorch if the two numbers differ.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

# Increase it whenever a signature below changes, or one of the functions in `__init__.py`, which the models call.
INTERFACE = 5


class Decoder(Protocol):
    """The attributes of a decoder that a plan reads."""

    config: Any
    layers: Any  # the decoder layers in order, each with its `sublayers`
    _modules: Any


if TYPE_CHECKING:

    class Connection(nn.Module):
        """The attributes of a connection that a plan reads. The class in the models' files is not imported here."""

        weight: nn.Parameter
        eps: float
        scale: str
        block_size: int
        sublayer: int

    class DeltaAttentionLayer(nn.Module):
        """A layer of the models' class for delta attention, whose functions are attributes."""

        chunk: Callable[..., tuple[Tensor, Tensor | None]]
        step: Callable[..., tuple[Tensor, Tensor | None]]
        convolve: Callable[..., Tensor]
        convolve_step: Callable[..., Tensor]


@dataclass(frozen=True)
class Implementation:
    """One way to compute depth attention.

    Args:
        device: type of the device of the tensors that it takes, `"cpu"` or `"cuda"`.
        run: `(query, sources, eps, is_sum, fuse_later_grads=False) -> (h, a, sources)`, differentiable. `query` is
            `[D]` in float32, `sources` are n >= 1 tensors `[..., D]` of one shape, `h` has their dtype, `a` is
            `[n, ...]` in float32. The returned sources equal those given. With `fuse_later_grads`, later reads must
            take the returned ones: the backward pass of this read then adds the gradients of those reads.
        supports: `(query, sources) -> str | None`, the reason why it cannot run on these tensors, in a few words, or
            `None` if it can. The first call may take seconds, because it compiles and tries the kernels.
        pays: `(query, sources) -> bool`, whether these sizes are worth the time to load it. `auto` calls `pays` first.
        inference_plan: `(reads) -> InferencePlan | None`, a plan for a pass without gradients; see `make_plan`.
        training_plan: `(reads) -> TrainingPlan | None`, a plan for a pass with gradients; see `make_training_plan`.
        direct: `(query, sources, key_norm_weight, eps, is_sum, fuse_later_grads, *, needs_weights) -> (h, a, sources)
            | None`, a path with fewer checks for the most common tensors, from `w` and `g` themselves; `None` for all
            other tensors. Without `needs_weights`, `a` is `None`.
    """

    device: str
    run: Callable[..., tuple[Tensor, Tensor, Sequence[Tensor]]]
    supports: Callable[[Tensor, Sequence[Tensor]], str | None]
    pays: Callable[[Tensor, Sequence[Tensor]], bool]
    inference_plan: Callable[[Sequence[tuple]], Any] | None = None
    training_plan: Callable[[Sequence[tuple]], Any] | None = None
    direct: Callable[..., tuple[Tensor, Tensor, Sequence[Tensor]] | None] | None = None


__all__ = ["INTERFACE", "Implementation"]
