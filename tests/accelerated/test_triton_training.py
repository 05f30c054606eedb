"""The kernels for training equal `depth_attention_reference` in float64 up to rounding, with its derivatives."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attnres.accelerated.triton import launch

from .triton_cases import (
    DEVICE,
    DTYPES,
    KERNELS,
    assert_equal_up_to_rounding,
    everything,
    fused,
    in_float64,
    loss,
    make,
    reference,
)

pytestmark = KERNELS

# Number of sources, shape, width. 37 tokens leave a tile partly empty.
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_sum", [False, True])
@pytest.mark.parametrize("n, shape, width", CASES)
def test_the_result_the_weights_and_all_gradients_are_those_of_the_reference(n, shape, width, is_sum, dtype):
    query, sources = make(n, shape, width, dtype)
    actual = everything(fused, query, sources, is_sum)
    assert actual[0].dtype == dtype and [grad.dtype for grad in actual[3:]] == [dtype] * n
    query, *sources = in_float64(query, *sources)
    expected = everything(reference, query, sources, is_sum)
    assert_equal_up_to_rounding(actual, expected)


@pytest.mark.parametrize("sharpness", [30.0, 1000.0])
def test_sharp_weights_are_as_exact(sharpness):
    query, sources = make(9, (5,), 64, sharpness=sharpness)
    actual, _ = fused(query, sources, False)
    query, *sources = in_float64(query, *sources)
    torch.testing.assert_close(actual.double(), reference(query, sources, False)[0], rtol=1e-3, atol=1e-3)


def test_at_zero_queries_sum_is_the_plain_sum_to_the_last_bit():
    query, sources = make(17, (2, 3), 24)
    result, weights = fused(0 * query, sources, True)
    assert torch.equal(result, sum(sources))
    assert torch.equal(weights, torch.full_like(weights, 1 / 17))


def test_the_gradient_of_the_query_is_summed_over_many_tiles_in_a_fixed_order(monkeypatch):
    monkeypatch.setattr(launch, "_PROGRAMS", 3)
    query, sources = make(3, (4, 111), 64)
    once, again = (everything(fused, query, sources, False) for _ in range(2))
    assert all(map(torch.equal, once, again))
    query, *sources = in_float64(query, *sources)
    assert_equal_up_to_rounding(once, everything(reference, query, sources, False))


def test_sources_may_be_views_and_of_several_dtypes_and_the_query_a_column():
    query, (a, b, c) = make(3, (4, 6), 8)
    column = query.detach()[:, None].repeat(1, 2).requires_grad_()

    def through_views(attend: Callable) -> list[Tensor]:
        views = [a.transpose(0, 1), b[:1].expand(4, 6, 8).transpose(0, 1).half(), c.reshape(6, 4, 8)]
        result, weights = attend(column[:, 0], views, True)
        assert result.dtype == torch.float32
        return [result, weights, *torch.autograd.grad(loss(result, weights), (column, a, b, c))]

    for actual, expected in zip(through_views(fused), through_views(reference)):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


def test_negated_views_have_their_sign():
    query, sources = make(2, (3,), 8)
    negated = torch.complex(sources[0], sources[1]).detach().conj().imag
    assert negated.is_neg()
    for views in ([sources[0], negated], [sources[0], torch._neg_view(sources[1].detach())]):
        torch.testing.assert_close(fused(query, views, False), reference(query, views, False))


def test_only_the_requested_gradients_are_computed(monkeypatch):
    query, sources = make(3, (2,), 8)
    expected = everything(reference, query, sources, False)[2:]
    sources[1].requires_grad_(False)
    result, weights = fused(query, sources, False)
    actual = torch.autograd.grad(loss(result, weights), (query, sources[0], sources[2]))
    torch.testing.assert_close(list(actual), [expected[i] for i in (0, 1, 3)], rtol=1e-4, atol=1e-4)

    for source in sources:
        source.requires_grad_(False)
    compute, made = launch.backward, []

    def backward(*args):
        outputs = compute(*args)
        made.extend(outputs[1])
        return outputs

    monkeypatch.setattr(launch, "backward", backward)
    (actual,) = torch.autograd.grad(loss(*fused(query, sources, False)), query)
    torch.testing.assert_close(actual, expected[0], rtol=1e-4, atol=1e-4)
    assert made == []


@pytest.mark.parametrize("used", [0, 1])
def test_one_of_the_two_results_alone_has_the_right_gradients(used):
    query, sources = make(3, (2,), 8)
    actual, expected = (
        torch.autograd.grad(attend(query, sources, False)[used].square().sum(), (query, *sources))
        for attend in (fused, reference)
    )
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_sum", [False, True])
def test_the_gradient_of_the_gradient_is_that_of_the_reference(is_sum):
    def twice(attend: Callable, query: Tensor, sources: list[Tensor]) -> tuple[Tensor, ...]:
        result, weights = attend(query, sources, is_sum)
        value = (result.square().sum() + weights.square().sum()).double()
        first = torch.autograd.grad(value, (query, *sources), create_graph=True)
        return torch.autograd.grad(sum(grad.double().square().sum() for grad in first), (query, *sources))

    query, sources = make(3, (2,), 8)
    actual = twice(fused, query, sources)
    query, *sources = in_float64(query, *sources)
    for grad, expected in zip(actual, twice(reference, query, sources), strict=True):
        torch.testing.assert_close(grad.double(), expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def test_sources_may_have_no_tokens():
    query, sources = make(2, (0, 4), 8)
    result, weights, *grads = everything(fused, query, sources, False)
    assert (result.shape, weights.shape) == ((0, 4, 8), (2, 0, 4))
    assert torch.equal(grads[0], torch.zeros_like(query))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_the_default_dtype_and_device_change_nothing(dtype):
    query, sources = make(3, (2,), 8)
    expected = everything(fused, query, sources, False)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            result, weights = fused(query, sources, False)
            direction = torch.ones(2, 8, dtype=torch.float32, device=DEVICE)
            grads = torch.autograd.grad(result, (query, *sources), direction)
        assert {tensor.dtype for tensor in (result, weights, *grads)} == {torch.float32}
        assert {tensor.device.type for tensor in (result, weights, *grads)} == {DEVICE}
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(result, expected[0]) and torch.equal(weights, expected[1])
