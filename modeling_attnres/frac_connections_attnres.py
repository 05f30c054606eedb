"""Frac-Connections (arXiv 2503.14125): Hyper-Connections between m parts of one residual stream of normal width.

    H = the stream as m parts `[m, hidden / m]`
    input  h = Y^T H, joined,      output  H' = A^T H + B (x) the parts of f(h)
    [Y, A, B] = S + [s_y, s_a, s_b] tanh(N [W_y, W_a, W_b]),   N = RMSNorm(H), over each part

The static part `S` starts as `Y = A = I` and `B = 1`; the dynamic part starts with `W = 0` and the scales `s` at 0.01.
The model is then exactly the standard one. The stored static part is the difference from the start. The output joins
the parts.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.utils.generic import maybe_autocast

from .functional_attnres import inverse_rms
from .residual_attnres import ResidualConnection, field_defaults, norm_eps, require
from .streams_attnres import require_integer, wide


class FracConnectionsFields:
    """Configuration fields of `residual_connection="frac_connections"`."""

    frac_connections_parts: int = 2
    """Number m of parts of the stream, from 2 to 64; it divides `hidden_size`."""

    frac_connections_dynamic: bool = True
    """`True` adds to the static coefficients a part that depends on the token."""


class FracConnections(ResidualConnection):
    """Frac-Connections, static or dynamic. State: the stream `[batch, seq, hidden]`, and from a read to its write `B`.

    Tensors: `static` `[m, 2m + 1]` holds for each part its row of `Y - I`, of `A - I`, and `B - 1`. Dynamic ones also
    have `weight` `[2m + 1, hidden / m]`, which is `W_y`, `W_a` and `W_b`, and `scale` `[3]`, the `s`.
    """

    name = "frac_connections"
    summary = "one stream in parts"
    reference = "arXiv 2503.14125"
    measured = {"step": "1.05"}
    fields = field_defaults(FracConnectionsFields)
    retrofit = {}
    float32 = True
    mixes_channels = True

    def __init__(self, config: PreTrainedConfig, sublayer: int):
        super().__init__(config, sublayer)
        self.parts, self.eps = config.frac_connections_parts, norm_eps(config)
        for name in ("static", "weight", "scale"):
            self.register_parameter(name, None)
        if sublayer < config.num_sublayers:
            rows = 2 * self.parts + 1
            self.static = nn.Parameter(torch.zeros(self.parts, rows))
            if config.frac_connections_dynamic:
                self.weight = nn.Parameter(torch.zeros(rows, config.hidden_size // self.parts))
                self.scale = nn.Parameter(torch.zeros(3))
            self.reset_parameters()

    @classmethod
    def check(cls, config: PreTrainedConfig) -> None:
        """Check both fields; see [`ResidualConnection.check`]."""
        require_integer(config, "frac_connections_parts", 2, 64)
        divides = config.hidden_size % config.frac_connections_parts == 0
        require(config, "frac_connections_parts", divides, f"a divisor of `hidden_size` ({config.hidden_size})")
        is_dynamic = config.frac_connections_dynamic
        require(config, "frac_connections_dynamic", isinstance(is_dynamic, bool), "true or false")

    @classmethod
    def describe(cls, config: PreTrainedConfig) -> str:
        """Return, for example, "static Frac-Connections, 2 parts"."""
        kind = "" if config.frac_connections_dynamic else "static "
        return f"{kind}Frac-Connections, {config.frac_connections_parts} parts"

    @classmethod
    def differs_from_standard(cls, config: PreTrainedConfig, tensors: Mapping[str, Tensor]) -> str | None:
        """Return a reason if coefficients depend on the tokens or the static part is trained; see the base class."""
        for name, tensor in tensors.items():
            if name.endswith(".weight") and tensor.count_nonzero():
                return f"`{name}` is not zero: its coefficients depend on the tokens"
            if name.endswith(".static") and tensor.count_nonzero():
                return f"`{name}` is trained: it mixes parts of the stream"
        return None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the tensors to the start of the standard residual."""
        if self.static is not None:
            init.zeros_(self.static)
        if self.weight is not None:
            init.zeros_(self.weight)
            init.constant_(self.scale, 0.01)

    def coefficients(self, state: Tensor, norm: None = None) -> tuple[Tensor, Tensor, Tensor] | None:
        """Compute `Y - I` and `A - I` `[..., m, m]`, and `B` `[..., m]`; the output has none."""
        if self.static is None:
            return None
        dtype, m = wide(state), self.parts
        changes = self.static.to(dtype).expand(*state.shape[:-1], -1, -1)  # (batch, seq, m, 2m + 1)
        if self.weight is not None:
            with maybe_autocast(state.device.type, enabled=False):
                parts = state.unflatten(-1, (m, -1)).to(dtype)
                projected = F.linear(parts, self.weight.to(dtype)) * inverse_rms(parts, self.eps, dtype).unsqueeze(-1)
                of_read, of_stream, of_write = self.scale.to(dtype).split(1)
                scale = torch.cat([of_read.expand(m), of_stream.expand(m), of_write])
                changes = changes + projected.tanh() * scale
        read, between, write = changes.split([m, m, 1], dim=-1)
        return read, between, 1 + write.squeeze(-1)

    def mix(self, state: Tensor, coefficients: tuple[Tensor, ...] | None) -> tuple[Tensor, Tensor | tuple[Tensor, ...]]:
        """Compute the input `[batch, seq, hidden]`, and mix the parts of the stream."""
        if coefficients is None:
            return state, state
        read, between, write = coefficients
        with maybe_autocast(state.device.type, enabled=False):
            parts = state.unflatten(-1, (self.parts, -1)).to(read.dtype)
            inputs, stream = ((parts + change.mT @ parts).flatten(-2).to(state.dtype) for change in (read, between))
        return inputs, (stream, write)

    def write(self, state: tuple[Tensor, Tensor], output: Tensor) -> Tensor:
        """Add the parts of an output `[batch, seq, hidden]` to those of the stream, times their `B`."""
        stream, factors = state
        output = output.expand_as(stream).unflatten(-1, (self.parts, -1)).to(factors.dtype)
        return (stream + (factors.unsqueeze(-1) * output).flatten(-2)).to(stream.dtype)


__all__ = ["FracConnections", "FracConnectionsFields"]
