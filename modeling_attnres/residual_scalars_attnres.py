"""Residual scalars with x0 (nanochat, modded-nanogpt): the stream is scaled, and the embedding is added to it.

    h <- (1 + a_i) h + b_i v_0        before layer i; then the sublayers add their outputs as in the standard model

`a_i` and `b_i` are scalars. Both start at 0, which is exactly the standard model. `a` acts on all later layers, so it
gets a hundredth of the learning rate of `b`, as in nanochat. (nanochat also norms the embedding, and starts from
a = 0.15 to 0.05 and b = 0.20 to 0.05, by depth. Here the embedding stays as the backbone makes it.)
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init

from .residual_attnres import DepthState, ResidualConnection, field_defaults, one_of, require

_EACH = "layer", "sublayer"
_STARTS = "standard", "nanochat"


class ResidualScalarsFields:
    """Configuration fields of `residual_connection="residual_scalars"`."""

    residual_scalars_each: str = "layer"
    """Where scalars act: before each `"layer"` (nanochat) or before each `"sublayer"`. (modded-nanogpt too has scalars
    of each sublayer, but its sublayers read the stream before it is scaled, and their outputs have a third scalar.)"""

    residual_scalars_start: str = "standard"
    """Start of the scalars: `"standard"` (zero) or `"nanochat"` (a from 0.15 to 0.05, b from 0.20 to 0.05)."""


class ResidualScalars(ResidualConnection):
    """Residual scalars with x0. State: the embedding and the stream, each `[batch, seq, hidden]`.

    Tensors: `stream` `[1]` is `a_i`, and `embedding` `[1]` is `b_i`. Sublayers without scalars, and the output, have
    neither.
    """

    name = "residual_scalars"
    summary = "scaled stream, embedding"
    used_by = "nanochat"
    own_start = "0, as first in nanochat; `residual_scalars_start` has its later one"
    state_size = "2"
    measured = {"step": "1.02"}
    fields = field_defaults(ResidualScalarsFields)
    start_fields = ("residual_scalars_start",)
    retrofit = {"residual_scalars_start": "standard"}
    float32 = True
    rate_factors = {"stream": 0.01}

    def __init__(self, config: PreTrainedConfig, sublayer: int):
        super().__init__(config, sublayer)
        every = len(config.sublayers) if config.residual_scalars_each == "layer" else 1
        # Share of the depth before this sublayer: 0 at the first scalars, 1 at the last ones.
        last = config.num_sublayers // every - 1
        self.depth = sublayer // every / max(last, 1)
        self.start = config.residual_scalars_start
        self.register_parameter("stream", None)
        self.register_parameter("embedding", None)
        if sublayer < config.num_sublayers and sublayer % every == 0:
            self.stream, self.embedding = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
            self.reset_parameters()

    @classmethod
    def check(cls, config: PreTrainedConfig) -> None:
        """Check both fields; see [`ResidualConnection.check`]."""
        require(config, "residual_scalars_each", config.residual_scalars_each in _EACH, one_of(_EACH))
        require(config, "residual_scalars_start", config.residual_scalars_start in _STARTS, one_of(_STARTS))

    @classmethod
    def describe(cls, config: PreTrainedConfig) -> str:
        """Return, for example, "residual scalars with x0, of each layer"."""
        return f"residual scalars with x0, of each {config.residual_scalars_each}"

    @classmethod
    def plan_retrofit(cls, config: PreTrainedConfig, **options) -> None:
        """Set the fields; see the base class.

        Raises:
            ValueError: also if the scalars do not start at zero.
        """
        super().plan_retrofit(config, **options)
        require(
            config, "residual_scalars_start", config.residual_scalars_start == "standard", "'standard' in a retrofit"
        )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the scalars to their start."""
        if self.stream is not None:
            is_standard = self.start == "standard"
            init.constant_(self.stream, 0.0 if is_standard else 0.15 - 0.10 * self.depth)
            init.constant_(self.embedding, 0.0 if is_standard else 0.20 - 0.15 * self.depth)

    def mix(self, state: DepthState, coefficients: None) -> tuple[Tensor, DepthState]:
        """Scale the stream and add the embedding; return the stream `[batch, seq, hidden]` as the input."""
        embedding, stream = state if isinstance(state, tuple) else (state, state)
        if self.stream is not None:
            # The sum is rounded once, at the end. A scalar `[1]` takes part in type promotion.
            dtype = torch.promote_types(stream.dtype, torch.float32)
            mixed = (1 + self.stream.to(dtype)) * stream + self.embedding.to(dtype) * embedding
            stream = mixed.to(stream.dtype)
        return stream, (embedding, stream)

    def write(self, state: tuple[Tensor, Tensor], output: Tensor) -> tuple[Tensor, Tensor]:
        """Add an output `[batch, seq, hidden]` to the stream."""
        embedding, stream = state
        return embedding, stream + output


__all__ = ["ResidualScalars", "ResidualScalarsFields"]
