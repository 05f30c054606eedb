"""Manifold-constrained Hyper-Connections (mHC, arXiv 2512.24880): n streams, mixed doubly stochastically by Sinkhorn.

    x = RMSNorm(flatten(X)),   H_pre = sigmoid(a_1 F_1 x + b_1),   H_post = 2 sigmoid(a_2 F_2 x + b_2)        both [n]
    H_res = Sinkhorn(a_3 F_3 x + b_3)   [n, n]
    input  h = sum_j H_pre[j] X_j,            output  X' = H_res^T X + H_post (x) f(h)

With `b_1 = -ln(n - 1)`, `b_2 = 0` and `a = 0` the model is exactly the standard one, whatever `b_3`: all streams are
equal, and `H_res` averages them with weights that sum to 1. `b_3` starts at 0 on the diagonal and -8 off it: a stream
keeps 99.9% of itself, and half of its difference from the others is left after 500 sublayers. Uniform matrices would
remove the difference at once. Far below -80, `H_res` in float32 would hold only 0 and 1, and pass no gradient.
"""

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from .projected_streams_attnres import ProjectedStreams, minus_identity
from .residual_attnres import field_defaults
from .streams_attnres import StreamStartFields, require_integer


class MHCFields(StreamStartFields):
    """Configuration fields of `residual_connection="mhc"`."""

    mhc_sinkhorn_iterations: int = 20
    """Iterations of Sinkhorn's algorithm, from 1 to 1000."""


class MHC(ProjectedStreams):
    """mHC. Its tensors are those of [`ProjectedStreams`]; `F_3` has n^2 rows, `H_res` row by row."""

    name = "mhc"
    summary = "n streams, Sinkhorn"
    reference = "arXiv 2512.24880"
    used_by = "DeepSeek-V4"
    own_start = "scales at 0; there 0.01, and biases are not published"
    measured = {"step": "1.21"}
    title = "mHC"
    fields = field_defaults(MHCFields)

    def __init__(self, config: PreTrainedConfig, sublayer: int):
        super().__init__(config, sublayer)
        self.iterations = config.mhc_sinkhorn_iterations

    @staticmethod
    def mixing_rows(streams: int) -> int:
        """Return n^2, the number of entries of `H_res`."""
        return streams * streams

    @classmethod
    def check(cls, config: PreTrainedConfig) -> None:
        """Check streams and iterations; see [`ResidualConnection.check`]."""
        super().check(config)
        require_integer(config, "mhc_sinkhorn_iterations", 1, 1000)

    def mixing(self, logits: Tensor) -> Tensor:
        """Compute `H_res - I` `[..., n, n]` from logits `[..., n^2]`."""
        logits = logits.unflatten(-1, (self.streams, self.streams))
        start = 8 * torch.eye(self.streams, dtype=logits.dtype, device=logits.device)  # the same as -8 off the diagonal
        return minus_identity(sinkhorn(logits + start, self.iterations))


def sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    """Compute a doubly stochastic matrix from `exp(logits)`: divide rows and columns by their sums in turn.

    In logarithms, no sum can be zero or needs an epsilon, and gradients are finite for all logits.

    Args:
        logits: `[..., n, n]`, in float32 or wider.
        iterations: number of divisions of the rows and of the columns, at least 1.

    Returns:
        `[..., n, n]`. Columns sum to 1 up to rounding, rows as exactly as the iterations have converged.
    """
    # Tokens go into the last dimension: sums over the last dimension, of only n numbers, take ten times as long.
    scores = logits.movedim((-2, -1), (0, 1)).contiguous()
    for _ in range(iterations - 1):
        scores = scores.log_softmax(1).log_softmax(0)
    return scores.log_softmax(1).softmax(0).movedim((0, 1), (-2, -1))


__all__ = ["MHC", "MHCFields", "sinkhorn"]
