"""LAuReL (arXiv 2411.07501): a residual stream with learned weights, and with a low-rank map of the stream.

    rw   h_{l+1} = a f(h_l) + b h_l
    lr   h_{l+1} = f(h_l) + h_l + B A h_l,    A `[r, hidden]`, B `[hidden, r]`

`a` and `b` are `2 softmax` of two learned logits, which start equal. B starts at zero, and A at `1 / sqrt(r hidden)` in
row `i mod r` of each column i. So both forms, also together, start exactly as the standard model. (The third form of
the paper, which reads several earlier states, is a `denseformer` of a few states.)
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init

from .residual_attnres import DepthState, ResidualConnection, field_defaults, one_of, require
from .streams_attnres import require_integer, wide

_FORMS = "rw", "lr", "rw_lr"


class LAuReLFields:
    """Configuration fields of `residual_connection="laurel"`."""

    laurel_form: str = "rw_lr"
    """`"rw"` learns the weights of stream and output, `"lr"` adds a low-rank map of the stream; or both."""

    laurel_rank: int = 32
    """Rank r of the map, from 1 to `hidden_size`."""


class LAuReL(ResidualConnection):
    """LAuReL. State: the stream `[batch, seq, hidden]`; from a read to its write also the write's other terms.

    Tensors, where the form has them: `weights` `[2]`, the logits of `a` and `b`; `down` `[r, hidden]`, which is A, and
    `up` `[hidden, r]`, which is B. The output has none.
    """

    name = "laurel"
    summary = "weights, a low-rank map"
    reference = "arXiv 2411.07501"
    measured = {"step": "1.05"}
    fields = field_defaults(LAuReLFields)
    retrofit = {}

    def __init__(self, config: PreTrainedConfig, sublayer: int):
        super().__init__(config, sublayer)
        for name in ("weights", "down", "up"):
            self.register_parameter(name, None)
        if sublayer < config.num_sublayers:
            if "rw" in config.laurel_form:
                self.weights = nn.Parameter(torch.zeros(2))
            if "lr" in config.laurel_form:
                self.down = nn.Parameter(torch.zeros(config.laurel_rank, config.hidden_size))
                self.up = nn.Parameter(torch.zeros(config.hidden_size, config.laurel_rank))
            self.reset_parameters()

    @classmethod
    def form(cls, config: PreTrainedConfig) -> type[ResidualConnection]:
        """Return the class for the form: a low-rank map mixes channels, weights do not."""
        return LowRankLAuReL if "lr" in config.laurel_form else cls

    @classmethod
    def check(cls, config: PreTrainedConfig) -> None:
        """Check both fields; see [`ResidualConnection.check`]."""
        require(config, "laurel_form", config.laurel_form in _FORMS, one_of(_FORMS))
        if "lr" in config.laurel_form:
            require_integer(config, "laurel_rank", 1, max(config.hidden_size, 1))

    @classmethod
    def describe(cls, config: PreTrainedConfig) -> str:
        """Return, for example, "LAuReL-RW-LR, rank 32"."""
        rank = f", rank {config.laurel_rank}" if "lr" in config.laurel_form else ""
        return f"LAuReL-{config.laurel_form.upper().replace('_', '-')}{rank}"

    @classmethod
    def differs_from_standard(cls, config: PreTrainedConfig, tensors: Mapping[str, Tensor]) -> str | None:
        """Return a reason if a weight is not 1 or the map is not zero; see the base class."""
        for name, tensor in tensors.items():
            if name.endswith(".weights") and tensor[0] != tensor[1]:
                return f"`{name}` is trained: stream and output have other weights"
            if name.endswith(".up") and tensor.count_nonzero():
                return f"`{name}` is not zero: a map of the stream is added"
        return None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the tensors to the start of the standard residual."""
        if self.weights is not None:
            init.zeros_(self.weights)
        if self.down is not None:
            rank, hidden = self.down.shape
            start, columns = torch.zeros_like(self.down), torch.arange(hidden, device=self.down.device)
            start[columns % rank, columns] = (rank * hidden) ** -0.5
            init.copy_(self.down, start)
            init.zeros_(self.up)

    def coefficients(self, state: Tensor, norm: None = None) -> tuple[Tensor, ...] | None:
        """Compute `a` and `b`, each `[1]`; `None` if they are 1."""
        return None if self.weights is None else (2 * self.weights.to(wide(state)).softmax(0)).split(1)

    def mix(self, state: Tensor, coefficients: tuple[Tensor, ...] | None) -> tuple[Tensor, DepthState]:
        """Return the stream as input; and as state the stream, its part of the write's result, and `a`.

        The read computes this part, because engines that shard or offload a module hold its tensors only while it is
        called.
        """
        kept, factors = state, ()
        if coefficients is not None:
            a, b = coefficients
            kept, factors = b * state, (a,)  # not rounded before the output is added
        if self.down is not None:
            kept = kept + F.linear(F.linear(state, self.down), self.up)
        return state, (state, kept, *factors)

    def write(self, state: DepthState, output: Tensor) -> Tensor:
        """Add an output `[batch, seq, hidden]`, times its weight."""
        stream, kept, *factors = state if isinstance(state, tuple) else (state, state)
        for factor in factors:
            output = factor * output
        return (kept + output).to(stream.dtype)


class LowRankLAuReL(LAuReL):
    """LAuReL with a low-rank map of the stream."""

    mixes_channels = True


__all__ = ["LAuReL", "LAuReLFields", "LowRankLAuReL"]
