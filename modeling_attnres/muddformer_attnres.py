"""MUDDFormer (arXiv 2502.12170), one way: each layer reads an average of earlier states whose weights each token sets.

    Y_i = sum_{j <= i} A_ij X_j,    A_i = GELU(N(X_i) W_1) W_2 + a_i,    N = RMSNorm without weight
    X_0 = v_0,    X_j = Y_{j-1} + the outputs of layer j

The `a_i` start at the identity, `a_ii = 1`, and `W_2` at zero, which is exactly the standard model. `W_1` is drawn with
the variance 1 / hidden, and gets its first gradient in the second step.

The published model has four ways, of which queries, keys and values take three; these would need an attention with
three inputs. With `muddformer_way="residual"`, a layer's first sublayer reads `X_i`, and only the stream goes on from
`Y_i`: this is the fourth way by itself. With `muddformer_post_norm` (their PrePostDANorm, against divergence in deep
models), sources are normed, and their sum is added through a norm with a small weight:

    Y_i = X_i + g_i * N(sum_{j <= i} A_ij N(X_j)),    a_i = 0,    g_i = 1e-3 at the start

This too is exactly the standard model at its start.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.utils.generic import maybe_autocast

from .denseformer_attnres import DenseFormer
from .functional_attnres import inverse_rms
from .residual_attnres import DepthState, field_defaults, norm_eps, one_of, require
from .streams_attnres import wide

_WAYS = "all", "residual"
_POST_NORM = 1e-3


class MUDDFormerFields:
    """Configuration fields of `residual_connection="muddformer"`."""

    muddformer_way: str = "all"
    """With `"all"` a layer continues from the average; with `"residual"` only the stream does."""

    muddformer_post_norm: bool = False
    """`True` norms the sources and their sum, which is then added to the stream."""


class MUDDFormer(DenseFormer):
    """MUDDFormer's averages over depth. Its state and its place are those of [`DenseFormer`].

    Tensors, at the first sublayer of each layer but the first, and at the output, for i layers before it: `weight`
    `[i + 1]` is `a_i`; `down` `[K, hidden]` is `W_1` and `up` `[i + 1, K]` is `W_2`, both transposed. K is a multiple
    of 64 above i + 1, and four times that at the output. With the post-norm, `gain` `[hidden]` is `g_i`.
    """

    name = "muddformer"
    summary = "averages set by token"
    reference = "arXiv 2502.12170"
    used_by = "modded-nanogpt"
    measured = {"step": "1.05"}
    fields = field_defaults(MUDDFormerFields)

    def __init__(self, config: PreTrainedConfig, sublayer: int):
        self.eps, self.is_output = norm_eps(config), sublayer >= config.num_sublayers
        self.reads_stream = config.muddformer_way == "residual" and not self.is_output
        self.has_post_norm = config.muddformer_post_norm
        super().__init__(config, sublayer)
        for name in ("down", "up", "gain"):
            self.register_parameter(name, None)
        if self.weight is not None:
            sources = len(self.weight)
            width = (sources // 64 + 1) * 64 * (4 if self.is_output else 1)
            self.down = nn.Parameter(torch.zeros(width, config.hidden_size))
            self.up = nn.Parameter(torch.zeros(sources, width))
            if self.has_post_norm:
                self.gain = nn.Parameter(torch.zeros(config.hidden_size))
            self.reset_parameters()

    @classmethod
    def check(cls, config: PreTrainedConfig) -> None:
        """Check both fields; see [`ResidualConnection.check`]."""
        require(config, "muddformer_way", config.muddformer_way in _WAYS, one_of(_WAYS))
        has_norm = config.muddformer_post_norm
        require(config, "muddformer_post_norm", isinstance(has_norm, bool), "true or false")

    @classmethod
    def describe(cls, config: PreTrainedConfig) -> str:
        """Return, for example, "MUDDFormer, one way (24 sublayers)"."""
        way = "one way" if config.muddformer_way == "all" else "its residual way"
        norm = " with norms before and after" if config.muddformer_post_norm else ""
        return f"MUDDFormer, {way}{norm} ({config.num_sublayers} sublayers)"

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the tensors to the start of the standard residual; `W_1` is drawn at random."""
        super().reset_parameters()
        if getattr(self, "down", None) is None:  # the base class calls this before they are made
            return
        init.normal_(self.down, std=self.down.shape[1] ** -0.5)
        init.zeros_(self.up)
        if self.gain is not None:
            init.zeros_(self.weight)
            init.constant_(self.gain, _POST_NORM)

    def coefficients(self, state: DepthState, norm: None = None) -> tuple[Tensor, ...] | None:
        """Compute the weights `[batch, seq, i + 1]` of the states, in float32 or wider; `None` where none are read.

        With the post-norm, they are divided by the root mean squares of the states, and the factor `[batch, seq,
        hidden]` by which their sum is multiplied follows.
        """
        if self.weight is None:
            return None
        states = state if isinstance(state, tuple) else (state,)
        last, dtype = states[-1], wide(states[-1])
        # Under autocast, and in 16 bits, the weights of large states would be rounded.
        with maybe_autocast(last.device.type, enabled=False):
            normed = last.to(dtype) * inverse_rms(last, self.eps, dtype).unsqueeze(-1)
            hidden = F.gelu(F.linear(normed, self.down.to(dtype)))
            weights = F.linear(hidden, self.up.to(dtype), self.weight.to(dtype))
        if self.gain is None:
            return (weights,)
        self.check_states(state)
        scales = torch.stack([inverse_rms(one, self.eps, dtype) for one in states], dim=-1)  # (batch, seq, i + 1)
        weights = weights * scales
        total = self.average(states, weights)[-1].to(dtype)
        return weights, self.gain.to(dtype) * inverse_rms(total, self.eps, dtype).unsqueeze(-1)

    def mix(self, state: DepthState, coefficients: tuple[Tensor, ...] | None) -> tuple[Tensor, DepthState]:
        """Return the input `[batch, seq, hidden]` and the state; at a layer's first sublayer with `Y_i` at its end."""
        if coefficients is None:
            return super().mix(state, None)
        weights, *factors = coefficients
        *states, mixed = self.average(state, weights)
        for factor in factors:
            mixed = (states[-1] + factor * mixed).to(mixed.dtype)
        return states[-1] if self.reads_stream else mixed, (*states, mixed)


__all__ = ["MUDDFormer", "MUDDFormerFields"]
