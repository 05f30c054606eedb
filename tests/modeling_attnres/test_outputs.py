"""Recorded outputs: the input of each layer, its depth weights, and that they belong together."""

from dataclasses import dataclass, field

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor

from attnres import AttnResForCausalLM, AttnResModel
from attnres.residual_attnres import residual_tensors

from ..caches import CACHE

release = Version(transformers.__version__)
LAYERS = 4
VARIANTS = {
    "full": {"attn_res_block_size": 1},
    "S=3, sum": {"attn_res_block_size": 3, "attn_res_scale": "sum"},
    "standard": {"residual_connection": "standard"},
}
RECORD = {"output_hidden_states": True, "output_depth_attentions": True}


@pytest.fixture(params=VARIANTS)
def model(request, vivid_model) -> AttnResForCausalLM:
    return vivid_model(**VARIANTS[request.param])


@pytest.fixture
def full(vivid_model) -> AttnResForCausalLM:
    return vivid_model(**VARIANTS["full"])


@dataclass
class Trace:
    """Outputs `v_0, v_1, ...` and inputs `h_1, h_2, ...` of the sublayers in one forward pass, recorded by hooks."""

    outputs: list[Tensor] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, model: AttnResModel) -> "Trace":
        trace = cls()
        model.embed_tokens.register_forward_hook(lambda module, args, output: trace.outputs.append(output))
        for layer in model.layers:
            for sublayer in (layer.self_attn, layer.mlp):
                sublayer.register_forward_hook(
                    lambda module, args, output: trace.outputs.append(
                        output[0] if isinstance(output, tuple) else output
                    )
                )
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.register_forward_pre_hook(lambda module, args: trace.inputs.append(args[0]))
        model.norm.register_forward_pre_hook(lambda module, args: trace.inputs.append(args[0]))
        return trace

    def sources(self, aggregation: int, block_size: int) -> list[Tensor]:
        """Return the sources of each read: the embedding, and the outputs before the read summed in blocks."""
        before = self.outputs[1 : aggregation + 1]
        runs = [before[start : start + block_size] for start in range(0, len(before), block_size)]
        return [self.outputs[0], *(torch.stack(run).sum(0) for run in runs)]


@torch.no_grad()
def test_depth_weights_reproduce_the_input_of_every_sublayer(model, token_ids):
    trace = Trace.of(model.model)
    outputs = model(token_ids, **RECORD)
    if model.config.residual_connection == "standard":
        assert outputs.depth_attentions == ()
        return
    assert len(outputs.depth_attentions) == len(trace.inputs) == 2 * LAYERS + 1
    for i, (weights, read) in enumerate(zip(outputs.depth_attentions, trace.inputs)):
        sources = trace.sources(i, model.config.attn_res_block_size)
        assert weights.shape == (len(sources), *token_ids.shape)
        assert weights.dtype == torch.float32
        torch.testing.assert_close(weights.sum(0), torch.ones(token_ids.shape))
        aggregate = torch.einsum("nbt,nbtd->btd", weights, torch.stack(sources))
        if model.config.attn_res_scale == "sum":
            aggregate = aggregate * len(sources)
        torch.testing.assert_close(aggregate, read, rtol=1e-4, atol=1e-4)


def test_depth_weights_differ_between_tokens_and_between_sublayers(full, token_ids):
    *_, before_last, last = full(token_ids, output_depth_attentions=True).depth_attentions
    assert last.std(dim=(1, 2)).min() > 1e-3
    assert (last[:-1] - before_last).abs().max() > 1e-2


@torch.no_grad()
def test_hidden_states_are_the_inputs_of_the_layers_and_the_normed_output(model, token_ids):
    trace = Trace.of(model.model)
    hidden_states = model(token_ids, output_hidden_states=True).hidden_states
    assert len(hidden_states) == LAYERS + 1
    assert all(torch.equal(hidden, trace.inputs[2 * i]) for i, hidden in enumerate(hidden_states[:-1]))
    assert torch.equal(hidden_states[0], trace.outputs[0])
    assert torch.equal(hidden_states[-1], model.model.norm(trace.inputs[-1]))
    assert torch.equal(model.lm_head(hidden_states[-1]), model(token_ids).logits)


@pytest.mark.skipif(release < Version("5.20"), reason="this transformers records all hidden states or none")
@torch.no_grad()
@pytest.mark.parametrize(
    ("selection", "selected"),
    [([0], {0}), (2, {2}), (-1, {4}), (-2, {3}), ([0, -1], {0, 4}), ([1, 3], {1, 3}), ([9], set())],
)
def test_hidden_states_can_be_selected(full, token_ids, selection, selected):
    everything = full(token_ids, output_hidden_states=True).hidden_states
    some = full(token_ids, output_hidden_states=selection).hidden_states
    assert {i for i, hidden in enumerate(some) if hidden is not None} == selected
    assert all(torch.equal(some[i], everything[i]) for i in selected)


def test_nothing_is_recorded_by_default(full, token_ids):
    outputs = full(token_ids)
    for name in ("hidden_states", "depth_attentions", "attentions", "router_logits"):
        assert getattr(outputs, name, None) is None
    assert "depth_attentions" not in full.model(token_ids)


@torch.no_grad()
def test_the_configuration_can_turn_on_depth_weights(full, tiny_config, token_ids):
    expected = full(token_ids, output_depth_attentions=True).depth_attentions
    full.config.output_depth_attentions = True
    for actual in (full(token_ids).depth_attentions, full.model(token_ids).depth_attentions):
        assert len(actual) == len(expected)
        assert all(map(torch.equal, actual, expected))
    assert full(token_ids, output_depth_attentions=False).depth_attentions is None
    assert AttnResModel(tiny_config(output_depth_attentions=True))(token_ids).depth_attentions is not None


@torch.no_grad()
def test_the_bare_model_records_the_same(model, token_ids):
    expected = model(token_ids, **RECORD, output_router_logits=True)
    actual = model.model(token_ids, **RECORD, output_router_logits=True)
    assert torch.equal(actual.last_hidden_state, expected.hidden_states[-1])
    # Older releases record router logits, but the head of Kimi Linear leaves them out of its output.
    names = ("hidden_states", "depth_attentions", "router_logits")[: 2 if release < Version("5.19") else 3]
    for name in names:
        assert len(actual[name]) == len(expected[name])
        assert all(map(torch.equal, actual[name], expected[name]))


@torch.no_grad()
def test_a_tuple_holds_the_same_in_the_same_order(full, token_ids):
    expected = full(token_ids, **RECORD)
    actual = full(token_ids, **RECORD, return_dict=False)
    assert isinstance(actual, tuple)
    assert torch.equal(actual[0], expected.logits)
    assert list(expected) == ["logits", CACHE, "hidden_states", "depth_attentions"]
    for recorded, name in ((actual[2], "hidden_states"), (actual[3], "depth_attentions")):
        assert all(map(torch.equal, recorded, expected[name]))
    last_hidden_state, *_ = full.model(token_ids, **RECORD, return_dict=False)
    assert torch.equal(last_hidden_state, expected.hidden_states[-1])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_records_the_same_once(model, token_ids, use_reentrant):
    model.train()
    expected = model(token_ids, labels=token_ids, use_cache=False, **RECORD)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    actual = model(token_ids, labels=token_ids, use_cache=False, **RECORD)
    actual.loss.backward()
    for name in ("hidden_states", "depth_attentions"):
        assert len(actual[name]) == len(expected[name])
        assert all(map(torch.equal, actual[name], expected[name]))


@torch.no_grad()
def test_a_cached_step_records_the_weights_of_its_tokens(model, token_ids):
    expected = model(token_ids, **RECORD)
    prompt = model(token_ids[:, :-2], use_cache=True)
    actual = model(token_ids[:, -2:], **{CACHE: prompt[CACHE]}, **RECORD)
    for whole, step in zip(expected.depth_attentions, actual.depth_attentions, strict=True):
        torch.testing.assert_close(step, whole[..., -2:], rtol=0, atol=1e-4)
    for whole, step in zip(expected.hidden_states, actual.hidden_states, strict=True):
        torch.testing.assert_close(step, whole[:, -2:], rtol=0, atol=1e-4)


def test_a_loss_on_depth_weights_reaches_every_query_but_the_first(full, token_ids):
    depth_attentions = full(token_ids, output_depth_attentions=True).depth_attentions
    sum(weights.square().sum() for weights in depth_attentions).backward()
    for name, tensor in residual_tensors(full).items():
        assert (tensor.grad.abs().max() > 0) == ("layers.0.self_attention_res" not in name)


@pytest.mark.skipif(release < Version("5.19"), reason="Kimi Linear of this transformers returns no router logits")
@torch.no_grad()
def test_router_logits_come_from_the_sparse_layers(full, token_ids):
    trace = Trace.of(full.model)
    outputs = full(token_ids, output_router_logits=True)
    assert len(outputs.router_logits) == 3  # of 4 layers, the first has a dense MLP
    for i, router_logits in enumerate(outputs.router_logits, start=1):
        layer = full.model.layers[i]
        expected = layer.post_attention_layernorm(trace.inputs[2 * i + 1]) @ layer.mlp.gate.weight.T
        torch.testing.assert_close(router_logits, expected.flatten(0, 1), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_attentions_come_from_the_full_attention_layers(vivid_model, token_ids):
    model = vivid_model(attn_res_block_size=1, attn_implementation="eager")
    attentions = model(token_ids, output_attentions=True).attentions
    assert len(attentions) == 2
    for attention in attentions:
        assert attention.shape == (2, 4, 11, 11)
        torch.testing.assert_close(attention.sum(-1), torch.ones(2, 4, 11))
        assert attention.triu(1).abs().max() == 0
        assert attention.std() > 0.01
