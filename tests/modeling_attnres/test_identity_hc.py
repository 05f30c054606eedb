"""Identity Hyper-Connections against those of Hy-V4 in `transformers`. `test_streams.py` tests the rest."""

import math

import pytest
import torch
from transformers import HYV4Config
from transformers.models.hy_v4.modeling_hy_v4 import HYV4HyperConnection

from attnres.identity_hc_attnres import IdentityHyperConnections


@torch.no_grad()
@pytest.mark.parametrize("streams", [2, 4])
def test_a_read_equals_that_of_another_implementation(backbones, streams):
    fields = {"residual_connection": "identity_hc", "residual_streams": streams, "hidden_size": 8, "rms_norm_eps": 0.1}
    ours = IdentityHyperConnections(backbones.member_config("llama", **fields), 1)
    theirs = HYV4HyperConnection(HYV4Config(hidden_size=8, hc_mult=streams, hc_eps=0.0, rms_norm_eps=0.1))
    generator = torch.Generator().manual_seed(0)
    for tensor in ours.parameters():
        tensor.normal_(generator=generator)
    theirs.fn.copy_(ours.weight)
    theirs.scale.copy_(ours.scale)
    theirs.base.copy_(ours.bias - torch.tensor([math.log(streams - 1), 0.0]).repeat_interleave(streams))
    x = torch.randn(2, 5, streams, 8, generator=generator)
    inputs, _, (same, post) = ours((x,))
    expected_post, expected = theirs(x)
    assert same is x
    torch.testing.assert_close(inputs, expected)
    torch.testing.assert_close(post, expected_post)
