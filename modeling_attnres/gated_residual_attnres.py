"""Gated Residual (arXiv 2608.30320, Qwen3.8): n streams, a gate for each channel of a read, and one for each write.

    R_j = (1 + g_j) * N(X_j)                                  N the sublayer's norm
    input  h = mean_j 2 sigmoid(W_u silu(W_d vec(R) / n))_j * R_j
    output X_j <- X_j + 2 sigmoid(W_w vec(R) / n)_j f(h)

The streams X `[n, hidden]` begin as n copies of the embedding, and are never mixed. A read takes the place of the norm
in front of its sublayer. The model's output reads likewise, but before the final norm, which the backbone applies:

    output  mean_j 2 sigmoid(W_u silu(W_d vec(X (1 + g)) / n))_j * (1 + g_j) X_j, where vec(X (1 + g)) is normed

`W_u` and `W_w` start at zero. The `g_j` start at 1/2, -1/2, 1/4, -1/4, ..., with a sum of zero: the model is then the
standard one up to rounding. If they were equal, the streams would stay equal for ever. (The published model norms each
stream by itself, without the sublayer's weight, and starts at random.)

Gains that are the same in all channels still give all streams gradients of nearly one direction, and AdamW the same
steps. With `residual_streams_start="apart"`, the `g_j` of a pair of streams start at 1/2 and -1/2 and change places
after every channel in the first pair, after every two in the second, and so on. The start is a part of the function for
good: the saved gains are differences from it.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init

from .functional_attnres import inverse_rms
from .residual_attnres import DepthState, field_defaults, require_norms
from .streams_attnres import ResidualStreams, StreamStartFields, require_integer, wide


class GatedResidualFields(StreamStartFields):
    """Configuration fields of `residual_connection="gated_residual"`."""

    gated_residual_rank: int | None = None
    """Rank of the read's gate, at least 1; by default an eighth of `hidden_size`."""


class GatedResidual(ResidualStreams):
    """Gated Residual. State: a tuple of the streams `[batch, seq, n, hidden]` and, from a read to its write, its gates.

    Tensors: `gains` `[n, hidden]` holds the differences of the `g_j` from their start, since beside 1/2 bfloat16 would
    lose the steps of training; `down` `[rank, n hidden]` is `W_d`, `up` `[n hidden, rank]` is `W_u`,
    and `weight` `[n, n hidden]` is `W_w`, which the output lacks.
    """

    name = "gated_residual"
    summary = "n streams, gated"
    reference = "arXiv 2608.30320"
    used_by = "Qwen3.8-Flash-Next"
    own_start = "gates at 1, gains apart; there at random"
    measured = {"step": "1.38"}
    title = "Gated Residual"
    fields = field_defaults(GatedResidualFields)
    retrofit = {"residual_streams_start": "apart"}
    takes_norm = True
    start: Tensor

    def __init__(self, config: PreTrainedConfig, sublayer: int):
        super().__init__(config, sublayer)
        if self.is_output:  # unlike other connections with streams, it has tensors
            self.add_tensors(config)
            self.register_parameter("weight", None)
            self.reset_parameters()

    @classmethod
    def check(cls, config: PreTrainedConfig) -> None:
        """Check the fields, and that sublayers begin with a norm; see [`ResidualConnection.check`]."""
        super().check(config)
        if config.gated_residual_rank is not None:
            require_integer(config, "gated_residual_rank", 1, max(config.hidden_size, 1))
        require_norms(config)

    @classmethod
    def differs_from_standard(cls, config: PreTrainedConfig, tensors: Mapping[str, Tensor]) -> str | None:
        """Return a reason if a gate depends on the tokens, or the `g_j` do not sum to zero; see the base class."""
        for name, tensor in tensors.items():
            if name.endswith((".up", ".weight")) and tensor.count_nonzero():
                return f"`{name}` is not zero: its gates depend on the tokens"
            if name.endswith(".gains") and tensor.sum(0).count_nonzero():
                return f"`{name}` is trained: its streams have other weights"
        return None

    def add_tensors(self, config: PreTrainedConfig) -> None:
        """Register `gains`, `down`, `up` and `weight`, and as a buffer that is not saved the start of the `g_j`."""
        n, hidden = self.streams, config.hidden_size
        rank = config.gated_residual_rank or max(hidden // 8, 1)
        self.std = getattr(config, "initializer_range", 0.02)
        self.gains = nn.Parameter(torch.zeros(n, hidden))
        self.is_apart = config.residual_streams_start == "apart"
        self.register_buffer("start", torch.zeros(n, hidden if self.is_apart else 1), persistent=False)
        self.down = nn.Parameter(torch.zeros(rank, n * hidden))
        self.up = nn.Parameter(torch.zeros(n * hidden, rank))
        self.weight = nn.Parameter(torch.zeros(n, n * hidden))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw `W_d` at random, set the other tensors to zero, and the start of the gains apart with a sum of zero."""
        init.normal_(self.down, std=self.std)
        init.zeros_(self.up)
        init.zeros_(self.gains)
        if self.weight is not None:
            init.zeros_(self.weight)
        init.copy_(self.start, self._start().to(self.start.device))

    def _start(self) -> Tensor:
        """Compute the start of the `g_j`, `[n, hidden]` or the same in all channels `[n, 1]`; an odd stream's is 0."""
        channels, rows = torch.arange(self.start.shape[1]), []
        for pair in range(self.streams // 2):
            if self.is_apart:
                row = 0.5 - (channels // (pair + 1) % 2).float()
            else:
                row = torch.full_like(channels, 2.0 ** -(1 + pair), dtype=torch.float32)
            rows += [row, -row]
        return torch.stack([*rows, *[torch.zeros_like(rows[0])] * (self.streams % 2)])

    def factors(self, dtype: torch.dtype) -> Tensor:
        """Compute `1 + g_j` `[n, hidden]`."""
        return 1 + self.start.to(dtype) + self.gains.to(dtype)

    def forward(
        self, state: DepthState, norm: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[Tensor, None, DepthState]:
        """Read the normed input.

        Args:
            state: the state before the read.
            norm: the norm of the sublayer; `None` for the output, whose norm the model applies.

        Returns:
            The input `[batch, seq, hidden]`, no depth weights, and the streams with the write's gates.
        """
        streams = self.expand(state)[0]
        sources = streams if norm is None else norm(streams)
        gates, *writes = self._gates(streams, sources)
        inputs = (gates * sources).sum(-2).to(streams.dtype)
        return inputs, None, (streams, *writes)

    def _gates(self, streams: Tensor, sources: Tensor) -> tuple[Tensor, ...]:
        """Compute the factors `[batch, seq, n, hidden]` of the sources in the input, and the write's gates.

        Args:
            streams: `[batch, seq, n, hidden]`.
            sources: the normed streams or, at the output, the streams.
        """
        dtype, gain = wide(streams), self.factors(wide(streams))
        # At the output, the gates still see normed streams.
        normed = streams * inverse_rms(streams, self.eps, dtype).unsqueeze(-1) if sources is streams else sources
        seen = (gain * normed).flatten(-2).to(self.down.dtype) / self.streams
        gates = F.linear(F.silu(F.linear(seen, self.down)), self.up).unflatten(-1, (self.streams, -1))
        factors = gain * (2 / self.streams * gates.to(dtype).sigmoid())
        if self.weight is None:
            return (factors,)
        return factors, 2 * F.linear(seen, self.weight).to(dtype).sigmoid()

    def coefficients(self, state: DepthState, norm: Callable[[Tensor], Tensor] | None = None) -> tuple[Tensor, ...]:
        """Compute the factors `[batch, seq, n, hidden]` of the streams in the input, and the write's gates."""
        streams = self.expand(state)[0]
        sources = streams if norm is None else norm(streams)
        factors, *writes = self._gates(streams, sources)
        if norm is not None:
            factors = factors * torch.where(streams == 0, 0, sources / streams)  # the norm as a factor
        return factors, *writes

    def mix(self, state: DepthState, coefficients: tuple[Tensor, ...]) -> tuple[Tensor, DepthState]:
        """Return the input `[batch, seq, hidden]`, and the streams with the write's gates."""
        streams = self.expand(state)[0]
        factors, *gates = coefficients
        return (factors * streams).sum(-2).to(streams.dtype), (streams, *gates)


__all__ = ["GatedResidual", "GatedResidualFields"]
