"""DenseFormer (arXiv 2402.02622): each layer reads a learned, static average of the states after all earlier layers.

    Y_i = sum_{j <= i} a_ij X_j,    X_0 = v_0,   X_j = Y_{j-1} + the outputs of layer j

The `a_ij` are scalars of any sign. They start at the identity, `a_ii = 1`, which is exactly the standard model.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init

from .residual_attnres import DepthState, ResidualConnection


class DenseFormer(ResidualConnection):
    """DenseFormer's averages over depth, read by the first sublayer of each layer and by the output.

    State: `X_0 .. X_i`, the states after the layers so far, then the residual stream within the current layer; each is
    `[batch, seq, hidden]`.

    Tensors: `weight` `[i + 1]` holds the `a_ij` that the first sublayer of layer `i` reads with; the output's is the
    last. Other sublayers read the stream and have no weight.
    """

    name = "denseformer"
    summary = "averages over depth"
    reference = "arXiv 2402.02622"
    state_size = "layers + 1"
    measured = {"step": "1.01"}
    retrofit = {}
    float32 = True  # beside the 1 of a weight's start, bfloat16 would lose the steps of training

    def __init__(self, config: PreTrainedConfig, sublayer: int):
        super().__init__(config, sublayer)
        self.per_layer = len(config.sublayers)
        # Not in an `nn.Linear`: `transformers` would initialise it at random.
        self.register_parameter("weight", None)
        if sublayer > 0 and sublayer % self.per_layer == 0:
            self.weight = nn.Parameter(torch.zeros(sublayer // self.per_layer + 1))
            self.reset_parameters()

    @classmethod
    def describe(cls, config: PreTrainedConfig) -> str:
        """Return, for example, "DenseFormer (24 sublayers)"."""
        return f"DenseFormer ({config.num_sublayers} sublayers)"

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the weights to the identity: 1 for the stream, 0 for earlier states."""
        if self.weight is not None:
            start = torch.zeros_like(self.weight)
            start[-1] = 1
            init.copy_(self.weight, start)

    def check_states(self, state: DepthState) -> None:
        """Raise if a read has more or fewer states than weights.

        Args:
            state: the state before the read.

        Raises:
            ValueError: it has, because layers were moved, removed or added.
        """
        averages = self.sublayer > 0 and self.sublayer % self.per_layer == 0
        expected = 0 if self.weight is None else self.weight.shape[-1]
        available = (len(state) if isinstance(state, tuple) else 1) if averages else 0
        if expected != available:
            raise ValueError(
                f"the DenseFormer weights of sublayer {self.sublayer} are for {expected} earlier states, but there are "
                f"{available}: layers of this model cannot be moved, removed or added."
            )

    def average(self, state: DepthState, weights: Tensor | None) -> DepthState:
        """Compute the state after a read: `Y_i` becomes its last tensor at the first sublayer of a layer.

        Args:
            state: the state before the read.
            weights: the `a_ij`, `[i + 1]` or, of each token, `[batch, seq, i + 1]`; `None` at other sublayers.
        """
        self.check_states(state)
        # `X_0 .. X_{i-1}`, and the stream after the layer that has just ended: `X_i`.
        *layers, last = state if isinstance(state, tuple) else (state,)
        if weights is None:
            return state
        # The sum is rounded once, at the end, and `1 X_i` and `0 X_j` are exact. A weight `[1]`, unlike a scalar, takes
        # part in type promotion, so that no state is copied to float32.
        parts = weights.to(torch.promote_types(last.dtype, torch.float32)).split(1, -1)
        mixed = parts[-1] * last
        for part, earlier in zip(parts, layers):
            mixed = mixed + part * earlier
        return *layers, last, mixed.to(last.dtype)

    def mix(self, state: DepthState, coefficients: None) -> tuple[Tensor, DepthState]:
        """Return `Y_i` `[batch, seq, hidden]` at the first sublayer of a layer; elsewhere the stream."""
        state = self.average(state, self.weight)
        return (state[-1] if isinstance(state, tuple) else state), state

    def write(self, state: DepthState, output: Tensor) -> tuple[Tensor, ...]:
        """Add an output `[batch, seq, hidden]` to the stream."""
        states = state if isinstance(state, tuple) else (state, state)  # `X_0`, and the stream, which begins from it
        return *states[:-1], states[-1] + output


__all__ = ["DenseFormer"]
