"""Residual connections: what a sublayer reads from the layers before it, and where its output goes.

Every connection is one module per sublayer with two operations on the *state* that flows through the decoder layers:

    read    (state) -> input of sublayer l, depth weights, state    `connection(state, norm_weight)`
    write   (state, output of sublayer l) -> state                  `connection.write(state, output)`

What reading returns as the state has the same values: gradients of those who read later come through this read.

Only the connections look inside the state, so a new one needs no change to the layers.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from .functional_attnres import attend

# The embedding `[batch, seq, hidden]` before the first sublayer; after it, what the connection's `write` returned:
# a tensor of that shape, or a flat tuple of them.
DepthState = Tensor | tuple[Tensor, ...]


class ResidualConnection(nn.Module):
    """One sublayer's residual connection; `sublayer` counts the sublayers of the decoder from 0."""

    has_norm: bool
    # Whether `forward` takes, as a third argument, the plain RMSNorm that the sublayer begins with; then it returns the
    # output of that, and no weights.
    reads_through_norm = False

    def __init__(self, config: PreTrainedConfig, sublayer: int):
        super().__init__()
        self.sublayer = sublayer

    def forward(self, state: DepthState, norm_weight: Tensor | None) -> tuple[Tensor, Tensor | None, DepthState]:
        """Read: the sublayer's input `[batch, seq, hidden]`, its depth weights `[sources, batch, seq]`, the state."""
        raise NotImplementedError

    def write(self, state: DepthState, output: Tensor) -> DepthState:
        """Write: the state after a sublayer with this output `[batch, seq, hidden]`."""
        raise NotImplementedError


class StandardResidual(ResidualConnection):
    """The residual stream, `h_l = v_0 + v_1 + ... + v_{l-1}`. State: that running sum."""

    has_norm = False

    def forward(self, state: Tensor, norm_weight: None) -> tuple[Tensor, None, Tensor]:
        return state, None, state

    def write(self, state: Tensor, output: Tensor) -> Tensor:
        return state + output


class AttnRes(ResidualConnection):
    """Attention residuals, `h_l = sum_i softmax_i(w_l . (g_l * RMSNorm(s_i))) s_i`, full or in blocks of S sublayers.

    State: the sources, as a flat tuple. The embedding comes first (block 0), then the finished blocks, each the plain
    sum of its S sublayer outputs, and last the running partial sum of the current block, if it has begun.

    `weight` is the pseudo-query `w_l`, `[1, hidden]` as in the released checkpoints: a vector, not an `nn.Linear`, so
    that quantisers and LoRA's `all-linear` leave it alone.
    """

    has_norm = True
    reads_through_norm = True

    def __init__(self, config: PreTrainedConfig, sublayer: int):
        super().__init__(config, sublayer)
        self.block_size = config.attn_res_block_size
        self.scale = config.attn_res_scale
        self.eps = _norm_eps(config)
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size))

    def forward(
        self, state: DepthState, norm_weight: Tensor, norm: nn.Module | None = None
    ) -> tuple[Tensor, Tensor | None, DepthState]:
        sources = state if isinstance(state, tuple) else (state,)
        return attend(self.weight, sources, norm_weight, self.eps, self.scale == "sum", norm, passes_on=True)

    def write(self, state: DepthState, output: Tensor) -> tuple[Tensor, ...]:
        sources = state if isinstance(state, tuple) else (state,)
        if self.sublayer % self.block_size == 0:
            # Under autocast the embedding is wider than a sublayer's output; a block is summed in the wider of the two,
            # as the residual stream is.
            return *sources, output.to(sources[0].dtype)
        return *sources[:-1], sources[-1] + output

    def extra_repr(self) -> str:
        return f"{self.weight.shape[-1]}, sublayer={self.sublayer}, block_size={self.block_size}, scale={self.scale}"


class ResidualNorm(nn.Module):
    """Holds the weight `g_l` `[hidden]` of the norm inside a connection; no weight where the connection has none.

    Calling it returns the weight: offloading engines bring a module's tensors to the device when it is called.
    """

    def __init__(self, hidden_size: int, has_weight: bool):
        super().__init__()
        self.register_parameter("weight", nn.Parameter(torch.ones(hidden_size)) if has_weight else None)

    def forward(self) -> Tensor | None:
        return self.weight


def _norm_eps(config: PreTrainedConfig) -> float:
    """Epsilon of the key norm: that of the backbone's own norms, whatever it calls it."""
    names = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "layer_norm_epsilon")
    return next((getattr(config, name) for name in names if hasattr(config, name)), 1e-6)


_CONNECTIONS: dict[str, type[ResidualConnection]] = {"standard": StandardResidual, "attn_res": AttnRes}


def add_residual_connection(module: nn.Module, name: str, config: PreTrainedConfig, sublayer: int) -> None:
    """Register a connection as `{name}_proj` and its norm as `{name}_norm`: the names of the released weights."""
    connection = _CONNECTIONS[config.residual_connection](config, sublayer)
    module.add_module(f"{name}_proj", connection)
    module.add_module(f"{name}_norm", ResidualNorm(config.hidden_size, connection.has_norm))


__all__ = ["AttnRes", "DepthState", "ResidualConnection", "ResidualNorm", "StandardResidual", "add_residual_connection"]
