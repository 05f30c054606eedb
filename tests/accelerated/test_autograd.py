"""The derivative around the kernels: gradients of later readers, and derivatives of derivatives."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnres import depth_attention_reference
from attnres.accelerated.autograd import depth_attention_in_operations, differentiable
from attnres.accelerated.numba import IMPLEMENTATION, kernels

pytest.importorskip("numba")
run = IMPLEMENTATION.run


def chain(queries: list[Tensor], sources: list[Tensor], dtype: torch.dtype | None) -> Tensor:
    """Each read's result is a source of the next; one source is used beside. In `dtype` the reference, or ours."""
    total = 0
    for query in queries:
        if dtype is None:
            result, _, sources = run(query, sources, 1e-6, False, fuse_later_grads=True)
        else:
            result = depth_attention_reference(query, sources, None, 1e-6)
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
def test_gradients_of_later_readers_are_added(n, reads, tokens, width, frozen, seed):
    torch.manual_seed(seed)
    queries = [torch.randn(width, requires_grad=True) for _ in range(reads)]
    sources = [torch.randn(tokens, width, requires_grad=i > 0 or not frozen) for i in range(n)]
    leaves = [leaf for leaf in (*queries, *sources) if leaf.requires_grad]
    actual = torch.autograd.grad(chain(queries, sources, None), leaves)
    exact = [leaf.detach().double().requires_grad_(leaf.requires_grad) for leaf in (*queries, *sources)]
    loss = chain(exact[:reads], exact[reads:], torch.float64)
    expected = torch.autograd.grad(loss, [leaf for leaf in exact if leaf.requires_grad])
    for ours, right in zip(actual, expected):
        size = right.abs().max().item() if right.numel() else 0
        torch.testing.assert_close(ours.double(), right, rtol=0, atol=1e-4 * max(1, size))


def test_what_needs_no_gradient_goes_on_as_such():
    frozen, trained = torch.randn(3, 8), torch.randn(3, 8, requires_grad=True)
    _, _, sources = run(torch.randn(8, requires_grad=True), [frozen, trained], 1e-6, False, fuse_later_grads=True)
    assert [source.requires_grad for source in sources] == [False, True]
    assert [source.data_ptr() for source in sources] == [frozen.data_ptr(), trained.data_ptr()]


def test_without_gradients_the_sources_go_on_themselves():
    sources = (torch.randn(3, 8), torch.randn(3, 8))
    with torch.no_grad():
        assert run(torch.randn(8), sources, 1e-6, False, fuse_later_grads=True)[2] is sources


def test_a_bfloat16_gradient_is_rounded_once_for_each_read_and_not_twice():
    """Of two reads, a gradient is the sum of both: ours plus that of the later read, rounded together."""
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
    """Of two reads of sources one of which comes of another; a gradient penalty, as of a discriminator."""
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


def test_the_kernel_runs_where_nobody_differentiates_the_backward_pass():
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
def test_a_part_of_the_outputs_may_be_used(used):
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


def test_compiled_the_kernel_of_the_backward_pass_is_in_the_graph():
    """As Triton's are, which are operators for the compiler; here by operations in their place."""

    def forward(query, sources, eps, is_sum):
        return *depth_attention_in_operations(query, sources, eps, is_sum), (query,)

    def backward(request):
        return request.query * 7, [request.grad * 5 for _ in request.sources]  # wrong, so that it shows

    read = differentiable(forward, backward)
    query, source = torch.randn(8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    torch.compiler.reset()
    compiled = torch.compile(lambda q, s: read(q, [s, s.sin()], 1e-6, True)[0], fullgraph=True, backend="aot_eager")
    compiled(query, source).sum().backward()
    torch.testing.assert_close(query.grad, query.detach() * 7)
