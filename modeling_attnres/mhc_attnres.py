"""Manifold-constrained Hyper-Connections (mHC, arXiv 2512.24880): n residual streams, mixed doubly stochastically.

    x = RMSNorm(flatten(X)),   H_pre = sigmoid(a_1 F_1 x + b_1),   H_post = 2 sigmoid(a_2 F_2 x + b_2)        both [n]
    H_res = Sinkhorn(a_3 F_3 x + b_3)   [n, n]
    input  h = sum_j H_pre[j] X_j,            output  X' = H_res^T X + H_post (x) f(h)

With `b_1 = -ln(n - 1)`, `b_2 = 0` and `a = 0` the model is the standard one exactly, whatever `b_3`: all streams are
equal, and `H_res` makes of them averages whose weights sum to 1. `b_3` starts at 0 on the diagonal and -8 beside it: a
stream keeps 99.9% of itself, and half of what sets it apart is still there after 500 sublayers. Uniform matrices would
average it away at once; and far below -80 float32 would leave nothing of `H_res` but 0 and 1, and no gradient.
"""

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from .projected_streams_attnres import ProjectedStreams, minus_identity
from .streams_attnres import require_integer


class MHC(ProjectedStreams):
    """The tensors are those of [`ProjectedStreams`]; `F_3` has n^2 rows, those of `H_res[0]` first."""

    name = "mhc"
    title = "mHC"
    fields = ProjectedStreams.fields | {"mhc_sinkhorn_iterations": 20}

    def __init__(self, config: PreTrainedConfig, sublayer: int):
        super().__init__(config, sublayer)
        self.iterations = config.mhc_sinkhorn_iterations

    @staticmethod
    def mixing_rows(streams: int) -> int:
        return streams * streams

    @classmethod
    def check(cls, config: PreTrainedConfig) -> None:
        super().check(config)
        require_integer(config, "mhc_sinkhorn_iterations", 1, 1000)

    def mixing(self, logits: Tensor) -> Tensor:
        logits = logits.unflatten(-1, (self.streams, self.streams))
        start = 8 * torch.eye(self.streams, dtype=logits.dtype, device=logits.device)  # or -8 beside it, the same
        return minus_identity(sinkhorn(logits + start, self.iterations))


def sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    """A doubly stochastic matrix near `exp(logits)` `[..., n, n]`: rows and columns are divided by their sums in turn.

    The columns then sum to 1 to rounding, the rows as nearly as the iterations have converged. In logarithms no sum is
    zero and none needs an epsilon, and gradients are finite whatever the logits.
    """
    # The tokens last: sums over n numbers that lie side by side take ten times as long.
    scores = logits.movedim((-2, -1), (0, 1)).contiguous()
    for _ in range(iterations - 1):
        scores = scores.log_softmax(1).log_softmax(0)
    return scores.log_softmax(1).softmax(0).movedim((0, 1), (-2, -1))


__all__ = ["MHC", "sinkhorn"]
