"""A read passes its sources on: the gradients of those who read them later are added as it writes its own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnres import AttnResForCausalLM, depth_attention_reference
from attnres.functional_attnres import attend

pytestmark = pytest.mark.usefixtures("cpu_kernels")


def chain(queries: list[Tensor], sources: list[Tensor], dtype: torch.dtype | None) -> Tensor:
    """Each read's result is a source of the next; one source is used beside. In `dtype` the reference, or ours."""
    total = 0
    for query in queries:
        if dtype is None:
            result, _, sources = attend(query, sources, None, 1e-6, False, passes_on=True)
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
def test_gradients_are_those_of_the_reference(n, reads, tokens, width, frozen, seed):
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


def test_what_needs_no_gradient_is_passed_on_as_such():
    frozen, trained = torch.randn(3, 8), torch.randn(3, 8, requires_grad=True)
    _, _, sources = attend(torch.randn(8, requires_grad=True), [frozen, trained], None, 1e-6, False, passes_on=True)
    assert [source.requires_grad for source in sources] == [False, True]
    assert [source.data_ptr() for source in sources] == [frozen.data_ptr(), trained.data_ptr()]


def test_a_bfloat16_gradient_is_rounded_once_for_each_read_and_not_twice():
    """Of two reads, a gradient is the sum of both: ours plus that of the later read, rounded together."""
    torch.manual_seed(0)
    sources = [torch.randn(64, 32).bfloat16().requires_grad_() for _ in range(2)]
    query = torch.randn(32)
    result, _, later = attend(query, sources, None, 1e-6, False, passes_on=True)
    direction = torch.randn(64, 32).bfloat16()
    ours = torch.autograd.grad((result * direction).sum() + (later[0] * direction).sum(), sources[0])[0]
    exact = [source.detach().double().requires_grad_() for source in sources]
    result = depth_attention_reference(query.double(), exact, None, 1e-6)
    loss = (result * direction.double()).sum() + (exact[0] * direction.double()).sum()
    expected = torch.autograd.grad(loss, exact[0])[0]
    assert (ours == expected.bfloat16()).float().mean() > 0.99


@pytest.mark.parametrize("reentrant", [False, True])
def test_with_checkpointing_the_gradients_are_the_same(vivid_model, reentrant):
    model: AttnResForCausalLM = vivid_model(attn_res_block_size=3).train()
    tokens = torch.arange(3, 43).view(2, -1)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    expected = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    for ours, right in zip(gradients(), expected, strict=True):
        assert torch.equal(ours, right)
