"""mHC-lite (arXiv 2601.05732): n residual streams, mixed by averages of permutations.

    x = RMSNorm(flatten(X)),   H_pre = sigmoid(a_1 F_1 x + b_1),   H_post = 2 sigmoid(a_2 F_2 x + b_2)        both [n]
    H_res = sum_r p_r P_r,   p = softmax(a_3 F_3 x + b_3)        over all n! permutation matrices, the identity first
    input  h = sum_j H_pre[j] X_j,            output  X' = H_res^T X + H_post (x) f(h)

`H_res` is doubly stochastic up to rounding, without iterations. With `b_1 = -ln(n - 1)`, `b_2 = 0` and `a = 0` the
model is exactly the standard one, whatever `b_3`. `b_3` starts at 0 for the identity and -8 for the others: each of
four streams keeps 99.4% of itself. A uniform average would make all streams equal.
"""

import math
from itertools import permutations

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers import initialization as init

from .projected_streams_attnres import ProjectedStreams, minus_identity
from .residual_attnres import require


class MHCLite(ProjectedStreams):
    """mHC-lite.

    Its tensors are those of [`ProjectedStreams`]; `F_3` has n! rows, for the permutations in lexicographic order.
    """

    name = "mhc_lite"
    summary = "n streams, permutations"
    reference = "arXiv 2601.05732"
    own_start = "scales at 0, reads at 1/n; in its code 0.01, and other reads"
    measured = {"step": "1.19"}
    title = "mHC-lite"
    permutations: Tensor

    @classmethod
    def check(cls, config: PreTrainedConfig) -> None:
        """Check that there are at most 5 streams; see [`ResidualConnection.check`]."""
        streams = config.residual_streams
        is_too_many = isinstance(streams, int) and streams > 5
        allowed = "from 2 to 5: each of the n! permutations has a weight for every channel of every stream"
        require(config, "residual_streams", not is_too_many, allowed)
        super().check(config)

    @staticmethod
    def mixing_rows(streams: int) -> int:
        """Return n!, the number of permutations."""
        return math.factorial(streams)

    def add_tensors(self, config: PreTrainedConfig) -> None:
        """Register the tensors of the base class and, as a buffer that is not saved, the permutation matrices."""
        super().add_tensors(config)
        shape = self.mixing_rows(self.streams), self.streams, self.streams
        self.register_buffer("permutations", torch.zeros(shape), persistent=False)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the tensors to their start, and the buffer to the permutation matrices `[n!, n, n]`."""
        super().reset_parameters()
        if not self.is_output:
            order = torch.tensor([*permutations(range(self.streams))], device=self.permutations.device)
            init.copy_(self.permutations, torch.nn.functional.one_hot(order, self.streams))

    def mixing(self, logits: Tensor) -> Tensor:
        """Compute `H_res - I` `[..., n, n]` from logits `[..., n!]`."""
        identity, others = logits.tensor_split([1], dim=-1)
        shares = torch.cat([identity, others - 8], dim=-1).softmax(-1)
        averages = shares @ self.permutations.flatten(1).to(shares.dtype)
        return minus_identity(averages.unflatten(-1, (self.streams, self.streams)))


__all__ = ["MHCLite"]
