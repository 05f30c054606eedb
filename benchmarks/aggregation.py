"""One aggregation as it is measured: its arguments, the ways to compute it, and the traffic that none can avoid.

The bound is that traffic at the speed of `copy_` on buffers of that size, measured in turn with the rest. With sources
of E elements, and a copy of E elements moving 2E:

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
# What the package itself can do: by its fastest kernels, and in PyTorch's operations alone.
WAYS: dict[str, Peer] = {OURS: depth_attention, EAGER: partial(depth_attention, implementation="eager")}


class Inputs:
    """Random arguments of one aggregation, and buffers for copies as large as the memory it moves."""

    def __init__(self, n: int, width: int, tokens: int, dtype: torch.dtype, device: str):
        generator = torch.Generator(device).manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype).requires_grad_()

        self.sources = [random(tokens, width) for _ in range(n)]
        # Logits of the size of one: far larger ones leave the weight to one source, and others to denormal numbers.
        self.query = (random(width) / width**0.5).detach().requires_grad_()
        self.key_norm_weight, self.grad = random(width), random(tokens, width).detach()
        self.eps = 1e-6
        self.moved = {"forward": (n + 1) * tokens * width, "backward": (2 * n + 1) * tokens * width}
        # Written to: pages that never were are all the same one, and reading it takes no time.
        self.copy_from, self.copy_to = torch.ones(2, self.moved["backward"] // 2, dtype=dtype, device=device)

    def call(self, function: Peer) -> Tensor:
        return function(self.query, self.sources, self.key_norm_weight, self.eps)

    def copy(self, direction: str) -> None:
        """Move as many bytes as that direction of the aggregation has to."""
        half = self.moved[direction] // 2
        self.copy_to[:half].copy_(self.copy_from[:half])


def forward(inputs: Inputs, peers: Mapping[str, Peer]) -> Ways:
    functions = WAYS | dict(peers)
    return {BOUND: partial(inputs.copy, "forward")} | {
        name: torch.no_grad()(partial(inputs.call, function)) for name, function in functions.items()
    }


def forward_and_backward(inputs: Inputs, peers: Mapping[str, Peer]) -> Ways:
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
    """The ways that run, each of which is called once, and of the others the first line of why not."""
    found, missing = {}, {}
    for name, way in ways.items():
        try:
            way()
        except Exception as error:  # no C++ compiler; a library that is not here, or does not take the shape
            if name in (OURS, BOUND):
                raise
            missing[name] = next(iter(str(error).splitlines()), "") or type(error).__name__
        else:
            found[name] = way
    return found, missing
