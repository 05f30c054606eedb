"""mHC: Sinkhorn's matrices, and a step against those of DeepSeek V4 and GLM 5 in `transformers`."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextHyperConnection

from attnres.mhc_attnres import MHC, sinkhorn

# No deadline, because machines differ; derandomised, so that all machines run the same examples.
EXAMPLES = settings(deadline=None, derandomize=True, max_examples=60)


def drawn(n: int, size: float, seed: int) -> torch.Tensor:
    return size * torch.randn(3, 7, n, n, generator=torch.Generator().manual_seed(seed))


@EXAMPLES
@given(n=st.integers(2, 6), size=st.floats(0, 1.5), seed=st.integers(0, 99))
def test_rows_and_columns_sum_to_one(n, size, seed):
    h = sinkhorn(drawn(n, size, seed), 200)
    assert (h > 0).all()
    torch.testing.assert_close(h.sum(-2), torch.ones(3, 7, n), rtol=0, atol=1e-6)
    torch.testing.assert_close(h.sum(-1), torch.ones(3, 7, n), rtol=0, atol=1e-3)


@EXAMPLES
@given(n=st.integers(2, 6), size=st.floats(0, 300), seed=st.integers(0, 99), iterations=st.integers(1, 200))
def test_columns_sum_to_one_for_any_number_of_iterations_and_any_logits(n, size, seed, iterations):
    logits = drawn(n, size, seed).requires_grad_()
    h = sinkhorn(logits, iterations)
    torch.testing.assert_close(h.sum(-2), torch.ones(3, 7, n), rtol=0, atol=1e-6)
    h.square().sum().backward()
    assert h.isfinite().all() and (h >= 0).all() and logits.grad.isfinite().all()


@EXAMPLES
@given(n=st.integers(2, 5), seed=st.integers(0, 99), iterations=st.integers(1, 25))
def test_rows_and_columns_are_divided_by_their_sums_in_turn(n, seed, iterations):
    logits = drawn(n, 3.0, seed).double()
    expected = logits.exp()
    for _ in range(iterations):
        expected = expected / expected.sum(-1, keepdim=True)
        expected = expected / expected.sum(-2, keepdim=True)
    torch.testing.assert_close(sinkhorn(logits, iterations), expected)
    shifted = logits + 1e3 * torch.randn(7, n, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    torch.testing.assert_close(sinkhorn(shifted, iterations), expected)  # a constant added to a row changes nothing


@pytest.mark.parametrize("beside", [0.0, -8.0, -30.0, -80.0])
def test_every_logit_gets_a_gradient(beside):
    """If all entries off the diagonal were rounded to zero, the mixing would never learn."""
    logits = (beside * (1 - torch.eye(4))).requires_grad_()
    towards = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    (sinkhorn(logits, 20) * towards).sum().backward()
    assert (logits.grad != 0).all() and logits.grad.isfinite().all()
    exact = logits.detach().double().requires_grad_()
    (sinkhorn(exact, 20) * towards).sum().backward()
    off = ~torch.eye(4, dtype=torch.bool)
    torch.testing.assert_close(logits.grad[off].double(), exact.grad[off], rtol=1e-3, atol=0)


def test_the_mixing_of_a_new_model_gets_a_gradient(backbones):
    of = MHC(backbones.member_config("llama", residual_connection="mhc"), 1)
    generator = torch.Generator().manual_seed(0)
    x, towards = (torch.randn(2, 5, 4, 32, generator=generator) for _ in range(2))
    _, _, (streams, _) = of((x,))
    (streams * towards).sum().backward()
    assert (of.bias.grad[8:] != 0).all() and of.scale.grad[2] != 0
    assert (streams - x).norm() < 0.003 * x.norm(), "streams last"


@torch.no_grad()
@pytest.mark.parametrize("implementation", [DeepseekV4HyperConnection, Glm5NextTextHyperConnection])
@pytest.mark.parametrize("streams", [2, 4])
def test_a_step_equals_that_of_another_implementation(backbones, streams, implementation):
    fields = {"residual_connection": "mhc", "residual_streams": streams, "hidden_size": 8, "rms_norm_eps": 0.1}
    ours = MHC(backbones.member_config("llama", mhc_sinkhorn_iterations=6, **fields), 1)
    fields = {"hidden_size": 8, "hc_mult": streams, "hc_eps": 0.0, "hc_sinkhorn_iters": 6, "rms_norm_eps": 0.1}
    theirs = implementation(SimpleNamespace(**fields))
    generator = torch.Generator().manual_seed(0)
    for tensor in ours.parameters():
        tensor.normal_(generator=generator)
    theirs.fn.copy_(ours.weight)
    theirs.scale.copy_(ours.scale)
    start = [-math.log(streams - 1)] * streams + [0.0] * streams
    theirs.base.copy_(ours.bias + torch.cat([torch.tensor(start), -8 * (1 - torch.eye(streams)).flatten()]))
    x, output = torch.randn(2, 5, streams, 8, generator=generator), torch.randn(2, 5, 8, generator=generator)
    inputs, _, state = ours((x,))
    post, comb, expected = theirs(x)
    torch.testing.assert_close(inputs, expected)
    # This is the write in the decoder layers of both models.
    expected = post.unsqueeze(-1) * output.unsqueeze(-2) + torch.matmul(comb.transpose(-1, -2), x)
    torch.testing.assert_close(ours.write(state, output)[0], expected)


@pytest.mark.parametrize("value", [0, -1, 2.5, "20", True, None])
def test_a_wrong_number_of_iterations_is_refused_in_one_line(backbones, value):
    with pytest.raises(ValueError) as error:
        backbones.member_config("llama", residual_connection="mhc", mhc_sinkhorn_iterations=value)
    assert f"`mhc_sinkhorn_iterations` is {value!r}, but must be an integer from 1 to 1000." in str(error.value)
    assert "\n" not in str(error.value)
