"""With `fuse_later_grads`, the backward kernel of a read adds the gradients of later reads."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from .triton_cases import DTYPES, KERNELS, in_float64, loss, make, reference, run

pytestmark = KERNELS


def fusing(query: Tensor, sources: list[Tensor]) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    return run(query, sources, False, fuse_later_grads=True)


def through_reference(query: Tensor, sources: list[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
    return *reference(query, sources, False), sources


def chain(attend: Callable, queries: list[Tensor], sources: list[Tensor]) -> Tensor:
    """Return a loss over several reads. Each result is a source of the next read, and one returned source is used."""
    total = 0
    for query in queries:
        result, weights, sources = attend(query, sources)
        total = total + loss(result, weights)
        sources = [*sources, 2 * result]
    return total + loss(sources[-2], weights)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "n, reads, shape, width", [(1, 1, (3,), 1), (1, 9, (2, 3), 7), (2, 2, (37,), 65), (17, 3, (3,), 24)]
)
def test_the_returned_sources_bring_the_gradients_of_later_reads(n, reads, shape, width, dtype):
    queries = [make(1, shape, width, seed=i)[0] for i in range(reads)]
    _, sources = make(n, shape, width, dtype)
    sources[-1].requires_grad_(n == 1)  # the last of several needs no gradient
    leaves = [leaf for leaf in (*queries, *sources) if leaf.requires_grad]
    actual = torch.autograd.grad(chain(fusing, queries, sources), leaves)
    assert [grad.dtype for grad in actual] == [leaf.dtype for leaf in leaves]
    exact = in_float64(*queries, *sources)
    value = chain(through_reference, exact[:reads], exact[reads:])
    expected = torch.autograd.grad(value, exact[: len(leaves)])
    for grad, right in zip(actual, expected, strict=True):
        slack = 1e-4 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(grad.double(), right, rtol=0, atol=slack * max(1, right.abs().max().item()))


def test_gradients_of_later_reads_are_added_before_rounding():
    query, sources = make(3, (37,), 64, torch.float16)

    def grads(attend: Callable, query: Tensor, sources: list[Tensor]) -> tuple[Tensor, ...]:
        result, weights, later = attend(query, sources)
        return torch.autograd.grad(loss(result, weights) + loss(later[1], weights[0]), sources[1])

    (actual,) = grads(fusing, query, sources)
    exact_query, *exact = in_float64(query, *sources)
    (expected,) = grads(through_reference, exact_query, exact)
    assert (actual == expected.half()).double().mean() > 0.99


def test_the_returned_sources_share_their_memory_and_requires_grad_with_the_given_ones():
    query, (frozen, a, b) = make(3, (4, 6), 8)
    sources = [frozen.detach(), a, b.transpose(0, 1).contiguous().transpose(0, 1)]
    result, _, later = fusing(query, sources)
    assert [source.requires_grad for source in later] == [False, True, True]
    assert [source.grad_fn for source in later[1:]] == [result.grad_fn] * 2
    assert [source.data_ptr() for source in later] == [source.data_ptr() for source in sources]
    assert [source.stride() for source in later] == [source.stride() for source in sources]
    several = [frozen, a.half()]
    assert all(ours is given for ours, given in zip(fusing(query, several)[2], several, strict=True))
    with torch.no_grad():
        assert all(ours is given for ours, given in zip(fusing(query, sources)[2], sources, strict=True))
