"""Identity Hyper-Connections: n residual streams, read and written with learned weights, and never mixed.

    x = RMSNorm(flatten(X)),   H_pre = sigmoid(a_1 F_1 x + b_1),   H_post = 2 sigmoid(a_2 F_2 x + b_2)        all [n]
    input  h = sum_j H_pre[j] X_j,            output  X' = X + H_post (x) f(h)

This is mHC (arXiv 2512.24880) with `H_res = I`. With `b_1 = -ln(n - 1)`, `b_2 = 0` and `a = 0`, `H_pre` is 1/n,
`H_post` is 1, and the model is exactly the standard one.
"""

from .projected_streams_attnres import ProjectedStreams


class IdentityHyperConnections(ProjectedStreams):
    """Hyper-Connections with `H_res = I`. Its tensors are those of [`ProjectedStreams`] without `F_3`."""

    name = "identity_hc"
    summary = "n streams, not mixed"
    used_by = "Hy-V4"
    own_start = "scales at 0; Hy-V4's are 0.01"
    measured = {"step": "1.12"}
    title = "Identity Hyper-Connections"


__all__ = ["IdentityHyperConnections"]
