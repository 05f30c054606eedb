"""Residual connections with n streams: the common part of Hyper-Connections and their successors.

    input  h = sum_j H_pre[j] X_j,            output  X' = H_res^T X + H_post (x) f(h)

The streams X `[n, hidden]` begin as n copies of the embedding; the model's output reads their mean. (The papers sum
them. At the start all streams are equal, and their mean is the standard residual stream.) `H_res[i, j]` is the share of
stream i that is added to stream j.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.utils.generic import maybe_autocast

from .residual_attnres import DepthState, ResidualConnection, field_defaults, norm_eps, one_of, require

_STARTS = "equal", "apart"


class StreamFields:
    """Configuration field of all connections with several streams."""

    residual_streams: int = 4
    """Number n of residual streams, from 2 to 64."""


class StreamStartFields(StreamFields):
    """Configuration fields of connections whose streams may start apart."""

    residual_streams_start: str = "equal"
    """`"equal"`: training separates the streams slowly. `"apart"`: some tensors start at other values, by which it
    separates them in its first steps. Both start as the standard model."""


class ResidualStreams(ResidualConnection):
    """Base of connections with n streams; a subclass defines `add_tensors`, `reset_parameters` and `coefficients`.

    State: a tuple of the streams `[batch, seq, n, hidden]` and, between a read and its write, `H_post`.

    The coefficients are `H_pre` and `H_post` `[batch, seq, n]` and, if streams are mixed, `H_res - I`
    `[batch, seq, n, n]`, in float32 or wider, under autocast too. The output has neither coefficients nor tensors.
    """

    fields = field_defaults(StreamFields)
    options = {"streams": "residual_streams"}
    retrofit = {}
    state_size = "n"
    title: ClassVar[str]  # name in descriptions

    def __init__(self, config: PreTrainedConfig, sublayer: int):
        super().__init__(config, sublayer)
        self.streams, self.eps = config.residual_streams, norm_eps(config)
        self.is_output = sublayer >= config.num_sublayers
        if not self.is_output:
            self.add_tensors(config)
            self.reset_parameters()

    def add_tensors(self, config: PreTrainedConfig) -> None:
        """Register the tensors of a sublayer; `reset_parameters` sets their values."""
        raise NotImplementedError

    @classmethod
    def check(cls, config: PreTrainedConfig) -> None:
        """Check the number of streams and their start; see [`ResidualConnection.check`]."""
        require_integer(config, "residual_streams", 2, 64)
        if "residual_streams_start" in cls.fields:
            require(config, "residual_streams_start", config.residual_streams_start in _STARTS, one_of(_STARTS))

    @classmethod
    def describe(cls, config: PreTrainedConfig) -> str:
        """Return, for example, "mHC, 4 streams"."""
        return f"{cls.title}, {config.residual_streams} streams"

    def expand(self, state: DepthState) -> tuple[Tensor, ...]:
        """Return the state as a tuple; the embedding becomes n equal streams."""
        if isinstance(state, tuple):
            return state
        return (state.unsqueeze(-2).expand(*state.shape[:-1], self.streams, -1),)

    def forward(self, state: DepthState, norm: None = None) -> tuple[Tensor, Any, DepthState]:
        """Read; see the base class."""
        streams = self.expand(state)[0]
        # `coefficients` and `mix` both need the streams in float32: they share one copy.
        return super().forward((streams, streams.to(wide(streams))), norm)

    def mix(self, state: DepthState, coefficients: tuple[Tensor, ...] | None) -> tuple[Tensor, DepthState]:
        """Compute the input `[batch, seq, hidden]`, and mix the streams; see the base class."""
        streams, *copies = self.expand(state)
        if coefficients is None:
            return streams.mean(-2, dtype=wide(streams)).to(streams.dtype), (streams,)
        pre, post, *changes = coefficients
        # Products of such small matrices are faster than sums over streams. Each result has a separate product, since
        # two parts of one tensor would keep all of it in memory. Autocast would compute them in half precision.
        with maybe_autocast(streams.device.type, enabled=False):
            copy = copies[0] if copies else streams.to(pre.dtype)
            inputs = (pre.unsqueeze(-2) @ copy).squeeze(-2).to(streams.dtype)
            for change in changes:  # `H_res - I`, if streams are mixed: unlike `H_res`, it keeps equal streams equal
                streams = (copy + change.mT @ copy).to(streams.dtype)
        return inputs, (streams, post)

    def write(self, state: tuple[Tensor, Tensor], output: Tensor) -> tuple[Tensor]:
        """Add an output `[batch, seq, hidden]` to each stream, times its `H_post`."""
        streams, post = state
        with maybe_autocast(streams.device.type, enabled=False):
            return ((streams + post.unsqueeze(-1) @ output.unsqueeze(-2).to(post.dtype)).to(streams.dtype),)


def require_integer(config: PreTrainedConfig, field: str, least: int, most: int) -> None:
    """Raise if a configuration field is not an integer in a range.

    Args:
        config: the configuration that holds the field.
        field: name of the field.
        least: smallest allowed value.
        most: largest allowed value.

    Raises:
        ValueError: the value is not an integer, or out of the range.
    """
    value = getattr(config, field)
    is_valid = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
    require(config, field, is_valid, f"an integer from {least} to {most}")


def wide(tensor: Tensor) -> torch.dtype:
    """Return the tensor's dtype, but at least float32."""
    return torch.promote_types(tensor.dtype, torch.float32)


__all__ = ["ResidualStreams", "StreamFields", "StreamStartFields", "require_integer", "wide"]
