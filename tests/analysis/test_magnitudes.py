"""Magnitudes equal those of separately recorded tensors, and gradients equal those of models that are written out."""

import pytest
import torch
from transformers import BatchEncoding

from attnres.analysis import magnitudes, token_mixing
from attnres.conversion import retrofit

from ..modeling_attnres.connections import BACKBONES, build, double
from .lines import Reads, loss_of

CONNECTIONS = ["standard", "attn_res", "denseformer", "mhc", "post_norm"]


def rms(tensors: torch.Tensor) -> torch.Tensor:
    return tensors.double().square().flatten(1).mean(1).sqrt()


@pytest.mark.parametrize("connection", CONNECTIONS)
@pytest.mark.parametrize("case", BACKBONES)
def test_inputs_and_outputs_equal_those_of_the_pass(backbones, case, connection):
    model, ids = build(backbones, case, connection), backbones.token_ids()
    result = magnitudes(model, ids, gradients=False)
    passed = token_mixing(model, ids)
    torch.testing.assert_close(result.inputs, rms(passed.inputs), rtol=1e-5, atol=0)
    torch.testing.assert_close(result.outputs, rms(passed.outputs), rtol=1e-5, atol=0)
    sizes = passed.inputs.abs().flatten(1)
    torch.testing.assert_close(result.largest, sizes.amax(1) / sizes.median(1).values, rtol=1e-4, atol=0)
    assert result.gradients.isnan().all() and result.tokens == 22


@pytest.mark.parametrize("size", [1, 3])
def test_the_stream_of_blocks_is_their_running_sum(backbones, size):
    model, ids = build(backbones, "llama", "attn_res", attn_res_block_size=size), backbones.token_ids()
    outputs = token_mixing(model, ids).outputs
    sums = [outputs[0]]
    for place, output in enumerate(outputs[1:]):
        sums.append(output if place % size == 0 else sums[-1] + output)
    torch.testing.assert_close(magnitudes(model, ids).stream, rms(torch.stack(sums)), rtol=1e-5, atol=0)


def test_without_depth_attention_the_stream_equals_the_inputs(backbones):
    result = magnitudes(build(backbones, "llama", "standard"), backbones.token_ids())
    assert torch.equal(result.stream, result.inputs)


GATED = [
    {"attn_res_block_size": 1},
    {"attn_res_block_size": 3},
    {"attn_res_block_size": 3, "attn_res_blocks": "rms", "attn_res_query": "input_dependent"},
    {"attn_res_block_size": 1, "attn_res_query": "none", "attn_res_window": 2},
    {"attn_res_block_size": 2, "attn_res_heads": 2, "attn_res_activation": "sigmoid", "attn_res_scale": "sum"},
]


@pytest.mark.parametrize("fields", GATED, ids=[" ".join(map(str, fields.values())) for fields in GATED])
def test_depth_attention_that_is_added_to_a_stream_leaves_the_stream_the_sum_of_all_outputs(backbones, fields):
    model, ids = build(backbones, "llama", "attn_res", attn_res_gated=True, **fields), backbones.token_ids()
    result, outputs = magnitudes(model, ids, gradients=False), token_mixing(model, ids).outputs
    torch.testing.assert_close(result.stream, rms(outputs.cumsum(0)), rtol=1e-5, atol=0)
    assert result.has_stream
    assert not magnitudes(build(backbones, "llama", "attn_res"), ids, gradients=False).has_stream


def test_a_gated_retrofit_has_the_stream_of_its_source(backbones):
    source, ids = backbones.build("llama"), backbones.token_ids()
    expected = magnitudes(source, ids, gradients=False)
    result = magnitudes(retrofit(source, attn_res_gated=True, block_size=1), ids, gradients=False)
    torch.testing.assert_close(result.stream, expected.stream, rtol=1e-5, atol=0)
    assert result.has_stream and expected.has_stream


@pytest.mark.parametrize("size", [1, 3])
def test_gradients_equal_those_of_the_written_out_model(backbones, size):
    member = double(build(backbones, "llama", "attn_res", attn_res_block_size=size))
    standard, ids = double(backbones.build("llama")), backbones.token_ids()
    standard.requires_grad_(False)
    standard.get_input_embeddings().requires_grad_(True)  # so that all outputs have gradients
    squares = 0.0
    for sequence in ids.split(1):
        reads = Reads(member)
        logits = backbones.straight_line.__wrapped__(standard, sequence, reads)  # with gradients
        (loss_of(logits, sequence) * 10).backward()
        squares = squares + torch.stack([v.grad for v in reads.outputs]).square()
    expected = (squares / 2).flatten(1).mean(1).sqrt()
    torch.testing.assert_close(magnitudes(member, ids).gradients, expected, rtol=1e-6, atol=0)


def test_frozen_weights_and_earlier_gradients_do_not_matter(backbones):
    model, ids = build(backbones, "llama", "attn_res"), backbones.token_ids()
    expected = magnitudes(model, ids)
    assert all(parameter.grad is None for parameter in model.parameters())
    model(ids, labels=ids).loss.backward()
    kept = [parameter.grad.clone() for parameter in model.parameters()]
    model.train().requires_grad_(False)
    with torch.no_grad():
        result = magnitudes(model, ids)
    assert torch.equal(result.gradients, expected.gradients) and result.gradients.min() > 0
    assert all(torch.equal(parameter.grad, grad) for parameter, grad in zip(model.parameters(), kept))
    assert model.training and all(module.training for module in model.modules())


def test_batches_may_be_streamed_and_masked(backbones):
    model, ids = build(backbones, "kimi_linear", "attn_res"), backbones.token_ids()
    whole, parts = magnitudes(model, ids), magnitudes(model, iter(ids.split(1)))
    for name in ("inputs", "outputs", "stream", "gradients"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=1e-4, atol=0)
    assert (parts.largest / whole.largest).sub(1).abs().max() < 0.2  # a mean of medians
    model = build(backbones, "llama", "attn_res")
    padded = torch.cat([ids, torch.full_like(ids, 5)], dim=1)
    mask = torch.cat([torch.ones_like(ids), torch.zeros_like(ids)], dim=1)
    result = magnitudes(model, BatchEncoding({"input_ids": padded, "attention_mask": mask}))
    for name in ("inputs", "outputs", "stream", "gradients", "largest"):
        torch.testing.assert_close(getattr(result, name), getattr(magnitudes(model, ids), name), rtol=1e-4, atol=0)
    with pytest.raises(ValueError, match="no batch"):
        magnitudes(model, [])
