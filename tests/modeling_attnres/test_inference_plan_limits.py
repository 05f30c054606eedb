"""Inference plans read in place of connections only where they compute the same."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from transformers import AutoConfig, AutoModelForCausalLM

from attnres import depth_attention, depth_attention_reference
from attnres.attn_res_attnres import AttnRes
from attnres.residual_attnres import ResidualNorm, residual_tensors


@pytest.fixture
def model():
    """Return a Llama so wide that the CPU kernels run, in blocks of 3, with depth weights far from uniform."""
    pytest.importorskip("numba")
    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 2}
    config = AutoConfig.for_model("attnres_llama", **sizes, intermediate_size=64, attn_res_block_size=3)
    model = AutoModelForCausalLM.from_config(config).eval()
    for tensor in residual_tensors(model).values():
        torch.nn.init.normal_(tensor, mean=1.0 if tensor.ndim == 1 else 0.0, std=0.3)
    return model


def assert_same_with_and_without_gradients(model) -> None:
    ids = torch.arange(3, 33)[None]
    expected = model(ids).logits
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


class Doubled(AttnRes):
    def forward(self, state, norm_weight):
        inputs, weights, state = super().forward(state, norm_weight)
        return 2 * inputs + 1, weights, state


class Shifted(ResidualNorm):
    def forward(self):
        return self.weight + 3


@pytest.mark.parametrize(("parent", "derived"), [(AttnRes, Doubled), (ResidualNorm, Shifted)])
def test_a_derived_connection_is_called(model, parent, derived):
    for module in model.modules():
        if type(module) is parent:
            module.__class__ = derived
    assert_same_with_and_without_gradients(model)


def test_a_layer_that_was_appended_is_read_by_its_own_query(model):
    model.model.layers.append(copy.deepcopy(model.model.layers[-1]))
    model.config.num_hidden_layers = 5
    model.model.layers[4].self_attn.layer_idx = 4
    assert_same_with_and_without_gradients(model)


def test_connections_may_differ_in_their_epsilon(model):
    model.model.layers[2].mlp_res_proj.eps = 0.5
    assert_same_with_and_without_gradients(model)


class Half(nn.Module):
    def forward(self, weight):
        return weight / 2


@pytest.mark.parametrize("name", ["self_attention_res_proj", "self_attention_res_norm"])
def test_a_parametrized_tensor_is_computed_for_each_read(model, name):
    parametrize.register_parametrization(getattr(model.model.layers[0], name), "weight", Half())
    assert_same_with_and_without_gradients(model)


def test_a_norm_whose_weight_broadcasts_runs_as_a_module(model):
    for layer in model.model.layers:
        layer.input_layernorm.weight = nn.Parameter(torch.ones(1) * 1.2)
    assert_same_with_and_without_gradients(model)


@pytest.mark.parametrize("tokens", [2, 200])
def test_forward_mode_derivatives_equal_those_of_the_reference(tokens):
    query, direction, *sources = torch.randn(5, tokens, 256, dtype=torch.float64).float()
    found = []
    for attend in (depth_attention, depth_attention_reference):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(query[0], direction[0])
            found.append(forward_ad.unpack_dual(attend(dual, sources)).tangent)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
