"""PostNorm, as in the first Transformer: the stream itself is normed after each addition.

    h_{l+1} = Norm(h_l + v_l),   v_l = f_l(h_l)

A decoder has its norms in front of its sublayers and one at the end. Here each of them norms the stream, which goes on
from what it makes: the first one norms the embedding, the one in front of sublayer `l` ends the step before, and the
final norm is that of the last step. The function is never that of the standard residual.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from .residual_attnres import ResidualConnection, require


class PostNorm(ResidualConnection):
    """State: the stream. Has no tensors; the norms are the backbone's."""

    name = "post_norm"
    takes_norm = True

    @classmethod
    def check(cls, config: PreTrainedConfig) -> None:
        has_norms = all("norm" in (sublayer.first or "") for sublayer in config.sublayers)
        allowed = f"another one: the sublayers of {config.backbone!r} do not begin with a norm"
        require(config, "residual_connection", has_norms, allowed)

    def forward(self, state: Tensor, norm: Callable[[Tensor], Tensor] | None = None) -> tuple[Tensor, None, Tensor]:
        normed = state if norm is None else norm(state)
        return normed, None, normed

    def coefficients(self, state: Tensor, norm: Callable[[Tensor], Tensor] | None = None) -> Tensor | None:
        """By what an RMSNorm multiplies each element `[batch, seq, hidden]`."""
        return None if norm is None else torch.where(state == 0, 0, norm(state) / state)

    def mix(self, state: Tensor, coefficients: Tensor | None) -> tuple[Tensor, Tensor]:
        mixed = state if coefficients is None else coefficients * state
        return mixed, mixed

    def write(self, state: Tensor, output: Tensor) -> Tensor:
        return state + output


__all__ = ["PostNorm"]
