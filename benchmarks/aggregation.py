"""The inputs and ways of one measured aggregation, and a lower bound of its time.

The bound is the memory traffic that no way can avoid, at the speed of `copy_` on buffers of that size, measured in turn
with the ways. Sources have E elements each, and a copy of E elements moves 2E:

    forward             read n sources, write the result                               (n + 1) E
    forward+backward    and read n sources, read the gradient, write n gradients       (3n + 2) E
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from attnres import depth_attention

from .peers import Peer
from .timing import Ways

OURS, EAGER, BOUND = "ours", "ours eager", "bound"
# The ways of this package: its fastest kernels, and PyTorch's operations alone.
WAYS: dict[str, Peer] = {OURS: depth_attention, EAGER: partial(depth_attention, implementation="eager")}


class Inputs:
    """Random arguments of one aggregation, and buffers for a copy of as many bytes as the aggregation moves.

    Args:
        n: number of sources.
        width: size of the last dimension, d.
        tokens: rows of each source, `[tokens, width]`.
        dtype: of all tensors.
        device: where the tensors lie.
    """

    def __init__(self, n: int, width: int, tokens: int, dtype: torch.dtype, device: str):
        generator = torch.Generator(device).manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype).requires_grad_()

        self.sources = [random(tokens, width) for _ in range(n)]
        # Keeps logits near one. Larger ones give all weight to one source, and the rest become slow denormal numbers.
        self.query = (random(width) / width**0.5).detach().requires_grad_()
        self.key_norm_weight, self.grad = random(width), random(tokens, width).detach()
        self.eps = 1e-6
        self.moved = {"forward": (n + 1) * tokens * width, "backward": (2 * n + 1) * tokens * width}
        # Ones, because pages that were never written all map to the same page, and reading that takes no time.
        self.copy_from, self.copy_to = torch.ones(2, self.moved["backward"] // 2, dtype=dtype, device=device)

    def call(self, function: Peer) -> Tensor:
        """Call `function` with these arguments; the result is `[tokens, width]`."""
        return function(self.query, self.sources, self.key_norm_weight, self.eps)

    def copy(self, direction: str) -> None:
        """Copy as many bytes as `direction`, "forward" or "backward", of the aggregation must move."""
        half = self.moved[direction] // 2
        self.copy_to[:half].copy_(self.copy_from[:half])


def forward(inputs: Inputs, peers: Mapping[str, Peer]) -> Ways:
    """Return one way per function to run a forward pass without gradients, with the copy of the bound first."""
    functions = WAYS | dict(peers)
    return {BOUND: partial(inputs.copy, "forward")} | {
        name: torch.no_grad()(partial(inputs.call, function)) for name, function in functions.items()
    }


def forward_and_backward(inputs: Inputs, peers: Mapping[str, Peer]) -> Ways:
    """Return one way per function to run a forward and a backward pass, with the copies of the bound first."""
    leaves = [inputs.query, inputs.key_norm_weight, *inputs.sources]

    def step(function: Peer) -> None:
        result = inputs.call(function)
        grad = inputs.grad.to(result.dtype)  # a library's result is always bfloat16
        torch.autograd.grad(result, leaves, grad, allow_unused=True)

    def copy() -> None:
        inputs.copy("forward")
        inputs.copy("backward")

    functions = WAYS | dict(peers)
    return {BOUND: copy} | {name: partial(step, function) for name, function in functions.items()}


def runnable(ways: Ways) -> tuple[Ways, dict[str, str]]:
    """Call each way once to see whether it runs.

    Args:
        ways: by name.

    Returns:
        The ways that run, and for each other way the first line of its error.

    Raises:
        Exception: the error of `OURS` or `BOUND`, which must run.
    """
    working, missing = {}, {}
    for name, way in ways.items():
        try:
            way()
        except Exception as error:  # for example no C++ compiler, or a library that is missing or refuses the shape
            if name in (OURS, BOUND):
                raise
            missing[name] = next(iter(str(error).splitlines()), "") or type(error).__name__
        else:
            working[name] = way
    return working, missing
