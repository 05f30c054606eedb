"""The kernels for inference: phase one and a read make one attention over all sources, then the norm follows."""

import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from attnres.accelerated.triton import launch, phase_one, read_fused

from .triton_cases import (
    DEVICE,
    DTYPES,
    EPS,
    INTERPRETED,
    assert_equal_up_to_rounding,
    begin,
    in_float64,
    make,
    reference,
    with_kernels,
)

NORM_EPS = 0.1


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
def test_phase_one_and_a_read_equal_one_attention_and_the_norm(finished, fresh, shape, width, is_sum, dtype):
    n = finished + fresh
    query, sources = make(n, shape, width, dtype, sharpness=3.0)
    read = query, EPS, n if is_sum else 1, sources[finished:], begin(query, sources[:finished]), dtype
    weight = make_norm(width, dtype).weight
    actual, normed = read_fused(*read), read_fused(*read, weight, NORM_EPS)
    assert (actual.dtype, normed.dtype) == (dtype, dtype)
    expected, _ = reference(*in_float64(query), in_float64(*sources), is_sum)
    assert_equal_up_to_rounding([actual], [expected])
    assert_equal_up_to_rounding([normed], [F.rms_norm(expected, (width,), weight.double(), NORM_EPS)], roundings=3)


@with_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_a_norm_rounds_where_the_module_rounds(dtype):
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter truncates to bfloat16 and does not round")
    query, sources = make(5, (37,), 64, dtype)
    norm = make_norm(64, dtype)
    actual = read_fused(query, EPS, 1, sources, norm_weight=norm.weight, norm_eps=NORM_EPS)
    # All bits are equal except those that depend on the order of a sum.
    assert (actual == norm(read_fused(query, EPS, 1, sources))).double().mean() > 0.98


@with_kernels
@pytest.mark.parametrize("number, tile", [(1, None), (7, None), (7, 16)])
@torch.no_grad()
def test_phase_one_serves_every_query(number, tile, monkeypatch):
    if tile is not None:  # fewer queries at once than there are
        monkeypatch.setattr(launch, "_QUERY_TILE", tile)
    _, (*blocks, partial) = make(9, (2, 3), 7)
    queries = torch.randn(number, 7, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    phase = phase_one(queries, EPS, *blocks)
    for i, query in enumerate(queries):
        actual = read_fused(query, EPS, 1, [partial], tuple(tensor[i] for tensor in phase))
        assert_equal_up_to_rounding([actual], [reference(*in_float64(query), in_float64(*blocks, partial), False)[0]])


@with_kernels
@pytest.mark.parametrize("is_phase_sharp", [False, True])
@torch.no_grad()
def test_a_read_is_exact_where_one_logit_is_far_above_the_others(is_phase_sharp):
    query, sources = make(4, (5,), 64, sharpness=100.0)
    far = sources[0 if is_phase_sharp else 3]
    far.copy_(query)  # its logit is about 800
    actual = read_fused(query, EPS, 1, sources[2:], begin(query, sources[:2]))
    torch.testing.assert_close(actual, far, rtol=1e-5, atol=1e-5)


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
def test_sources_may_be_views_and_of_several_dtypes():
    query, (a, b, c, d) = make(4, (4, 6), 8)
    phase = begin(query, [a, b.half()])
    views = [c.transpose(0, 1).contiguous().transpose(0, 1), d[:1].half().expand(4, 6, 8)]
    actual = read_fused(query, EPS, 1, views, tuple(t.transpose(0, 1).contiguous().transpose(0, 1) for t in phase))
    assert actual.dtype == torch.float32
    assert_equal_up_to_rounding([actual], [reference(*in_float64(query), in_float64(a, b.half(), *views), False)[0]])


@with_kernels
@torch.no_grad()
def test_sources_may_have_no_tokens():
    query, sources = make(2, (0, 4), 8)
    assert read_fused(query, EPS, 1, sources, begin(query, sources)).shape == (0, 4, 8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fresh, is_begun", [(0, True), (2, False), (2, True)])
def test_torch_compile_gets_shapes_and_dtypes_without_running_a_kernel(fresh, is_begun, dtype, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    query, source = torch.empty(8, device="meta"), torch.empty(2, 3, 8, dtype=dtype, device="meta")
    phase = begin(query, [source]) if is_begun else None
    assert phase is None or [tensor.shape for tensor in phase] == [(2, 3, 8), (2, 3), (2, 3)]
    read = query, EPS, 1, [source] * fresh, phase
    results = [read_fused(*read), read_fused(*read, dtype, query.to(dtype), NORM_EPS)]
    assert [result.shape for result in results] == [(2, 3, 8)] * 2
    assert [result.dtype for result in results] == [dtype if fresh else torch.float32, dtype]
