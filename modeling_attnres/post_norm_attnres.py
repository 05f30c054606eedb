"""PostNorm, as in the first Transformer: the stream itself is normed after each addition.

    h_{l+1} = Norm(h_l + v_l),   v_l = f_l(h_l)

A PreNorm decoder has a norm in front of each sublayer and one at the end. Here the same norms are applied to the
stream itself: the first one to the embedding, the one in front of sublayer `l` to the sum of step `l - 1`, and the
final norm to the last sum. No setting gives the standard residual.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from .residual_attnres import ResidualConnection, require_norms


class PostNorm(ResidualConnection):
    """PostNorm. State: the stream `[batch, seq, hidden]`. It has no tensors; the norms are the backbone's."""

    name = "post_norm"
    summary = "a normed stream"
    measured = {"step": "0.99"}
    takes_norm = True

    @classmethod
    def check(cls, config: PreTrainedConfig) -> None:
        """Check that the backbone's sublayers begin with a norm; see [`ResidualConnection.check`]."""
        require_norms(config)

    def forward(self, state: Tensor, norm: Callable[[Tensor], Tensor] | None = None) -> tuple[Tensor, None, Tensor]:
        """Norm the stream; see the base class.

        Args:
            state: the stream `[batch, seq, hidden]`.
            norm: the norm of the sublayer; `None` for the output, whose norm the model applies.

        Returns:
            The normed stream as the input, no depth weights, and the normed stream as the state.
        """
        normed = state if norm is None else norm(state)
        return normed, None, normed

    def coefficients(self, state: Tensor, norm: Callable[[Tensor], Tensor] | None = None) -> Tensor | None:
        """Compute the factor `[batch, seq, hidden]` by which the norm multiplies each element."""
        return None if norm is None else torch.where(state == 0, 0, norm(state) / state)

    def mix(self, state: Tensor, coefficients: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the stream times its factors as input and as state."""
        mixed = state if coefficients is None else coefficients * state
        return mixed, mixed

    def write(self, state: Tensor, output: Tensor) -> Tensor:
        """Add an output `[batch, seq, hidden]` to the stream."""
        return state + output


__all__ = ["PostNorm"]
