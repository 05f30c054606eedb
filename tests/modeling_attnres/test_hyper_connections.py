"""Hyper-Connections: their start and the static form. `test_streams.py` tests the equation."""

import pytest
import torch

from attnres.family import describe_connection
from attnres.hyper_connections_attnres import HyperConnections
from attnres.residual_attnres import residual_tensors

from .connections import build, build_start


@pytest.mark.parametrize("streams", [2, 3, 4])
def test_neighbouring_sublayers_start_by_reading_different_streams(backbones, streams):
    config = backbones.member_config("llama", residual_connection="hyper_connections", residual_streams=streams)
    x = torch.randn(2, 5, streams, 32, generator=torch.Generator().manual_seed(0))
    for sublayer in range(config.num_sublayers):
        read, _, (same, post) = HyperConnections(config, sublayer)((x,))
        assert torch.equal(read, x[..., sublayer % streams, :])
        assert torch.equal(same, x) and (post == 1).all()


def test_the_static_form_equals_the_dynamic_form_with_zero_weights(backbones):
    token_ids, fields = backbones.token_ids(), {"hyper_connections_dynamic": False}
    static = build(backbones, "llama", "hyper_connections", **fields)
    assert {name.rpartition(".")[2] for name in residual_tensors(static)} == {"static"}
    dynamic = build_start(backbones, "llama", "hyper_connections")
    dynamic.load_state_dict(static.state_dict(), strict=False)
    with torch.no_grad():
        assert torch.equal(static(token_ids).logits, dynamic(token_ids).logits)
        dynamic.model.layers[1].mlp_res_proj.weight += 0.1
        assert not torch.equal(static(token_ids).logits, dynamic(token_ids).logits)


@pytest.mark.parametrize(("is_dynamic", "words"), [(True, "Hyper-Connections"), (False, "static Hyper-Connections")])
def test_the_description_names_the_form(backbones, is_dynamic, words):
    fields = {"residual_connection": "hyper_connections", "hyper_connections_dynamic": is_dynamic}
    config = backbones.member_config("llama", **fields)
    assert describe_connection(config) == f"{words}, 4 streams"


@pytest.mark.parametrize("value", [1, "yes", None])
def test_a_dynamic_field_that_is_not_boolean_is_refused_in_one_line(backbones, value):
    fields = {"residual_connection": "hyper_connections", "hyper_connections_dynamic": value}
    with pytest.raises(ValueError) as error:
        backbones.member_config("llama", **fields)
    assert f"`hyper_connections_dynamic` is {value!r}, but must be true or false." in str(error.value)
    assert "\n" not in str(error.value)
