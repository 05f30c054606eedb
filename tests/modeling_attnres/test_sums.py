"""Recorded sums: of the outputs in the current block before each layer, and of all outputs."""

import pytest
import torch
from torch import Tensor

from attnres import AttnResKimiK3ForCausalLM
from attnres.configuration import load

from .connections import build
from .test_outputs import LAYERS, Trace

SUMS = {"output_prefix_sums": True, "output_running_sums": True}
GATED = {"attn_res_gated": True, "attn_res_window": 1, "attn_res_query": "input_dependent", "attn_res_block_size": 3}
# Connection with its fields -> size of its blocks, or `None` if it has none.
KEPT = {
    "attn_res, S=3": ("attn_res", {"attn_res_block_size": 3, "attn_res_scale": "sum"}, 3),
    "attn_res, S=1": ("attn_res", {"attn_res_block_size": 1}, 1),
    "attn_res, gated": ("attn_res", GATED, 3),
    "attn_res, by head": ("attn_res", {"attn_res_heads": 2, "attn_res_block_size": 2}, 2),
    "standard": ("standard", {}, 100),
    "dca": ("dca", {"dca_window": 1}, None),
}


@pytest.fixture(scope="module")
def model(vivid_model):
    """Return a hybrid of delta attention and latent attention, whose blocks end within layers."""
    return vivid_model(attn_res_block_size=3)


def expected_sums(trace: Trace, size: int | None) -> tuple[list[Tensor], list[Tensor]]:
    """Return the prefix sums and the running sums before each layer and the output, from the sublayers' outputs."""
    outputs, whole, prefix = torch.stack(trace.outputs), [], []
    for written in range(0, len(outputs), 2):  # sublayers before the read
        whole.append(outputs[: written + 1].sum(0))
        if size is not None:
            # The newest output belongs to the block that began at a multiple of `size`.
            begin = (written - 1) // size * size + 1 if written else 0
            prefix.append(whole[-1] if size > len(outputs) else outputs[begin : written + 1].sum(0))
    return prefix, whole


@torch.no_grad()
@pytest.mark.parametrize("kept", KEPT)
def test_sums_are_those_of_the_sublayers_outputs(backbones, kept):
    connection, fields, size = KEPT[kept]
    model, token_ids = build(backbones, "llama", connection, **fields), backbones.token_ids()
    trace = Trace.of(model.model)
    requested = SUMS if size is not None else {"output_running_sums": True}
    outputs = model(token_ids, **requested)
    prefix, whole = expected_sums(trace, size)
    assert len(whole) == len(model.model.layers) + 1 > 2
    torch.testing.assert_close(outputs.running_sums, tuple(whole), rtol=1e-5, atol=1e-5)
    if size is not None:
        torch.testing.assert_close(outputs.prefix_sums, tuple(prefix), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(outputs.logits, model(token_ids).logits, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_prefix_sums_of_kimi_k3_are_those_that_engines_carry_from_layer_to_layer():
    """An engine stores the sum at the first layer of each block, and begins the next sum with that layer's output."""
    torch.manual_seed(0)
    model = AttnResKimiK3ForCausalLM(load("attnres-k3-tiny", num_hidden_layers=6, attn_res_block_size=2)).eval()
    trace, token_ids = Trace.of(model.model), torch.tensor([[5, 6, 7, 8]])
    prefix_sums = model(token_ids, output_prefix_sums=True).prefix_sums
    embedding, *outputs = trace.outputs
    prefix, carried = embedding, [embedding]
    for layer, (attention, mlp) in enumerate(zip(outputs[::2], outputs[1::2], strict=True)):
        if layer % 2 == 0:
            prefix = torch.zeros_like(embedding)
        prefix = prefix + attention + mlp
        carried.append(prefix)
    torch.testing.assert_close(prefix_sums, tuple(carried))


@pytest.mark.parametrize("name", ["prefix_sums", "running_sums"])
@pytest.mark.parametrize(
    ("connection", "fields"),
    [("mhc", {}), ("denseformer", {}), ("scaled", {}), ("attn_res", {"attn_res_blocks": "rms"})],
)
def test_a_connection_without_a_sum_says_so(backbones, connection, fields, name):
    model = build(backbones, "llama", connection, **fields)
    with pytest.raises(ValueError, match=f"`output_{name}`: this residual connection keeps no such sum"):
        model(backbones.token_ids(), **{f"output_{name}": True})


def test_a_window_drops_outputs_from_the_running_sum_alone(backbones):
    model = build(backbones, "llama", "attn_res", attn_res_window=2, attn_res_block_size=1)
    assert model(backbones.token_ids(), output_prefix_sums=True).prefix_sums[-1] is not None
    with pytest.raises(ValueError, match="keeps no such sum"):
        model(backbones.token_ids(), output_running_sums=True)


@torch.no_grad()
def test_sums_are_selected_and_ordered_as_hidden_states_are(model, token_ids):
    every = model(token_ids, output_hidden_states=True, **SUMS)
    assert [*every][-3:] == ["hidden_states", "prefix_sums", "running_sums"]
    some = model.model(token_ids, output_prefix_sums=[1, -1, 9], output_running_sums=2, return_dict=False)
    prefix, running = some[-2:]
    for sums, whole, selected in ((prefix, every.prefix_sums, {1, LAYERS}), (running, every.running_sums, {2})):
        assert len(sums) == len(whole) == LAYERS + 1
        assert {i for i, one in enumerate(sums) if one is not None} == selected
        assert all(torch.equal(sums[i], whole[i]) for i in selected)
    plain = model(token_ids)
    assert plain.prefix_sums is plain.running_sums is None and "prefix_sums" not in plain


@torch.no_grad()
def test_generation_returns_the_sums_of_every_step(model, token_ids):
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
    generated = model.generate(token_ids, **options, **SUMS, output_hidden_states=True, output_depth_attentions=True)
    whole = model(generated.sequences[:, :-1], **SUMS, output_depth_attentions=True)
    assert len(generated.hidden_states) == 3
    for name, dim in (("prefix_sums", 1), ("running_sums", 1), ("depth_attentions", 2)):
        steps = [torch.cat(parts, dim) for parts in zip(*generated[name], strict=True)]
        torch.testing.assert_close(steps, [*whole[name]], rtol=1e-4, atol=1e-4)
    assert "prefix_sums" not in model.generate(token_ids, **options)


def test_assisted_generation_refuses_records(backbones):
    model = build(backbones, "llama", "attn_res")
    options = {"max_new_tokens": 3, "prompt_lookup_num_tokens": 2, "return_dict_in_generate": True}
    with pytest.raises(ValueError, match="assisted generation returns no record"):
        model.generate(backbones.token_ids()[:1], **options, output_prefix_sums=True)
    assert model.generate(backbones.token_ids()[:1], **options).sequences.shape[1] > 3


def test_sums_survive_checkpointing_and_pass_gradients(model, token_ids):
    model.train()
    expected = model(token_ids, use_cache=False, **SUMS)
    expected.running_sums[-1].square().sum().backward()
    assert all(layer.mlp.down_proj.weight.grad.any() for layer in model.model.layers if hasattr(layer.mlp, "down_proj"))
    for use_reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        actual = model(token_ids, labels=token_ids, use_cache=False, **SUMS)
        actual.loss.backward()
        for name in ("prefix_sums", "running_sums"):
            assert len(actual[name]) == LAYERS + 1
            assert all(map(torch.equal, actual[name], expected[name]))
    model.gradient_checkpointing_disable()
    model.eval()


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_model_returns_the_same_sums(backbones):
    model, token_ids = build(backbones, "llama", "attn_res", attn_res_block_size=3), backbones.token_ids()
    expected = model(token_ids, use_cache=False, **SUMS)
    torch.compiler.reset()
    actual = torch.compile(model, fullgraph=True, backend="eager")(token_ids, use_cache=False, **SUMS)
    torch.compiler.reset()
    for name in ("prefix_sums", "running_sums"):
        torch.testing.assert_close(actual[name], expected[name])
