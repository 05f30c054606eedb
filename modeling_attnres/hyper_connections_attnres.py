"""Hyper-Connections (arXiv 2409.19606): n residual streams, read, mixed and written with free weights.

    input  h = A_m^T X,      output  X' = A_r^T X + B (x) f(h)
    [A_m, A_r, B] = S + [s_a, s_a, s_b] tanh(N [W_m, W_r, W_b]),   N = RMSNorm(X), over each stream

The static part `S` starts as `A_m = e_{l mod n}` for sublayer l, `A_r = I` and `B = 1`; the dynamic part starts with
`W = 0` and the scales `s` at 0.01. The model is then exactly the standard one, and training makes the streams differ.
The norm has no weight, since `W` can include it.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.utils.generic import maybe_autocast

from .functional_attnres import inverse_rms
from .residual_attnres import DepthState, field_defaults, require
from .streams_attnres import ResidualStreams, StreamFields, wide


class HyperConnectionsFields(StreamFields):
    """Configuration fields of `residual_connection="hyper_connections"`."""

    hyper_connections_dynamic: bool = True
    """`True` adds to the static coefficients a part that depends on the token."""


class HyperConnections(ResidualStreams):
    """Hyper-Connections, static or dynamic.

    Tensors: `static` `[n, n + 2]` holds for each stream its `A_m`, its row of `A_r` and its `B`. Dynamic ones also have
    `weight` `[n + 2, hidden]`, which is `W_m`, `W_r` and `W_b`, and `scale` `[2]`, which is `s_a` and `s_b`.
    """

    name = "hyper_connections"
    summary = "n streams, mixed"
    reference = "arXiv 2409.19606"
    measured = {"step": "1.16"}
    title = "Hyper-Connections"
    # Rounding `static` and `scale` to bfloat16 moved the logits of a trained model by 0.7% of their spread, rounding
    # the weights of the backbone by 0.4%, and rounding the tensors of another connection by less than 0.2%.
    float32 = True
    fields = field_defaults(HyperConnectionsFields)

    @classmethod
    def check(cls, config: PreTrainedConfig) -> None:
        """Check both fields; see [`ResidualConnection.check`]."""
        super().check(config)
        is_dynamic = config.hyper_connections_dynamic
        require(config, "hyper_connections_dynamic", isinstance(is_dynamic, bool), "true or false")

    @classmethod
    def describe(cls, config: PreTrainedConfig) -> str:
        """Return, for example, "static Hyper-Connections, 4 streams"."""
        return ("" if config.hyper_connections_dynamic else "static ") + super().describe(config)

    @classmethod
    def differs_from_standard(cls, config: PreTrainedConfig, tensors: Mapping[str, Tensor]) -> str | None:
        """Return a reason if coefficients depend on the tokens or the static part is trained; see the base class."""
        n = config.residual_streams
        for name, tensor in tensors.items():
            if name.endswith(".weight") and tensor.count_nonzero():
                return f"`{name}` is not zero: its coefficients depend on the tokens"
            if name.endswith(".static"):
                # At the start `A_m` is 1 for one stream and 0 for the others, `A_r` is the identity, and `B` is 1.
                read, between, write = tensor.split([1, n, 1], dim=1)
                is_start = (read == 0).sum() == n - 1 and read.sum() == 1 and (write == 1).all()
                if not (is_start and torch.equal(between, torch.eye(n).to(between))):
                    return f"`{name}` is trained: its streams have other weights"
        return None

    def add_tensors(self, config: PreTrainedConfig) -> None:
        """Register `static` and, if dynamic, `weight` and `scale`."""
        self.static = nn.Parameter(torch.zeros(self.streams, self.streams + 2))
        for name in ("weight", "scale"):
            self.register_parameter(name, None)
        if config.hyper_connections_dynamic:
            self.weight = nn.Parameter(torch.zeros(self.streams + 2, config.hidden_size))
            self.scale = nn.Parameter(torch.zeros(2))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the tensors to the start of the standard residual; see the module's docstring."""
        if self.is_output:
            return
        one = torch.eye(self.streams, device=self.static.device)
        start = torch.cat([one[:, self.sublayer % self.streams, None], one, torch.ones_like(one[:, :1])], dim=1)
        init.copy_(self.static, start)
        if self.weight is not None:
            init.zeros_(self.weight)
            init.constant_(self.scale, 0.01)

    def coefficients(self, state: DepthState, norm: None = None) -> tuple[Tensor, Tensor, Tensor] | None:
        """Compute `A_m`, `B` and `A_r - I`, the base class's `H_pre`, `H_post` and `H_res - I`; the output has none."""
        if self.is_output:
            return None
        streams = self.expand(state)[-1]
        dtype, n = wide(streams), self.streams
        weights = self.static.to(dtype).expand(*streams.shape[:-1], -1)  # (batch, seq, n, n + 2)
        if self.weight is not None:
            with maybe_autocast(streams.device.type, enabled=False):
                streams = streams.to(dtype)
                projected = F.linear(streams, self.weight.to(dtype)) * inverse_rms(streams, self.eps, dtype).unsqueeze(
                    -1
                )
                alpha, beta = self.scale.to(dtype)
                weights = weights + projected.tanh() * torch.cat([alpha.expand(n + 1), beta.expand(1)])
        # Batched matrix products are slow for strided rows.
        read, write = weights[..., 0].contiguous(), weights[..., -1].contiguous()
        return read, write, weights[..., 1:-1] - torch.eye(n, dtype=dtype, device=streams.device)


__all__ = ["HyperConnections", "HyperConnectionsFields"]
