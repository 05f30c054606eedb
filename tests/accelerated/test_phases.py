"""Two-phase inference computes the same function, and is chosen if it saves memory traffic."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnres import depth_attention_reference
from attnres.accelerated.numba import call, kernels
from attnres.accelerated.phases import group_size, two_phases_pay

pytest.importorskip("numba")


def phase_two(query: Tensor, multiplier: int, phase: tuple[Tensor, Tensor], rows: call.CheckedSources) -> Tensor:
    result = torch.empty(rows.shape, dtype=rows.dtype)
    call.forward(query, rows, result, None, multiplier, 1e-6, phase=phase)
    return result


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    finished=st.integers(1, 6),
    fresh=st.integers(0, 4),
    queries=st.integers(1, 6),
    tokens=st.integers(0, 40),
    width=st.integers(1, 80),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    scale=st.sampled_from(("mean", "sum")),
    large=st.sampled_from((0.0, 1.0, 100.0)),
    seed=st.integers(0, 99),
)
def test_phase_two_completes_the_attention_over_all_sources(
    finished, fresh, queries, tokens, width, dtype, scale, large, seed
):
    torch.manual_seed(seed)
    query = large * torch.randn(queries, width)
    sources = [torch.randn(tokens, width).to(dtype) for _ in range(finished + fresh)]
    rows = call.checked(sources)
    sums, statistics = kernels.phase_one(query, 1e-6, call.checked(sources[:finished]))
    for i in range(queries):
        multiplier = len(sources) if scale == "sum" else 1
        result = phase_two(query[i], multiplier, (sums[i], statistics[i]), rows.after(finished))
        double = [source.double() for source in sources]
        expected = depth_attention_reference(query[i].double(), double, None, 1e-6, scale=scale)
        tolerance = {"rtol": 1e-3, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 0.01, "atol": 2e-3}
        torch.testing.assert_close(result.double(), expected, **tolerance)


def test_at_zero_queries_phases_give_the_plain_sum_to_the_last_bit():
    sources = [torch.randint(-9, 9, (5, 16)).float() for _ in range(7)]
    rows = call.checked(sources)
    sums, statistics = kernels.phase_one(torch.zeros(2, 16), 1e-6, call.checked(sources[:4]))
    assert torch.equal(phase_two(torch.zeros(16), 7, (sums[1], statistics[1]), rows.after(4)), sum(sources))


def test_groups_save_readings():
    assert two_phases_pay(3, 512 * 1024) and not two_phases_pay(2, 512 * 1024) and not two_phases_pay(99, 8192)
    for block_size in range(1, 9):
        for sources in range(1, 60):
            for reads in range(1, 200, 7):
                size = group_size(block_size, sources, reads)
                assert 1 <= size <= reads and (size in (1, reads) or size % block_size == 0)
                assert size == 1 or sources * (size - 1) > 1.9 * size
