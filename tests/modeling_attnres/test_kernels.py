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
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from attnres import (
    backbones_attnres,
    depth_attention_reference,
    functional_attnres,
    kernels_attnres,
    reads_attnres,
    two_phase_attnres,
)
from attnres.kernels_attnres import fused_depth_attention, kernels_available, phase_one, read_fused
from attnres.reads_attnres import _GpuReads
from attnres.residual_attnres import AttnRes

HAS_TRITON = find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
EPS = 1e-5
NORM_EPS = 0.1
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
    return fused_depth_attention(query, EPS, is_sum, *sources)[:2]


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


def assert_equal_up_to_rounding(found: list[Tensor], expected: list[Tensor], roundings: int = 1) -> None:
    for tensor, exact in zip(found, expected):
        size = exact.abs().max().item()
        tolerance = {"rtol": 2 * roundings * torch.finfo(tensor.dtype).eps, "atol": 2e-5 * size + 1e-6}
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


def passing_on(query: Tensor, sources: list[Tensor]) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    return fused_depth_attention(query, EPS, False, *sources, passes_on=True)


def through_reference(query: Tensor, sources: list[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
    return *reference(query, sources, False), sources


def chain(attend: Callable, queries: list[Tensor], sources: list[Tensor]) -> Tensor:
    """The loss of reads of which each is a source of the next; of what the last one passes on, one is used."""
    total = 0
    for query in queries:
        result, weights, sources = attend(query, sources)
        total = total + loss(result, weights)
        sources = [*sources, 2 * result]
    return total + loss(sources[-2], weights)


@with_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "n, reads, shape, width", [(1, 1, (3,), 1), (1, 9, (2, 3), 7), (2, 2, (37,), 65), (17, 3, (3,), 24)]
)
def test_what_is_passed_on_brings_the_gradients_of_later_reads(n, reads, shape, width, dtype):
    queries = [make(1, shape, width, seed=i)[0] for i in range(reads)]
    _, sources = make(n, shape, width, dtype)
    sources[-1].requires_grad_(n == 1)  # of several, the last needs no gradient
    leaves = [leaf for leaf in (*queries, *sources) if leaf.requires_grad]
    found = torch.autograd.grad(chain(passing_on, queries, sources), leaves)
    assert [grad.dtype for grad in found] == [leaf.dtype for leaf in leaves]
    exact = in_float64(*queries, *sources)
    value = chain(through_reference, exact[:reads], exact[reads:])
    expected = torch.autograd.grad(value, exact[: len(leaves)])
    for grad, right in zip(found, expected, strict=True):
        slack = 1e-4 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(grad.double(), right, rtol=0, atol=slack * max(1, right.abs().max().item()))


@with_kernels
def test_gradients_of_later_reads_are_added_before_the_one_rounding():
    query, sources = make(3, (37,), 64, torch.float16)

    def grads(attend: Callable, query: Tensor, sources: list[Tensor]) -> tuple[Tensor, ...]:
        result, weights, later = attend(query, sources)
        return torch.autograd.grad(loss(result, weights) + loss(later[1], weights[0]), sources[1])

    (found,) = grads(passing_on, query, sources)
    exact_query, *exact = in_float64(query, *sources)
    (expected,) = grads(through_reference, exact_query, exact)
    assert (found == expected.half()).double().mean() > 0.99


@with_kernels
def test_what_is_passed_on_is_the_same_memory_and_needs_a_gradient_where_it_did():
    query, (frozen, a, b) = make(3, (4, 6), 8)
    sources = [frozen.detach(), a, b.transpose(0, 1).contiguous().transpose(0, 1)]
    result, _, later = passing_on(query, sources)
    assert [source.requires_grad for source in later] == [False, True, True]
    assert [source.grad_fn for source in later[1:]] == [result.grad_fn] * 2
    assert [source.data_ptr() for source in later] == [source.data_ptr() for source in sources]
    assert [source.stride() for source in later] == [source.stride() for source in sources]
    several = [frozen, a.half()]
    assert all(ours is given for ours, given in zip(passing_on(query, several)[2], several, strict=True))
    with torch.no_grad():
        assert all(ours is given for ours, given in zip(passing_on(query, sources)[2], sources, strict=True))


@with_kernels
def test_no_token_is_no_error():
    query, sources = make(2, (0, 4), 8)
    result, weights, *grads = everything(fused, query, sources, False)
    assert (result.shape, weights.shape) == ((0, 4, 8), (2, 0, 4))
    assert torch.equal(grads[0], torch.zeros_like(query))
    with torch.no_grad():
        assert read_fused(query, EPS, 1, sources, begin(query, sources)).shape == (0, 4, 8)


def begin(query: Tensor, sources: list[Tensor]) -> tuple[Tensor, ...] | None:
    """Phase one of these sources for `query`, which is one of two; nothing without a source."""
    if not sources:
        return None
    phase = phase_one(torch.stack([-query, query]), EPS, *sources)
    assert {tensor.dtype for tensor in phase} == {torch.float32}
    return tuple(tensor[1] for tensor in phase)


def make_norm(width: int, dtype: torch.dtype) -> LlamaRMSNorm:
    norm = LlamaRMSNorm(width, NORM_EPS).to(DEVICE, dtype)
    norm.weight.data.copy_(torch.linspace(-2, 3, width))
    return norm


# Sources of phase one, fresh ones, shape, width.
READS = [
    (0, 1, (37,), 1),
    (0, 9, (2, 3), 1000),
    (0, 64, (1, 5), 64),
    (1, 0, (37,), 7),
    (1, 1, (1,), 8192),
    (3, 17, (37,), 64),
    (9, 2, (5,), 1000),
    (64, 0, (3,), 64),
    (64, 5, (2, 3), 7),
]


@with_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_sum", [False, True])
@pytest.mark.parametrize("finished, fresh, shape, width", READS)
@torch.no_grad()
def test_a_read_is_one_attention_over_all_sources_and_then_the_norm(finished, fresh, shape, width, is_sum, dtype):
    n = finished + fresh
    query, sources = make(n, shape, width, dtype, sharpness=3.0)
    read = query, EPS, n if is_sum else 1, sources[finished:], begin(query, sources[:finished]), dtype
    weight = make_norm(width, dtype).weight
    found, normed = read_fused(*read), read_fused(*read, weight, NORM_EPS)
    assert (found.dtype, normed.dtype) == (dtype, dtype)
    expected, _ = reference(*in_float64(query), in_float64(*sources), is_sum)
    assert_equal_up_to_rounding([found], [expected])
    assert_equal_up_to_rounding([normed], [F.rms_norm(expected, (width,), weight.double(), NORM_EPS)], roundings=3)


@with_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_a_norm_rounds_where_the_module_rounds(dtype):
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter does not round to bfloat16, it cuts off")
    query, sources = make(5, (37,), 64, dtype)
    norm = make_norm(64, dtype)
    found = read_fused(query, EPS, 1, sources, norm_weight=norm.weight, norm_eps=NORM_EPS)
    # All bits alike, but for those that the order of a sum decides.
    assert (found == norm(read_fused(query, EPS, 1, sources))).double().mean() > 0.98


@with_kernels
@pytest.mark.parametrize("number, tile", [(1, None), (7, None), (7, 16)])
@torch.no_grad()
def test_phase_one_serves_every_query(number, tile, monkeypatch):
    if tile is not None:  # fewer queries at once than there are
        monkeypatch.setattr(kernels_attnres, "_QUERY_TILE", tile)
    _, (*blocks, partial) = make(9, (2, 3), 7)
    queries = torch.randn(number, 7, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    phase = phase_one(queries, EPS, *blocks)
    for i, query in enumerate(queries):
        found = read_fused(query, EPS, 1, [partial], tuple(tensor[i] for tensor in phase))
        assert_equal_up_to_rounding([found], [reference(*in_float64(query), in_float64(*blocks, partial), False)[0]])


@with_kernels
@pytest.mark.parametrize("is_phase_sharp", [False, True])
@torch.no_grad()
def test_a_read_is_exact_where_one_logit_is_far_above_the_others(is_phase_sharp):
    query, sources = make(4, (5,), 64, sharpness=100.0)
    far = sources[0 if is_phase_sharp else 3]
    far.copy_(query)  # its logit is about 800
    found = read_fused(query, EPS, 1, sources[2:], begin(query, sources[:2]))
    torch.testing.assert_close(found, far, rtol=1e-5, atol=1e-5)


@with_kernels
@pytest.mark.parametrize("finished, fresh", [(0, 17), (5, 0), (9, 8)])
@torch.no_grad()
def test_at_zero_queries_a_read_is_the_plain_sum_to_the_last_bit(finished, fresh):
    query, sources = make(finished + fresh, (2, 3), 24)
    phase = begin(0 * query, sources[:finished])
    result = read_fused(0 * query, EPS, len(sources), sources[finished:], phase)
    assert torch.equal(result, sum(sources))


@with_kernels
@torch.no_grad()
def test_what_is_read_may_be_views_and_of_several_dtypes():
    query, (a, b, c, d) = make(4, (4, 6), 8)
    phase = begin(query, [a, b.half()])
    views = [c.transpose(0, 1).contiguous().transpose(0, 1), d[:1].half().expand(4, 6, 8)]
    found = read_fused(query, EPS, 1, views, tuple(t.transpose(0, 1).contiguous().transpose(0, 1) for t in phase))
    assert found.dtype == torch.float32
    assert_equal_up_to_rounding([found], [reference(*in_float64(query), in_float64(a, b.half(), *views), False)[0]])


def make_model(block_size: int, num_hidden_layers: int) -> PreTrainedModel:
    torch.manual_seed(0)
    shape = {"vocab_size": 50, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": num_hidden_layers}
    config = backbones_attnres.config_on("llama")(num_attention_heads=2, attn_res_block_size=block_size, **shape)
    model = AutoModelForCausalLM.from_config(config).to(DEVICE)
    for name, parameter in model.named_parameters():
        if "_res_" in name:
            torch.nn.init.normal_(parameter)
    return model


@with_kernels
@pytest.mark.parametrize("block_size", [1, 3])
def test_training_passes_the_sources_on_and_checkpointing_changes_no_gradient(block_size, monkeypatch):
    model = make_model(block_size, num_hidden_layers=3).train()
    tokens = torch.arange(40, device=DEVICE).view(2, -1)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    monkeypatch.setattr(functional_attnres, "kernels_available", lambda *_: False)
    expected = gradients()
    later, all_or_none = [], kernels_attnres._all_or_none
    monkeypatch.setattr(kernels_attnres, "_all_or_none", lambda grads: later.append(grads) or all_or_none(grads))
    monkeypatch.setattr(functional_attnres, "kernels_available", lambda *_: True)
    monkeypatch.setattr(functional_attnres, "cpu_kernels_serve", lambda *_: False)
    found = gradients()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    # Nobody reads after the last read, which is the first here; after any other, every source is read again.
    assert [any(grad is None for grad in grads) for grads in later] == [True] + [False] * 6
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        assert all(map(torch.equal, gradients(), found))


@with_kernels
@pytest.mark.parametrize("block_size", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_reads_of_a_pass_are_those_of_its_connections(block_size, dtype, monkeypatch):
    monkeypatch.setattr(two_phase_attnres, "_CACHED", 0)
    model = make_model(block_size, num_hidden_layers=6).to(dtype)
    tokens = torch.arange(40, device=DEVICE).view(2, -1)
    expected = model.double()(tokens).logits.detach()
    model.to(dtype)
    calls = []
    monkeypatch.setattr(AttnRes, "forward", lambda *args: calls.append(args))
    if INTERPRETED:
        # Of a device that `of` takes for the CPU.
        monkeypatch.setattr(reads_attnres, "_CpuReads", _GpuReads)
        monkeypatch.setattr(reads_attnres, "loops", lambda: print)
    with torch.no_grad():
        logits = model(tokens).logits
    assert calls == [] and logits.dtype == dtype
    slack = {torch.float32: 1e-5, torch.float16: 0.02, torch.bfloat16: 0.1}[dtype]
    torch.testing.assert_close(logits.double(), expected, rtol=0, atol=slack * expected.abs().max().item())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fresh, is_begun", [(0, True), (2, False), (2, True)])
def test_a_compiler_knows_shapes_and_dtypes_without_running_a_kernel(fresh, is_begun, dtype, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    query, source = torch.empty(8, device="meta"), torch.empty(2, 3, 8, dtype=dtype, device="meta")
    phase = begin(query, [source]) if is_begun else None
    assert phase is None or [tensor.shape for tensor in phase] == [(2, 3, 8), (2, 3), (2, 3)]
    read = query, EPS, 1, [source] * fresh, phase
    results = [read_fused(*read), read_fused(*read, dtype, query.to(dtype), NORM_EPS)]
    assert [result.shape for result in results] == [(2, 3, 8)] * 2
    assert [result.dtype for result in results] == [dtype if fresh else torch.float32, dtype]


@with_kernels
@pytest.mark.slow
def test_torch_compile_takes_them_whole_and_for_any_number_of_tokens():
    def attend(query: Tensor, sources: list[Tensor], is_sum: bool) -> tuple[Tensor, Tensor]:
        assert kernels_attnres._run_on(query.device)
        sources = [2 * sources[0], *sources[1:]]
        for factor in (1.5, -0.5):
            result, weights, sources = fused_depth_attention(factor * query, EPS, is_sum, *sources, passes_on=True)
            sources = [*sources, 2 * result]
        return result + sources[1], weights

    def in_phases(query: Tensor, sources: list[Tensor]) -> tuple[Tensor, Tensor]:
        phase, weight = begin(query, sources), torch.ones_like(query)
        alone = read_fused(query, EPS, 3, [], phase, torch.float16)
        return alone, read_fused(query, EPS, 5, [2 * sources[0], sources[1]], phase, None, weight, NORM_EPS)

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
        read_fused(query, EPS, 1, sources[1:], begin(query, sources[:1]))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result, _ = fused(query, sources, False)
            read = read_fused(query, EPS, 1, sources[1:], begin(query, sources[:1]))
        for source in sources:
            source.mul_(torch.rand_like(source))
        graph.replay()
        assert torch.equal(result, fused(query, sources, False)[0])
        assert torch.equal(read, read_fused(query, EPS, 1, sources[1:], begin(query, sources[:1])))


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
from attnres.kernels_attnres import fused_depth_attention, phase_one, read_fused

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
    for needed, passes_on in ((False, False), (True, False), (True, True)):
        sources = [source.requires_grad_(needed) for source in sources]
        result, weights, later = fused_depth_attention(query, 1e-6, True, *sources, passes_on=passes_on)
        (result.sum().float() + (weights.sum() if needed else 0) + (later[0].sum() if passes_on else 0)).backward()
    with torch.no_grad():
        phase = tuple(tensor[0] for tensor in phase_one(query.repeat(6, 1), 1e-6, *sources))
        read_fused(query, 1e-6, 1, [], phase, dtype)
        for begun in (None, phase):
            read_fused(query, 1e-6, 1, sources, begun, None, sources[0][0], 1e-6)
"""


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_they_compile_for_a_gpu_that_is_not_there(capability, tmp_path):
    report = python("-c", COMPILE.replace("{capability}", str(capability)), TRITON_CACHE_DIR=str(tmp_path))
    compiled = report.splitlines()
    assert len(compiled) == 3 * 10 and all(line.endswith("True") for line in compiled), report
