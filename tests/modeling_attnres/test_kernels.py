"""The Triton kernels are `depth_attention_reference` in float64, up to rounding, with its derivatives.

They run on a GPU if there is one, and else in Triton's interpreter: `test_the_kernels_in_tritons_interpreter` starts
this file again, with TRITON_INTERPRET=1. Without Triton nothing here runs but what shows that it is not needed.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attnres import depth_attention_reference, kernels_attnres
from attnres.kernels_attnres import fused_depth_attention, kernels_available, phase_one, phase_two

HAS_TRITON = find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
EPS = 1e-5
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

with_kernels = pytest.mark.skipif(
    not HAS_TRITON or not (INTERPRETED or DEVICE == "cuda"), reason="needs Triton, and a GPU or its interpreter"
)
needs_triton = pytest.mark.skipif(not HAS_TRITON or INTERPRETED, reason="needs Triton, as it is")
on_gpu = pytest.mark.skipif(DEVICE != "cuda" or not HAS_TRITON, reason="needs Triton and a GPU")


def make(n: int, shape: tuple[int, ...], width: int, dtype=torch.float32, sharpness=1.0, seed=0):
    """A query whose logits have about the standard deviation `sharpness`, and sources, with gradients."""
    generator = torch.Generator().manual_seed(seed)
    query = sharpness * width**-0.5 * torch.randn(width, generator=generator)
    sources = [torch.randn(*shape, width, generator=generator).to(DEVICE, dtype) for _ in range(n)]
    return query.to(DEVICE).requires_grad_(), [source.requires_grad_() for source in sources]


def reference(query: Tensor, sources: list[Tensor], is_sum: bool) -> tuple[Tensor, Tensor]:
    scale = "sum" if is_sum else "mean"
    return depth_attention_reference(query, sources, None, EPS, scale=scale, return_weights=True)


def fused(query: Tensor, sources: list[Tensor], is_sum: bool) -> tuple[Tensor, Tensor]:
    return fused_depth_attention(query, EPS, is_sum, *sources)


def in_float64(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def loss(result: Tensor, weights: Tensor) -> Tensor:
    # Of values that every dtype can hold: a gradient has the dtype of the result.
    direction = torch.linspace(-64, 64, result.numel(), dtype=torch.float64, device=DEVICE).round() / 64
    direction = direction.reshape(result.shape)
    return (result * direction.to(result.dtype)).double().sum() + (weights.double() * direction.sum(-1)).square().sum()


def everything(attend: Callable, query: Tensor, sources: list[Tensor], is_sum: bool) -> list[Tensor]:
    """Result, weights and the gradients of the query and every source, through both."""
    result, weights = attend(query, sources, is_sum)
    return [result, weights, *torch.autograd.grad(loss(result, weights), (query, *sources))]


def assert_equal_up_to_rounding(found: list[Tensor], expected: list[Tensor]) -> None:
    for tensor, exact in zip(found, expected):
        size = exact.abs().max().item()
        tolerance = {"rtol": 2 * torch.finfo(tensor.dtype).eps, "atol": 2e-5 * size + 1e-6}
        torch.testing.assert_close(tensor.double(), exact, **tolerance)


# Number of sources, shape, width: each number once at least, and each width; 37 tokens fill no tile to the end.
CASES = [
    (1, (2, 3), 1),
    (1, (1, 5), 1000),
    (2, (37,), 64),
    (2, (1,), 8192),
    (3, (2, 3), 7),
    (9, (3,), 1000),
    (9, (37,), 7),
    (17, (2, 2), 64),
    (64, (3,), 7),
    (64, (1, 1), 1000),
    (64, (1,), 8192),
]


@with_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_sum", [False, True])
@pytest.mark.parametrize("n, shape, width", CASES)
def test_the_result_the_weights_and_all_gradients_are_those_of_the_reference(n, shape, width, is_sum, dtype):
    query, sources = make(n, shape, width, dtype)
    found = everything(fused, query, sources, is_sum)
    assert found[0].dtype == dtype and [grad.dtype for grad in found[3:]] == [dtype] * n
    query, *sources = in_float64(query, *sources)
    expected = everything(reference, query, sources, is_sum)
    assert_equal_up_to_rounding(found, expected)


@with_kernels
@pytest.mark.parametrize("sharpness", [30.0, 1000.0])
def test_sharp_weights_are_as_exact(sharpness):
    query, sources = make(9, (5,), 64, sharpness=sharpness)
    found, _ = fused(query, sources, False)
    query, *sources = in_float64(query, *sources)
    torch.testing.assert_close(found.double(), reference(query, sources, False)[0], rtol=1e-3, atol=1e-3)


@with_kernels
def test_at_zero_queries_sum_is_the_plain_sum_to_the_last_bit():
    query, sources = make(17, (2, 3), 24)
    result, weights = fused(0 * query, sources, True)
    assert torch.equal(result, sum(sources))
    assert torch.equal(weights, torch.full_like(weights, 1 / 17))


@with_kernels
def test_a_program_with_many_tiles_sums_the_gradient_of_the_query_over_all_of_them_each_time_alike(monkeypatch):
    monkeypatch.setattr(kernels_attnres, "_PROGRAMS", 3)
    query, sources = make(3, (4, 111), 64)
    once, again = (everything(fused, query, sources, False) for _ in range(2))
    assert all(map(torch.equal, once, again))
    query, *sources = in_float64(query, *sources)
    assert_equal_up_to_rounding(once, everything(reference, query, sources, False))


@with_kernels
def test_sources_may_be_views_and_of_several_dtypes():
    query, (a, b, c) = make(3, (4, 6), 8)

    def through_views(attend: Callable) -> list[Tensor]:
        views = [a.transpose(0, 1), b[:1].expand(4, 6, 8).transpose(0, 1).half(), c.reshape(6, 4, 8)]
        result, weights = attend(query, views, True)
        assert result.dtype == torch.float32
        return [result, weights, *torch.autograd.grad(loss(result, weights), (query, a, b, c))]

    for found, expected in zip(through_views(fused), through_views(reference)):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@with_kernels
def test_only_the_gradients_asked_for_are_computed(monkeypatch):
    query, sources = make(3, (2,), 8)
    expected = everything(reference, query, sources, False)[2:]
    sources[1].requires_grad_(False)
    result, weights = fused(query, sources, False)
    found = torch.autograd.grad(loss(result, weights), (query, sources[0], sources[2]))
    torch.testing.assert_close(list(found), [expected[i] for i in (0, 1, 3)], rtol=1e-4, atol=1e-4)

    for source in sources:
        source.requires_grad_(False)
    compute, made = kernels_attnres._backward, []

    def backward(*args):
        outputs = compute(*args)
        made.extend(outputs[1])
        return outputs

    monkeypatch.setattr(kernels_attnres, "_backward", backward)
    (found,) = torch.autograd.grad(loss(*fused(query, sources, False)), query)
    torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=1e-4)
    assert made == []


@with_kernels
@pytest.mark.parametrize("used", [0, 1])
def test_one_of_the_two_results_alone_has_the_right_gradients(used):
    query, sources = make(3, (2,), 8)
    found, expected = (
        torch.autograd.grad(attend(query, sources, False)[used].square().sum(), (query, *sources))
        for attend in (fused, reference)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@with_kernels
def test_no_token_is_no_error():
    query, sources = make(2, (0, 4), 8)
    result, weights, *grads = everything(fused, query, sources, False)
    assert (result.shape, weights.shape) == ((0, 4, 8), (2, 0, 4))
    assert torch.equal(grads[0], torch.zeros_like(query))
    outputs = phase_one(query[None], EPS, *sources)
    assert phase_two(query, EPS, False, 2, tuple(t[0] for t in outputs), sources[0])[0].shape == (0, 4, 8)


@with_kernels
@pytest.mark.parametrize("is_sum", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "n, number, shape, width, tile", [(1, 1, (5,), 64, None), (9, 5, (2, 3), 1000, None), (9, 7, (3,), 7, 16)]
)
@torch.no_grad()
def test_two_phases_are_one_attention_over_all(n, number, shape, width, tile, dtype, is_sum, monkeypatch):
    if tile is not None:  # fewer queries at once than there are
        monkeypatch.setattr(kernels_attnres, "_QUERY_TILE", tile)
    _, (*blocks, partial, update) = make(n + 2, shape, width, dtype)
    queries = width**-0.5 * torch.randn(number, width, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    phase = phase_one(queries, EPS, *blocks, dtype=torch.float32)
    assert phase[0].dtype == torch.float32 and phase_one(queries, EPS, *blocks)[0].dtype == dtype
    for i, query in enumerate(queries):
        own = tuple(tensor[i] for tensor in phase)
        for given in ((), (partial,), (partial, update)):
            found, total = phase_two(query, EPS, is_sum, n, own, *given)
            if given:
                # Triton's interpreter does not round to bfloat16, it cuts off.
                inexact = (
                    {"rtol": 2**-7, "atol": 0} if INTERPRETED and dtype == torch.bfloat16 else {"rtol": 0, "atol": 0}
                )
                torch.testing.assert_close(total, sum(given), **inexact)
            expected, _ = reference(query.double(), in_float64(*blocks, *([total] if given else [])), is_sum)
            assert_equal_up_to_rounding([found.to(dtype)], [expected])


@with_kernels
@torch.no_grad()
def test_in_an_empty_block_the_first_output_is_the_partial_sum():
    query, (block, output) = make(2, (3,), 8)
    phase = tuple(tensor[0] for tensor in phase_one(query[None], EPS, block))
    found, partial = phase_two(query, EPS, False, 1, phase, None, output)
    assert torch.equal(partial, output)
    torch.testing.assert_close(found, reference(query, [block, output], False)[0])


@with_kernels
@pytest.mark.slow
def test_torch_compile_takes_them_whole_and_for_any_number_of_tokens():
    def attend(query: Tensor, sources: list[Tensor], is_sum: bool) -> tuple[Tensor, Tensor]:
        assert kernels_attnres._run_on(query.device)
        result, weights = fused(1.5 * query, [2 * sources[0], *sources[1:]], is_sum)
        return result + 1, weights

    def in_phases(query: Tensor, sources: list[Tensor]) -> tuple[Tensor, Tensor]:
        phase = phase_one(torch.stack([query, 2 * query]), EPS, *sources)
        return phase_two(query, EPS, True, 3, tuple(tensor[1] for tensor in phase), sources[0], sources[1])

    torch._dynamo.reset()
    compiled, compiled_phases = (torch.compile(function, fullgraph=True) for function in (attend, in_phases))
    for tokens in (5, 7, 9):
        query, sources = make(3, (2, tokens), 24)
        found, expected = (everything(function, query, sources, True) for function in (compiled, attend))
        torch.testing.assert_close(found, expected)
        with torch.no_grad():
            torch.testing.assert_close(compiled_phases(query, sources), in_phases(query, sources))


@on_gpu
def test_they_are_available_on_a_gpu():
    assert kernels_available("cuda")
    assert not kernels_available("cuda", width=kernels_attnres.MAX_WIDTH + 1)


@on_gpu
def test_a_cuda_graph_replays_them_on_new_sources():
    query, sources = make(3, (8,), 1024, torch.bfloat16)
    with torch.no_grad():
        fused(query, sources, False)  # compiles them
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result, _ = fused(query, sources, False)
        for source in sources:
            source.mul_(torch.rand_like(source))
        graph.replay()
        assert torch.equal(result, fused(query, sources, False)[0])


def test_without_a_gpu_they_are_not_available():
    assert not kernels_available("cpu")
    assert kernels_available("cuda") == (HAS_TRITON and not INTERPRETED and torch.cuda.is_available())


def python(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], env=os.environ | environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


@needs_triton
@pytest.mark.slow
def test_the_kernels_in_tritons_interpreter():
    if tuple(map(int, version("triton").split(".")[:2])) < (3, 9):
        pytest.skip("older interpreters cannot loop with the numpy of today")
    root = Path(__file__).parents[2]
    options = ["-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(root)]
    report = python("-m", "pytest", *options, str(Path(__file__)), TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    assert int(re.search(r"(\d+) passed", report)[1]) > 6 * len(CASES), report


COMPILE = """
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from attnres.kernels_attnres import fused_depth_attention, phase_one, phase_two

class NoGPU:
    def get_current_target(self):
        return GPUTarget("cuda", {capability}, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

def compile_only(self, *args, grid, warmup, run=JITFunction.run, **kwargs):
    kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
    print(kernel.name, len(kernel.asm["cubin"]) > 0)

JITFunction.run = compile_only
driver.set_active(NoGPU())
for n, width, dtype in ((2, 7, torch.float32), (9, 1264, torch.bfloat16), (64, 8192, torch.float16)):
    query, *sources = [torch.ones(3, width, dtype=dtype) for _ in range(n + 1)]
    query = query[0].float().requires_grad_()
    for needed in (False, True):
        sources = [source.requires_grad_(needed) for source in sources]
        result, weights = fused_depth_attention(query, 1e-6, True, *sources)
        (result.sum().float() + (weights.sum() if needed else 0)).backward()
    with torch.no_grad():
        phase = tuple(tensor[0] for tensor in phase_one(query.repeat(6, 1), 1e-6, *sources))
        phase_two(query, 1e-6, True, n, phase)
        phase_two(query, 1e-6, True, n, phase, sources[0], sources[1])
"""


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_they_compile_for_a_gpu_that_is_not_there(capability, tmp_path):
    report = python("-c", COMPILE.replace("{capability}", str(capability)), TRITON_CACHE_DIR=str(tmp_path))
    compiled = report.splitlines()
    assert len(compiled) == 3 * 7 and all(line.endswith("True") for line in compiled), report
