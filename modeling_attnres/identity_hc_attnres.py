"""Identity Hyper-Connections: n residual streams that are read and written with learned weights and never mixed.

    x = RMSNorm(flatten(X)),   H_pre = sigmoid(a_1 F_1 x + b_1),   H_post = 2 sigmoid(a_2 F_2 x + b_2)        all [n]
    input  h = sum_j H_pre[j] X_j,            output  X' = X + H_post (x) f(h)

mHC (arXiv 2512.24880) with `H_res = I`. The streams begin as n copies of the embedding; the output is their mean. With
`b_1 = -ln(n - 1)`, `b_2 = 0` and `a = 0` the weights are 1/n and 1, and the model is the standard one exactly. What is
kept and trained is how far `b` is from there: zero is exact in every dtype, `-ln(n - 1)` in bfloat16 is not.
"""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.utils.generic import maybe_autocast

from .residual_attnres import DepthState, ResidualConnection, norm_eps, require


class IdentityHyperConnections(ResidualConnection):
    """State: the streams, `[batch, seq, n, hidden]`, in a tuple of one. Coefficients are computed in float32 or wider.

    `weight` `[2n, n hidden]` holds `F_1` and `F_2`, `scale` `[2]` the `a` of both, and `bias` `[2n]` what is added to
    the `b` of the start. The output has no tensors: it is the mean of the streams.
    """

    name = "identity_hc"
    fields = {"residual_streams": 4}
    options = {"streams": "residual_streams"}
    retrofit = {}

    def __init__(self, config: PreTrainedConfig, sublayer: int):
        super().__init__(config, sublayer)
        self.streams, self.eps = config.residual_streams, norm_eps(config)
        self.std = getattr(config, "initializer_range", 0.02)
        for tensor in ("weight", "bias", "scale"):
            self.register_parameter(tensor, None)
        if sublayer < config.num_sublayers:
            self.weight = nn.Parameter(torch.zeros(2 * self.streams, self.streams * config.hidden_size))
            self.bias = nn.Parameter(torch.zeros(2 * self.streams))
            self.scale = nn.Parameter(torch.zeros(2))
            self.reset_parameters()

    @classmethod
    def check(cls, config: PreTrainedConfig) -> None:
        streams = config.residual_streams
        is_valid = isinstance(streams, int) and not isinstance(streams, bool) and streams >= 2
        require(config, "residual_streams", is_valid, "an integer >= 2")

    @classmethod
    def describe(cls, config: PreTrainedConfig) -> str:
        return f"Identity Hyper-Connections, {config.residual_streams} streams"

    @classmethod
    def differs_from_standard(cls, config: PreTrainedConfig, tensors: Mapping[str, Tensor]) -> str | None:
        for name, tensor in tensors.items():
            if name.endswith(".scale") and tensor.count_nonzero():
                return f"`{name}` is not zero: its coefficients depend on the tokens"
            if name.endswith(".bias") and tensor.count_nonzero():
                return f"`{name}` is trained: its streams have other weights"
        return None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.weight is not None:
            init.normal_(self.weight, std=self.std)  # not zero: it breaks the symmetry of the streams
            init.zeros_(self.bias)
            init.zeros_(self.scale)

    def coefficients(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """`H_pre` and `H_post`, each `[batch, seq, n]` in float32, or in float64 if the streams are."""
        dtype = _wide(streams)
        # Under autocast the product would fall to half precision.
        with maybe_autocast(streams.device.type, enabled=False):
            flat = streams.flatten(-2).to(dtype)
            flat = F.rms_norm(flat, flat.shape[-1:], eps=self.eps)
            projected = F.linear(flat, self.weight.to(dtype)).unflatten(-1, (2, self.streams))
            logits = self.scale.to(dtype)[:, None] * projected + self.bias.to(dtype).view(2, self.streams)
            pre, post = logits.unbind(-2)
            return (pre - math.log(self.streams - 1)).sigmoid(), 2 * post.sigmoid()

    def forward(self, state: DepthState, norm_weight: None = None) -> tuple[Tensor, None, DepthState]:
        if not isinstance(state, tuple):
            state = (state.unsqueeze(-2).repeat_interleave(self.streams, -2),)
        (streams,) = state
        if self.weight is None:
            return streams.to(_wide(streams)).mean(-2).to(streams.dtype), None, state
        pre, post = self.coefficients(streams)
        inputs = (pre.unsqueeze(-1) * streams).sum(-2)
        return inputs.to(streams.dtype), None, (streams, post)

    def write(self, state: tuple[Tensor, Tensor], output: Tensor) -> tuple[Tensor]:
        streams, post = state
        return ((streams + post.unsqueeze(-1) * output.unsqueeze(-2)).to(streams.dtype),)


def _wide(streams: Tensor) -> torch.dtype:
    return torch.promote_types(streams.dtype, torch.float32)


__all__ = ["IdentityHyperConnections"]
