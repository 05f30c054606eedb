"""Two-phase inference is the same function, read in groups of sublayers where that saves memory traffic."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnres import depth_attention_reference, reads_attnres, two_phase_attnres
from attnres.cpu_kernels_attnres import phase_one_on_cpu, run_forward
from attnres.two_phase_attnres import group_size, two_phases_pay

TOKENS = torch.arange(3, 43).view(2, -1)


pytestmark = pytest.mark.usefixtures("cpu_kernels")


@pytest.fixture(autouse=True)
def no_cache(monkeypatch) -> None:
    monkeypatch.setattr(two_phase_attnres, "_CACHED", 0)


@pytest.fixture
def groups(monkeypatch) -> list[tuple[int, int]]:
    """Fills with the number of queries and of sources of each phase one."""
    seen = []

    def spy(queries, eps, sources):
        seen.append((len(queries), len(sources)))
        return phase_one_on_cpu(queries, eps, sources)

    monkeypatch.setattr(reads_attnres, "phase_one_on_cpu", spy)
    return seen


def phase_two(
    query: Tensor, multiplier: int, phase: tuple[Tensor, Tensor], dtype: torch.dtype, fresh: list[Tensor]
) -> Tensor:
    result = torch.empty(phase[0].shape, dtype=dtype)
    addresses = tuple(part.data_ptr() for part in phase)
    run_forward(result, multiplier, query.data_ptr(), addresses, [s.data_ptr() for s in fresh], 1e-6, 0, 0.0)
    return result


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    finished=st.integers(1, 6),
    fresh=st.integers(0, 4),
    queries=st.integers(1, 4),
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
    sums, statistics = phase_one_on_cpu(query, 1e-6, sources[:finished])
    for i in range(queries):
        multiplier = len(sources) if scale == "sum" else 1
        result = phase_two(query[i], multiplier, (sums[i], statistics[i]), dtype, sources[finished:])
        double = [source.double() for source in sources]
        expected = depth_attention_reference(query[i].double(), double, None, 1e-6, scale=scale)
        tolerance = {"rtol": 1e-3, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 0.01, "atol": 2e-3}
        torch.testing.assert_close(result.double(), expected, **tolerance)
        assert result.dtype == dtype


@pytest.mark.parametrize("scale", ["mean", "sum"])
@pytest.mark.parametrize("block_size", [1, 2, 3, 8])
@pytest.mark.parametrize("cost", [0.0, 1.9])
def test_a_model_in_two_phases_computes_the_same(vivid_model, groups, monkeypatch, block_size, scale, cost):
    monkeypatch.setattr(two_phase_attnres, "_COST_OF_SUM", cost)
    model = vivid_model(attn_res_block_size=block_size, attn_res_scale=scale, num_hidden_layers=8, layer_types=None)
    expected = model(TOKENS, use_cache=False).logits
    assert groups == []
    with torch.no_grad():
        actual = model(TOKENS, use_cache=False).logits
    assert bool(groups) == (cost == 0.0 or block_size < 8)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=5e-4)


def test_at_zero_queries_phases_give_the_plain_sum_to_the_last_bit():
    sources = [torch.randint(-9, 9, (5, 16)).float() for _ in range(7)]
    sums, statistics = phase_one_on_cpu(torch.zeros(2, 16), 1e-6, sources[:4])
    result = phase_two(torch.zeros(16), 7, (sums[1], statistics[1]), torch.float32, sources[4:])
    assert torch.equal(result, sum(sources))


@torch.no_grad()
def test_full_attention_residuals_are_read_in_groups_and_the_output_belongs_to_the_last(vivid_model, groups):
    vivid_model(attn_res_block_size=1, num_hidden_layers=8, layer_types=None)(TOKENS, use_cache=False)
    assert groups == [(3, 4), (4, 7), (5, 11), (2, 16)]  # of 16 sublayers and the output; three sources are too few


@torch.no_grad()
@pytest.mark.parametrize("case", ["recorded", "watched", "few tokens"])
def test_where_connections_are_seen_or_memory_is_not_the_cost_they_are_called(vivid_model, groups, monkeypatch, case):
    model = vivid_model(attn_res_block_size=1, num_hidden_layers=8, layer_types=None)
    if case == "watched":
        model.model.output_attn_res_proj.register_forward_hook(lambda *args: None)
    if case == "few tokens":
        monkeypatch.setattr(two_phase_attnres, "_CACHED", 4 << 20)
    model(TOKENS, use_cache=False, output_depth_attentions=case == "recorded")
    assert groups == []


def test_groups_save_readings(monkeypatch):
    monkeypatch.setattr(two_phase_attnres, "_CACHED", 4 << 20)
    assert two_phases_pay(3, 512 * 1024) and not two_phases_pay(2, 512 * 1024) and not two_phases_pay(99, 8192)
    for block_size in range(1, 9):
        for sources in range(1, 60):
            for reads in range(1, 200, 7):
                size = group_size(block_size, sources, reads)
                assert 1 <= size <= reads and (size in (1, reads) or size % block_size == 0)
                assert size == 1 or sources * (size - 1) > 1.9 * size
