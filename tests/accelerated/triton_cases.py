"""Helpers of the tests of the Triton kernels: where they run, their inputs, and expected results.

The tests run on a GPU if there is one, and with TRITON_INTERPRET=1 on the CPU, in Triton's interpreter. Otherwise they
skip, and `test_triton_interpreted.py` starts them again in the interpreter.
"""

import os
from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from attnres import depth_attention_reference
from attnres.accelerated.triton import IMPLEMENTATIONS, phase_one

HAS_TRITON = find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
EPS = 1e-5
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

RUNS = HAS_TRITON and (INTERPRETED or DEVICE == "cuda")
# Marks of a file whose tests need the kernels (`pytestmark`); `with_kernels` sets them on a single test.
KERNELS = [pytest.mark.gpu, pytest.mark.skipif(not RUNS, reason="needs Triton, and a GPU or its interpreter")]
needs_triton = pytest.mark.skipif(not HAS_TRITON or INTERPRETED, reason="needs Triton, and not its interpreter")


def with_kernels(test: Callable) -> Callable:
    for mark in KERNELS:
        test = mark(test)
    return test


def on_gpu(test: Callable) -> Callable:
    return pytest.mark.gpu(
        pytest.mark.skipif(DEVICE != "cuda" or not HAS_TRITON, reason="needs Triton and a GPU")(test)
    )


def make(n: int, shape: tuple[int, ...], width: int, dtype=torch.float32, sharpness=1.0, seed=0):
    """Return a query whose logits have about the standard deviation `sharpness`, and sources; all need gradients."""
    generator = torch.Generator().manual_seed(seed)
    query = sharpness * width**-0.5 * torch.randn(width, generator=generator)
    sources = [torch.randn(*shape, width, generator=generator).to(DEVICE, dtype) for _ in range(n)]
    return query.to(DEVICE).requires_grad_(), [source.requires_grad_() for source in sources]


def run(query: Tensor, sources: list[Tensor], is_sum: bool, **options: bool) -> tuple[Tensor, Tensor, tuple]:
    return IMPLEMENTATIONS["triton"].run(query, sources, EPS, is_sum, **options)


def fused(query: Tensor, sources: list[Tensor], is_sum: bool) -> tuple[Tensor, Tensor]:
    return run(query, sources, is_sum)[:2]


def reference(query: Tensor, sources: list[Tensor], is_sum: bool) -> tuple[Tensor, Tensor]:
    scale = "sum" if is_sum else "mean"
    return depth_attention_reference(query, sources, None, EPS, scale=scale, return_weights=True)


def begin(query: Tensor, sources: list[Tensor]) -> tuple[Tensor, ...] | None:
    """Return the part of phase one for `query`, which is the second of two; `None` without sources."""
    if not sources:
        return None
    phase = phase_one(torch.stack([-query, query]), EPS, *sources)
    assert {tensor.dtype for tensor in phase} == {torch.float32}
    return tuple(tensor[1] for tensor in phase)


def in_float64(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def loss(result: Tensor, weights: Tensor) -> Tensor:
    # Every dtype can hold these numbers exactly, because a gradient has the dtype of the result.
    direction = torch.linspace(-64, 64, result.numel(), dtype=torch.float64, device=DEVICE).round() / 64
    direction = direction.reshape(result.shape)
    return (result * direction.to(result.dtype)).double().sum() + (weights.double() * direction.sum(-1)).square().sum()


def everything(attend: Callable, query: Tensor, sources: list[Tensor], is_sum: bool) -> list[Tensor]:
    """Return result and weights, and the gradients of the query and every source through both."""
    result, weights = attend(query, sources, is_sum)
    return [result, weights, *torch.autograd.grad(loss(result, weights), (query, *sources))]


def assert_equal_up_to_rounding(actual: list[Tensor], expected: list[Tensor], roundings: int = 1) -> None:
    for tensor, exact in zip(actual, expected):
        size = exact.abs().max().item()
        tolerance = {"rtol": 2 * roundings * torch.finfo(tensor.dtype).eps, "atol": 2e-5 * size + 1e-6}
        torch.testing.assert_close(tensor.double(), exact, **tolerance)
