"""mHC-lite: averages of permutation matrices."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnres.mhc_lite_attnres import MHCLite

# No deadline, because machines differ; derandomised, so that all machines run the same examples.
EXAMPLES = settings(deadline=None, derandomize=True, max_examples=60)


def made(backbones, streams: int) -> MHCLite:
    fields = {"residual_connection": "mhc_lite", "residual_streams": streams, "hidden_size": 8}
    return MHCLite(backbones.member_config("llama", **fields), 1)


@torch.no_grad()
@EXAMPLES
@given(n=st.integers(2, 5), size=st.floats(0, 300), seed=st.integers(0, 99))
def test_rows_and_columns_sum_to_one(backbones, n, size, seed):
    of = made(backbones, n)
    logits = size * torch.randn(3, 7, of.mixing_rows(n), generator=torch.Generator().manual_seed(seed))
    h = of.mixing(logits) + torch.eye(n)
    assert (h > -1e-6).all()
    torch.testing.assert_close(h.sum(-2), torch.ones(3, 7, n), rtol=0, atol=1e-6)
    torch.testing.assert_close(h.sum(-1), torch.ones(3, 7, n), rtol=0, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("streams", [2, 3, 4, 5])
def test_each_logit_weights_one_permutation_and_the_first_is_the_identity(backbones, streams):
    of = made(backbones, streams)
    rows = of.mixing_rows(streams)
    matrices = of.mixing(1e3 * torch.eye(rows)) + torch.eye(streams)
    assert ((matrices == 0) | (matrices == 1)).all()
    assert len({tuple(matrix.flatten().tolist()) for matrix in matrices}) == rows
    assert torch.equal(matrices[0], torch.eye(streams))


@torch.no_grad()
@pytest.mark.parametrize("streams", [2, 3, 4, 5])
def test_at_the_start_each_stream_keeps_most_of_itself(backbones, streams):
    of = made(backbones, streams)
    kept = 1 + of.mixing(torch.zeros(of.mixing_rows(streams))).diagonal()
    assert ((kept > 0.96) & (kept < 1)).all()


@pytest.mark.parametrize("streams", [6, 100])
def test_more_streams_than_five_are_refused_in_one_line(backbones, streams):
    with pytest.raises(ValueError) as error:
        made(backbones, streams)
    assert f"`residual_streams` is {streams}, but must be from 2 to 5: each of the n! permutations" in str(error.value)
    assert "\n" not in str(error.value)
