"""The compiled loops compute the results and gradients of the reference, and run where they should."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnres import depth_attention_reference
from attnres.accelerated import IMPLEMENTATIONS
from attnres.accelerated.numba import IMPLEMENTATION

pytest.importorskip("numba")

DTYPES = (torch.float32, torch.bfloat16)


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    largest = expected.abs().max().item() if expected.numel() else 0
    slack = (1e-4 if dtype == torch.float32 else 0.02) * max(1, largest)
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=slack)


@settings(deadline=None, derandomize=True, max_examples=80)
@given(
    n=st.integers(1, 40),
    tokens=st.integers(0, 40),
    width=st.integers(1, 130),
    dtype=st.sampled_from(DTYPES),
    is_sum=st.booleans(),
    large=st.sampled_from((0.0, 1.0, 30.0)),
    eps=st.sampled_from((1e-6, 0.5)),
    seed=st.integers(0, 99),
)
def test_results_and_gradients_equal_those_of_the_reference(n, tokens, width, dtype, is_sum, large, eps, seed):
    torch.manual_seed(seed)
    leaves = [large * torch.randn(width), *(torch.randn(tokens, width).to(dtype) for _ in range(n))]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    assert IMPLEMENTATION.supports(leaves[0], leaves[1:]) is None
    result, weights, _ = IMPLEMENTATION.run(leaves[0], leaves[1:], eps, is_sum)
    scale = "sum" if is_sum else "mean"
    right, right_weights = depth_attention_reference(
        exact[0], exact[1:], None, eps, scale=scale, return_weights=True
    )  # fmt: skip
    assert result.dtype is dtype and weights.dtype is torch.float32
    close(result, right, dtype)
    close(weights, right_weights, torch.float32)
    direction, weight_direction = torch.randn(tokens, width).to(dtype), torch.randn(n, tokens)
    loss = (result * direction).double().sum() + (weights * weight_direction).sum()
    right_loss = (right * direction).sum() + (right_weights * weight_direction).sum()
    for ours, expected in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(right_loss, exact)):
        close(ours, expected, dtype if large < 30 else torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_at_zero_queries_the_sum_is_the_plain_sum_to_the_last_bit(dtype):
    sources = [torch.randint(-9, 9, (3, 5, 77)).to(dtype) for _ in range(7)]
    assert torch.equal(IMPLEMENTATION.run(torch.zeros(77), sources, 1e-6, True)[0], sum(sources))


def in_columns(source: Tensor) -> Tensor:
    return source.mT.contiguous().mT


def repeated(source: Tensor) -> Tensor:
    return source[:1].expand(4, 6, 24)


def every_second(source: Tensor) -> Tensor:
    return torch.cat([source, source], -1)[..., ::2]


@pytest.mark.parametrize("change", [in_columns, repeated, every_second])
def test_sources_and_query_may_have_any_strides(change):
    sources = [change(torch.randn(4, 6, 24)) for _ in range(2)]
    query = torch.randn(48)[::2]
    expected = depth_attention_reference(query, sources)
    torch.testing.assert_close(IMPLEMENTATION.run(query, sources, 1e-6, False)[0], expected, rtol=1e-5, atol=1e-5)


class Subclass(Tensor):
    pass


@pytest.mark.parametrize(
    ("query", "source", "words"),
    [
        (torch.ones(4, dtype=torch.float64), torch.ones(2, 4), "float64"),
        (torch.ones(4), torch.ones(2, 4, dtype=torch.float64), "float64"),
        (torch.ones(4), torch.ones(2, 4, dtype=torch.float16), "float16"),
        (torch.ones(4), torch.ones(2, 4, device="meta"), "on meta"),
        (torch.ones(4), torch.ones(2, 4).as_subclass(Subclass), "Subclass"),
        (torch.ones(4), torch.ones(2, 4).to_sparse(), "sparse"),
    ],
)
def test_the_reason_names_what_is_not_supported(query, source, words):
    assert words in IMPLEMENTATION.supports(query, [source, source])


def test_sources_of_two_dtypes_are_not_supported():
    assert "several" in IMPLEMENTATION.supports(torch.ones(4), [torch.ones(2, 4), torch.ones(2, 4).bfloat16()])


def test_the_loops_do_not_run_while_operations_are_observed():
    query, sources = torch.ones(4), [torch.ones(2, 4)] * 2
    reasons = []

    def ask(source: Tensor) -> Tensor:
        reasons.append(IMPLEMENTATION.supports(query, [source, source]))
        return source.sum()

    torch.func.vmap(ask)(sources[0])
    torch.func.jacrev(ask)(sources[0])
    torch.func.jvp(ask, (sources[0],), (sources[0],))
    torch.func.functional_call(torch.nn.Identity(), {}, ask(sources[0]))
    assert [reason is None for reason in reasons] == [False, False, False, True]
    from torch.autograd import forward_ad
    from torch.utils.flop_counter import FlopCounterMode

    with forward_ad.dual_level():
        ask(sources[0])
    with FlopCounterMode(display=False):
        ask(sources[0])
    assert "forward-mode" in reasons[-2] and "dispatch mode" in reasons[-1]


def test_the_size_alone_decides_whether_the_loops_pay():
    pays = [IMPLEMENTATION.pays(torch.ones(d), [torch.ones(t, d)] * 2) for t, d in ((9, 99), (999, 33), (1, 512))]
    assert pays == [False, True, True]


def test_the_loops_are_the_first_choice():
    assert next(iter(IMPLEMENTATIONS)) == "numba"
