"""Derivatives of the kernels: gradients of later reads, and second derivatives."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnres import depth_attention_reference
from attnres.accelerated.autograd import (
    FollowingNorm,
    depth_attention_in_operations,
    differentiable,
    norm_grads_in_operations,
    rms_norm_in_operations,
)
from attnres.accelerated.numba import IMPLEMENTATION, kernels

pytest.importorskip("numba")
run = IMPLEMENTATION.run


def chain(queries: list[Tensor], sources: list[Tensor], is_reference: bool) -> Tensor:
    """Return a loss over several reads. Each result is a source of the next read, and one source is used directly.

    Our kernels compute the reads, or with `is_reference` the reference.
    """
    total = 0
    for query in queries:
        if is_reference:
            result = depth_attention_reference(query, sources, None, 1e-6)
        else:
            result, _, sources = run(query, sources, 1e-6, False, fuse_later_grads=True)
        total = total + (result * sources[0]).sum()
        sources = [*sources, result.sin()]
    return total + sources[-1].sum()


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    n=st.integers(1, 4),
    reads=st.integers(1, 4),
    tokens=st.integers(0, 40),
    width=st.integers(1, 80),
    frozen=st.booleans(),
    seed=st.integers(0, 99),
)
def test_gradients_of_later_reads_are_added(n, reads, tokens, width, frozen, seed):
    torch.manual_seed(seed)
    queries = [torch.randn(width, requires_grad=True) for _ in range(reads)]
    sources = [torch.randn(tokens, width, requires_grad=i > 0 or not frozen) for i in range(n)]
    leaves = [leaf for leaf in (*queries, *sources) if leaf.requires_grad]
    actual = torch.autograd.grad(chain(queries, sources, is_reference=False), leaves)
    exact = [leaf.detach().double().requires_grad_(leaf.requires_grad) for leaf in (*queries, *sources)]
    loss = chain(exact[:reads], exact[reads:], is_reference=True)
    expected = torch.autograd.grad(loss, [leaf for leaf in exact if leaf.requires_grad])
    for ours, right in zip(actual, expected):
        size = right.abs().max().item() if right.numel() else 0
        torch.testing.assert_close(ours.double(), right, rtol=0, atol=1e-4 * max(1, size))


def test_a_source_that_needs_no_gradient_is_returned_as_one_that_needs_none():
    frozen, trained = torch.randn(3, 8), torch.randn(3, 8, requires_grad=True)
    _, _, sources = run(torch.randn(8, requires_grad=True), [frozen, trained], 1e-6, False, fuse_later_grads=True)
    assert [source.requires_grad for source in sources] == [False, True]
    assert [source.data_ptr() for source in sources] == [frozen.data_ptr(), trained.data_ptr()]


def test_without_gradients_the_given_sources_are_returned():
    sources = (torch.randn(3, 8), torch.randn(3, 8))
    with torch.no_grad():
        assert run(torch.randn(8), sources, 1e-6, False, fuse_later_grads=True)[2] is sources


def test_the_gradients_of_two_reads_are_added_before_they_are_rounded_to_bfloat16():
    torch.manual_seed(0)
    sources = [torch.randn(64, 32).bfloat16().requires_grad_() for _ in range(2)]
    query = torch.randn(32)
    result, _, later = run(query, sources, 1e-6, False, fuse_later_grads=True)
    direction = torch.randn(64, 32).bfloat16()
    ours = torch.autograd.grad((result * direction).sum() + (later[0] * direction).sum(), sources[0])[0]
    exact = [source.detach().double().requires_grad_() for source in sources]
    result = depth_attention_reference(query.double(), exact, None, 1e-6)
    loss = (result * direction.double()).sum() + (exact[0] * direction.double()).sum()
    expected = torch.autograd.grad(loss, exact[0])[0]
    assert (ours == expected.bfloat16()).float().mean() > 0.99


def second_derivatives(query: Tensor, first: Tensor, use_weights: bool, fuse: bool, ours: bool) -> tuple[Tensor, ...]:
    """Return the gradients of two reads whose sources stem from one tensor, and the gradients of a penalty on them."""
    sources = [first, first.sin() * 2, first.cos()]
    if ours:
        result, weights, sources = run(query, sources, 1e-2, True, fuse_later_grads=fuse)
        again, _, _ = run(query, sources, 1e-2, False)
    else:
        kind = {"eps": 1e-2, "return_weights": True}
        result, weights = depth_attention_reference(query, sources, scale="sum", **kind)
        again, _ = depth_attention_reference(query, sources, **kind)
    loss = again.pow(3).sum() + (weights.square().sum() * 9 if use_weights else result.pow(3).sum())
    grads = torch.autograd.grad(loss, [query, first], create_graph=True)
    return *grads, *torch.autograd.grad(sum(grad.square().sum() for grad in grads), [query, first])


@pytest.mark.parametrize("use_weights", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
def test_the_backward_pass_is_differentiable(use_weights, fuse):
    torch.manual_seed(0)
    query, first = torch.randn(24, requires_grad=True), torch.randn(7, 24, requires_grad=True)
    exact = [tensor.detach().double().requires_grad_() for tensor in (query, first)]
    expected = second_derivatives(*exact, use_weights, fuse, ours=False)
    for ours, right in zip(second_derivatives(query, first, use_weights, fuse, ours=True), expected):
        torch.testing.assert_close(ours.double(), right, rtol=0, atol=1e-4 * right.abs().max().item())


def test_the_backward_kernel_runs_unless_the_backward_pass_is_differentiated():
    calls = []

    def backward(request):
        calls.append(request)
        return kernels.backward(request)

    spied = differentiable(kernels.forward, backward)
    source = torch.randn(5, 16, requires_grad=True)
    result, _, _ = spied(torch.randn(16), [source, source], 1e-6, False)
    result.sum().backward(retain_graph=True)
    assert len(calls) == 1
    result.sum().backward(create_graph=True)
    assert len(calls) == 1


@pytest.mark.parametrize("used", ["result", "weights", "later"])
def test_the_gradients_are_right_if_one_output_alone_is_used(used):
    torch.manual_seed(0)
    query, source = torch.randn(16, requires_grad=True), torch.randn(5, 16, requires_grad=True)
    sources = [source, source.sin()]
    result, weights, later = run(query, sources, 1e-6, False, fuse_later_grads=True)
    loss = {"result": result.sum(), "weights": weights[0].sum(), "later": later[1].square().sum()}[used]
    kind = {"allow_unused": True, "materialize_grads": True, "retain_graph": True}
    actual = torch.autograd.grad(loss, [query, source], **kind)
    result, weights = depth_attention_in_operations(query, sources, 1e-6, False)
    loss = {"result": result.sum(), "weights": weights[0].sum(), "later": sources[1].square().sum()}[used]
    expected = torch.autograd.grad(loss, [query, source], **kind)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_compiled_graph_contains_the_backward_kernel():
    """Operations stand in for the Triton kernels, which are operators for the compiler."""

    def forward(query, sources, eps, is_sum):
        return *depth_attention_in_operations(query, sources, eps, is_sum), (query,)

    def backward(request):
        return request.query * 7, [request.grad * 5 for _ in request.sources]  # wrong numbers, which show that it ran

    read = differentiable(forward, backward)
    query, source = torch.randn(8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    torch.compiler.reset()
    compiled = torch.compile(lambda q, s: read(q, [s, s.sin()], 1e-6, True)[0], fullgraph=True, backend="aot_eager")
    compiled(query, source).sum().backward()
    torch.testing.assert_close(query.grad, query.detach() * 7)


def test_the_gradients_of_a_norm_take_a_permuted_gradient():
    x, norm = torch.randn(2, 3, 8, requires_grad=True), FollowingNorm(torch.randn(8, requires_grad=True), 1e-6)
    grad = torch.randn(3, 2, 8).transpose(0, 1)
    expected = torch.autograd.grad(rms_norm_in_operations(x, norm), (x, norm.weight), grad)
    with torch.no_grad():
        for x_like in (x, x.transpose(0, 1).contiguous().transpose(0, 1)):
            torch.testing.assert_close(norm_grads_in_operations(grad, x_like, norm), expected)
