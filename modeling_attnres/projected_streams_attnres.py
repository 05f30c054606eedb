"""Residual connections whose n streams are read, mixed and written with the projections of mHC (arXiv 2512.24880).

    x = RMSNorm(flatten(X)),   H_pre = sigmoid(a_1 F_1 x + b_1),   H_post = 2 sigmoid(a_2 F_2 x + b_2)        both [n]

With `b_1 = -ln(n - 1)`, `b_2 = 0` and `a = 0`, `H_pre` is 1/n and `H_post` is 1. The model is then exactly the standard
one, if `H_res` does not change equal streams. The stored bias is the difference of `b` from its start: zero is exact in
every dtype, but `-ln(n - 1)` is not.

From this start the streams stay nearly equal for long: they have equal shares in all reads and writes, so that their
biases get equal gradients, and only `a F x` sets them apart. F is drawn like other matrices, and F x is far below 1 in
a narrow model. With `residual_streams_start="apart"`, F_2 is drawn so that the entries of `F_2 x` have a deviation of
8. While `a_2` is zero, this changes nothing; then the writes differ from the first steps on.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.utils.generic import maybe_autocast

from .functional_attnres import inverse_rms
from .residual_attnres import DepthState, field_defaults
from .streams_attnres import ResidualStreams, StreamStartFields, wide

_APART = 8.0  # deviation of `F_2 x` where streams start apart


class ProjectedStreams(ResidualStreams):
    """Base of connections with these projections. A subclass may define `H_res - I` as `mixing(a_3 F_3 x + b_3)`.

    Tensors: `weight` `[2n + m, n hidden]` holds `F_1`, `F_2` and the m rows of `F_3`; `scale` `[2]` or `[3]` holds the
    `a`; `bias` `[2n + m]` is the difference of the `b` from their start.
    """

    fields = field_defaults(StreamStartFields)
    start_fields = ("residual_streams_start",)
    retrofit = {"residual_streams_start": "apart"}

    def add_tensors(self, config: PreTrainedConfig) -> None:
        """Register `weight`, `bias` and `scale`."""
        self.std = getattr(config, "initializer_range", 0.02)
        rows = self.mixing_rows(self.streams)
        self.parts = (self.streams, self.streams, *([rows] if rows else []))
        self.weight = nn.Parameter(torch.zeros(sum(self.parts), self.streams * config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(sum(self.parts)))
        self.scale = nn.Parameter(torch.zeros(len(self.parts)))
        self.is_apart = config.residual_streams_start == "apart"

    @staticmethod
    def mixing_rows(streams: int) -> int:
        """Return the number m of logits that `mixing` takes; 0 if `H_res` is the identity."""
        return 0

    def mixing(self, logits: Tensor) -> Tensor:
        """Compute `H_res - I` `[..., n, n]` from logits `[..., m]`."""
        raise NotImplementedError

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the projections from a normal distribution, and set scales and biases to zero."""
        if not self.is_output:
            if self.is_apart:
                # `init` leaves a tensor alone that was loaded, but not a part of one.
                start = torch.empty_like(self.weight).normal_(std=self.std)
                start[self.streams : 2 * self.streams].normal_(std=_APART / start.shape[1] ** 0.5)
                init.copy_(self.weight, start)
            else:
                init.normal_(self.weight, std=self.std)  # not zero: it breaks the symmetry of the streams
            init.zeros_(self.bias)
            init.zeros_(self.scale)

    def coefficients(self, state: DepthState, norm: None = None) -> tuple[Tensor, ...] | None:
        """Compute `H_pre`, `H_post` and, if streams are mixed, `H_res - I`; the output has none."""
        if self.is_output:
            return None
        streams = self.expand(state)[-1]
        with maybe_autocast(streams.device.type, enabled=False):
            flat = streams.flatten(-2).to(wide(streams))
            logits = F.linear(flat, self.weight.to(flat.dtype)) * inverse_rms(flat, self.eps, flat.dtype).unsqueeze(-1)
            parts = (part.split(self.parts, -1) for part in (logits, self.bias.to(flat.dtype)))
            pre, post, *mixing = (a * part + b for a, part, b in zip(self.scale.to(flat.dtype), *parts))
            return (pre - math.log(self.streams - 1)).sigmoid(), 2 * post.sigmoid(), *map(self.mixing, mixing)


def minus_identity(matrix: Tensor) -> Tensor:
    """Subtract the identity from a matrix `[..., n, n]` whose columns sum to 1.

    The diagonal is computed from the other entries, which are small. So the columns of the result sum to 0 more exactly
    than if ones were subtracted from a diagonal near 1.
    """
    others = matrix.tril(-1) + matrix.triu(1)
    return others - others.sum(-2).diag_embed()


__all__ = ["ProjectedStreams", "minus_identity"]
