"""Tests that every peer computes the function of ours, except `inkling2`, which computes another."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers.models.inkling2.modeling_inkling2 import Inkling2BlockAttentionResidual

from attnres import depth_attention_reference
from attnres.attn_res_attnres import AttnRes
from benchmarks import ops, peers
from benchmarks.shapes import (
    EAGER,
    PSEUDOCODE,
    STANDARD,
    connect,
    copy_with_shared_weights,
    shapes,
    token_ids,
    variants,
)
from benchmarks.timing import Setting

EXACT = {name: peer for name, peer in peers.PEERS.items() if name != "inkling2"}


@pytest.fixture(params=[1, 2, 5])
def inputs(request) -> ops.Inputs:
    return ops.Inputs(request.param, 16, 12, torch.float32, "cpu")


def with_gradients(inputs: ops.Inputs, function: peers.Peer) -> list[Tensor]:
    result = inputs.call(function)
    return [result, *torch.autograd.grad(result, [inputs.query, inputs.key_norm_weight, *inputs.sources], inputs.grad)]


@pytest.mark.parametrize("name", EXACT)
def test_a_peer_computes_the_readable_form_and_its_gradients(inputs, name):
    found, expected = (with_gradients(inputs, function) for function in (EXACT[name], depth_attention_reference))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", peers.PEERS)
def test_a_peer_returns_the_dtype_of_the_sources(name):
    inputs = ops.Inputs(3, 16, 12, torch.bfloat16, "cpu")
    result = inputs.call(peers.PEERS[name])
    assert result.dtype == torch.bfloat16
    assert result.shape == inputs.sources[0].shape


@pytest.mark.slow
def test_the_compiled_form_computes_the_readable_one_for_one_shape_after_another():
    for n in (2, 3):
        inputs = ops.Inputs(n, 16, 12, torch.float32, "cpu")
        found = with_gradients(inputs, peers.compiled_reference())
        torch.testing.assert_close(found, with_gradients(inputs, depth_attention_reference), rtol=1e-4, atol=1e-5)


def test_inkling2_computes_what_the_module_of_transformers_does_and_not_the_readable_form(inputs):
    # transformers 5.24 takes the attention that the configuration names.
    module = Inkling2BlockAttentionResidual(SimpleNamespace(hidden_size=16, _attn_implementation="sdpa"))
    module.query.data.copy_(inputs.query)
    *finished, partial = (source[None] for source in inputs.sources)
    finished = torch.stack(finished, -2) if finished else partial.new_empty(1, 12, 0, 16)
    (expected,) = module(finished, partial)
    found = peers.inkling2(inputs.query, inputs.sources, None, module.norm.eps)
    torch.testing.assert_close(found, expected[0])
    assert (found - inputs.call(depth_attention_reference)).abs().max() > 0.1


def test_the_bound_moves_what_must_be_moved():
    n, width, tokens = 5, 16, 12
    inputs = ops.Inputs(n, width, tokens, torch.float32, "cpu")
    assert inputs.copy_from.all()
    inputs.copy_to.zero_()
    inputs.copy("forward")
    assert 2 * inputs.copy_to.sum() == (n + 1) * tokens * width  # copied values are read once and written once
    inputs.copy("backward")
    assert 2 * inputs.copy_to.sum() == (2 * n + 1) * tokens * width


@pytest.mark.parametrize("name", ["Llama", "Kimi Linear"])
def test_all_variants_of_a_model_share_its_weights_and_compute_nearly_its_function(name):
    shape = shapes(quick=True)[name]
    models = variants(shape, torch.float32, "cpu")
    ids = token_ids(shape.config, 16, 1, "cpu")
    with torch.no_grad():
        logits = {variant: model(ids).logits for variant, model in models.items()}
    assert logits.keys() == {STANDARD, PSEUDOCODE, *shape.connections, *(EAGER + name for name in shape.connections)}
    for variant, model in models.items():
        assert model.get_input_embeddings().weight is models[STANDARD].get_input_embeddings().weight
        torch.testing.assert_close(logits[variant], logits[STANDARD], rtol=0, atol=0.05)
    torch.testing.assert_close(logits[PSEUDOCODE], logits["Block S=4"], rtol=0, atol=1e-4)
    assert not torch.equal(logits["Block S=4"], logits[STANDARD])  # the queries are not zero


def test_the_second_copy_of_the_standard_model_shares_its_weights_and_nothing_else():
    standard = variants(shapes(quick=True)["Llama"], torch.float32, "cpu")[STANDARD]
    again = copy_with_shared_weights(standard)
    parameters, shared = dict(again.named_parameters()), dict(standard.named_parameters())
    assert parameters.keys() == shared.keys() and all(parameters[name] is shared[name] for name in shared)
    assert not {*again.modules()} & {*standard.modules()}
    assert again.lm_head.weight is again.get_input_embeddings().weight


def test_the_pseudocode_takes_the_place_of_every_connection_of_ours():
    models = variants(shapes(quick=True)["Llama"], torch.float32, "cpu")
    counts = [sum(isinstance(m, AttnRes) for m in models[name].modules()) for name in ("Block S=4", PSEUDOCODE)]
    assert counts == [2 * 2 + 1, 0]


def test_a_model_gets_the_requested_connection():
    standard = variants(shapes(quick=True)["Llama"], torch.float32, "cpu")[STANDARD]
    assert connect(standard, block_size=2).config.attn_res_block_size == 2
    assert connect(standard, full=True).config.attn_res_block_size == 1


def test_on_a_gpu_the_kernels_of_libraries_are_peers_too(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = peers.gpu_peers()
    assert {"fla fused", "liger", "flash attn res"} <= found.keys()
    assert not [name for name in found if name.startswith("_")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_no_kernels_of_libraries_are_peers():
    assert peers.gpu_peers() == {}


def test_a_peer_that_cannot_run_is_named_and_the_others_are_measured(monkeypatch):
    def broken(*arguments):
        raise RuntimeError("no compiler\nin sight")

    monkeypatch.setattr(ops, "compiled_reference", lambda: broken)
    row = next(ops.measure(Setting(repeats=2, quick=True, threads=1)))
    assert row["missing"] == {"torch.compile": "no compiler"}
    assert list(row["ratios"]) == ["ours / bound", *(f"{name} / ours" for name in ("ours eager", *peers.PEERS))]
    (table, *_) = ops.tables([row]).values()
    assert "torch.compile did not run: no compiler" in table
