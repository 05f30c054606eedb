"""DCA, DeepCrossAttention (arXiv 2502.06785), one way: reads sum all outputs with weights of channel and token.

    h_l = sum_{i <= l} (b_i + s relu(w . N(v_i))) * v_i,    N = RMSNorm without weight

`v_0` is the embedding, `v_i` the output of sublayer `i - 1`; `b_i` `[hidden]` starts at 1, `w` `[hidden]` is drawn at
random, and the scale `s` starts at 0. The model is then exactly the standard one. (The published form has no `s` and
starts from w = 0, where relu has no gradient. Its queries, keys and values read sums of their own, which would need an
attention with three inputs.)

With `dca_window=k`, only the embedding and the last k outputs have weights of their own. The outputs between them are
summed, and the sum has one weight.
"""

from functools import reduce

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init

from .functional_attnres import inverse_rms
from .residual_attnres import DepthState, ResidualConnection, field_defaults, is_count, norm_eps, require
from .streams_attnres import wide


class DCAFields:
    """Configuration field of `residual_connection="dca"`."""

    dca_window: int | None = 2
    """Number k of latest outputs with weights of their own; `None` for all."""


class DCA(ResidualConnection):
    """DCA's weighted sums.

    State: the embedding and all outputs. With a window: the embedding, the sum of older outputs, and the last k
    outputs. Each is `[batch, seq, hidden]`.

    Tensors, for n tensors in the state: `bias` `[n, hidden]` is `b - 1`, `weight` `[1, hidden]` is `w`, and `scale`
    `[1]` is `s`. The first sublayer has none.
    """

    name = "dca"
    summary = "sums by channel and token"
    reference = "arXiv 2502.06785"
    state_size = "k + 2 = 4"
    own_start = "`s` = 0 and `w` at random; there `w` = 0, without a gradient"
    measured = {"step": "1.10"}
    fields = field_defaults(DCAFields)
    retrofit = {}

    def __init__(self, config: PreTrainedConfig, sublayer: int):
        super().__init__(config, sublayer)
        self.window, self.eps = config.dca_window, norm_eps(config)
        for name in ("bias", "weight", "scale"):
            self.register_parameter(name, None)
        if sublayer > 0:
            count = sublayer + 1 if self.window is None else min(sublayer, self.window + 1) + 1
            self.bias = nn.Parameter(torch.zeros(count, config.hidden_size))
            self.weight = nn.Parameter(torch.zeros(1, config.hidden_size))
            self.scale = nn.Parameter(torch.zeros(1))
            self.reset_parameters()

    @classmethod
    def check(cls, config: PreTrainedConfig) -> None:
        """Check the window; see [`ResidualConnection.check`]."""
        window = config.dca_window
        require(config, "dca_window", window is None or is_count(window), "an integer >= 1, or null for all outputs")

    @classmethod
    def describe(cls, config: PreTrainedConfig) -> str:
        """Return, for example, "2-DCA"."""
        return "DCA" if config.dca_window is None else f"{config.dca_window}-DCA"

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw `w` at random, and set the other tensors to the start of the standard residual."""
        if self.bias is not None:
            init.zeros_(self.bias)
            init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)
            init.zeros_(self.scale)

    def coefficients(self, state: DepthState, norm: None = None) -> tuple[Tensor, ...] | None:
        """Compute `s relu(w . N(x))` `[batch, seq, 1]` of each tensor of the state, in float32 or wider."""
        if self.bias is None:
            return None
        dtype = wide(state[-1])
        weight, scale = self.weight.to(dtype), self.scale.to(dtype)
        return tuple(
            # Not a product of matrix and vector, whose rounding depends on where they lie in memory.
            scale * ((x * weight).sum(-1) * inverse_rms(x, self.eps, dtype)).relu().unsqueeze(-1)
            for x in state
        )

    def mix(self, state: DepthState, coefficients: tuple[Tensor, ...] | None) -> tuple[Tensor, DepthState]:
        """Compute the input `[batch, seq, hidden]`.

        Raises:
            ValueError: the state has another number of tensors, because layers were moved, removed or added.
        """
        states = state if isinstance(state, tuple) else (state,)
        expected = 1 if self.bias is None else len(self.bias)
        if len(states) != expected:
            raise ValueError(
                f"the weights of sublayer {self.sublayer} are for {expected} tensors, but there are {len(states)}: "
                "layers of this model cannot be moved, removed or added."
            )
        if coefficients is None:
            return states[0], state
        dtype = wide(states[-1])
        # The terms in the order of the standard residual, whose sum is rounded after each of them.
        terms = ((1 + b + dynamic) * x for x, b, dynamic in zip(states, self.bias.to(dtype), coefficients))
        return reduce(torch.add, terms).to(states[-1].dtype), state

    def write(self, state: DepthState, output: Tensor) -> tuple[Tensor, ...]:
        """Append an output `[batch, seq, hidden]`; with a window, sum the outputs that leave it."""
        states: tuple[Tensor, ...] = (*state, output) if isinstance(state, tuple) else (state, output)
        if self.window is not None and len(states) > self.window + 2:
            first, oldest, next_one, *others = states
            states = (first, oldest + next_one, *others)
        return states

    def running_sum(self, state: DepthState) -> Tensor:
        """Return the sum of the state's tensors, each an output or a sum of outputs; see the base class."""
        return reduce(torch.add, state) if isinstance(state, tuple) else state


__all__ = ["DCA", "DCAFields"]
