"""Highway networks (arXiv 1505.00387): a gate carries the stream on in one channel and takes the output in another.

    h_{l+1} = g_l * v_l + (1 - g_l) * h_l,   g_l = sigmoid(W_g RMSNorm(h_l) + b_g)

The gate is elementwise. `b_g` starts at -1, so that layers mostly carry the stream at first. The two shares add up to
one, so no setting gives the standard residual `h_l + v_l`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init

from .residual_attnres import DepthState, ResidualConnection, field_defaults, is_number, norm_eps, require


class HighwayFields:
    """Configuration field of `residual_connection="highway"`."""

    highway_bias: float = -1.0
    """Start of the gates' biases `b_g`, from -100 to 100."""


class Highway(ResidualConnection):
    """Highway gates. State: the stream and, from a read to its write, the gate; each is `[batch, seq, hidden]`.

    Tensors: `weight` `[hidden, hidden]` is `W_g`, `bias` `[hidden]` is `b_g`. The output's connection has neither.
    """

    name = "highway"
    summary = "gates of old and new"
    reference = "arXiv 1505.00387"
    measured = {"step": "1.13"}
    fields = field_defaults(HighwayFields)
    start_fields = ("highway_bias",)
    float32 = True  # beside the -1 of a bias's start, bfloat16 would lose the steps of training

    def __init__(self, config: PreTrainedConfig, sublayer: int):
        super().__init__(config, sublayer)
        self.start, self.eps = config.highway_bias, norm_eps(config)
        self.std = getattr(config, "initializer_range", 0.02)
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        if sublayer < config.num_sublayers:
            self.weight = nn.Parameter(torch.zeros(config.hidden_size, config.hidden_size))
            self.bias = nn.Parameter(torch.zeros(config.hidden_size))
            self.reset_parameters()

    @classmethod
    def check(cls, config: PreTrainedConfig) -> None:
        """Check the start of the biases; see [`ResidualConnection.check`]."""
        bias = config.highway_bias
        is_valid = is_number(bias) and -100 <= bias <= 100
        require(config, "highway_bias", is_valid, "a number from -100 to 100")

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw `W_g` from a normal distribution, and set `b_g` to its start."""
        if self.weight is not None:
            init.normal_(self.weight, std=self.std)
            init.constant_(self.bias, self.start)

    def coefficients(self, state: Tensor, norm: None = None) -> Tensor | None:
        """Compute the gate `[batch, seq, hidden]`; the output has none."""
        if self.weight is None:
            return None
        # In 16 bits the large product has the model's dtype, and only the sum with the bias is wider.
        logits = F.linear(F.rms_norm(state, state.shape[-1:], eps=self.eps), self.weight.to(state.dtype))
        return (logits + self.bias).sigmoid().to(state.dtype)

    def mix(self, state: Tensor, coefficients: Tensor | None) -> tuple[Tensor, DepthState]:
        """Return the stream `[batch, seq, hidden]` as the input, and keep the gate for the write."""
        return state, (state if coefficients is None else (state, coefficients))

    def write(self, state: tuple[Tensor, Tensor], output: Tensor) -> Tensor:
        """Combine stream and output `[batch, seq, hidden]` by the gate."""
        stream, gate = state
        return gate.to(stream.dtype) * output + (1 - gate).to(stream.dtype) * stream


__all__ = ["Highway", "HighwayFields"]
