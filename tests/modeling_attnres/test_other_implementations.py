"""Reads and writes against the classes of `transformers` that compute the same, with the same weights.

`test_mhc.py` and `test_identity_hc.py` compare mHC and Identity HC.
"""

import math
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from attnres.residual_attnres import ResidualConnection

from .connections import difference

HIDDEN, EPS = 16, 0.1  # an epsilon large enough to matter
SUBLAYER = 3  # of ten


def theirs(family: str, name: str):
    """Return a class or function of a model in `transformers`; skip the test if the release lacks it."""
    try:
        return getattr(import_module(f"transformers.models.{family}.modeling_{family}"), name)
    except (ImportError, AttributeError):
        pytest.skip(f"this release of transformers has no {name} in {family}")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ours(backbones, name: str, **fields) -> ResidualConnection:
    """Return a connection whose tensors are drawn at random."""
    fields = {"residual_connection": name, "hidden_size": HIDDEN, "rms_norm_eps": EPS} | fields
    config = backbones.member_config("llama", **fields)
    connection = config.connection(config, SUBLAYER)
    with torch.no_grad():
        for seed, tensor in enumerate(connection.parameters()):
            tensor.copy_(0.5 * drawn(*tensor.shape, seed=seed))
    return connection


def written(connection: ResidualConnection) -> tuple[Tensor, Tensor, Tensor]:
    """Return a stream, an output, and the stream after the output is written to it."""
    stream, output = drawn(2, 5, HIDDEN, seed=100), drawn(2, 5, HIDDEN, seed=101)
    _, _, state = connection(stream)
    return stream, output, connection.write(state, output)


@torch.no_grad()
@pytest.mark.parametrize("streams", [2, 4])
def test_gated_residual_is_that_of_qwen(backbones, streams):
    connection = ours(backbones, "gated_residual", residual_streams=streams, gated_residual_rank=6)
    fields = {"hc_count": streams, "hidden_size": HIDDEN, "hc_lowrank": 6, "rms_norm_eps": EPS}
    expected = theirs("qwen4_exp", "Qwen4ExpTextGatedResidual")(SimpleNamespace(**fields))
    norm = LlamaRMSNorm(HIDDEN, EPS)
    norm.weight.copy_(1 + 0.5 * drawn(HIDDEN))
    # Theirs has one gain for each stream and channel, which is the product of the norm's weight and ours.
    expected.hc_norm.weight.copy_((connection.factors(torch.float64) * norm.weight).flatten() - 1)
    expected.input_mix_weight_down.weight.copy_(connection.down)
    expected.input_mix_weight_up.weight.copy_(connection.up)
    expected.block_inject_weight.weight.copy_(connection.weight)
    x, output = drawn(2, 5, streams, HIDDEN), drawn(2, 5, HIDDEN, seed=1)
    read, flat, gates = expected(x.flatten(-2))
    inputs, _, state = connection((x,), norm)
    # At its start, their gate halves what it reads; ours is twice as large, to start as the standard model.
    assert difference(inputs, 2 * read) < 1e-6
    # This is the write in the decoder layer of `qwen4_exp`.
    flat = flat + (output.unsqueeze(-2) * gates.unsqueeze(-1)).flatten(-2)
    assert difference(connection.write(state, output)[0], flat.unflatten(-1, (streams, HIDDEN))) < 1e-6


@torch.no_grad()
def test_a_shifted_stream_is_that_of_zaya(backbones):
    connection = ours(backbones, "scaled", scaled_form="shifted")
    expected = theirs("zaya", "ZayaResidualScaling")(HIDDEN)
    expected.residual_scale.copy_(1 + connection.weight)
    expected.residual_bias.copy_(connection.shift)
    stream, output, actual = written(connection)
    assert difference(actual, expected(output, stream)) < 1e-6


@torch.no_grad()
@pytest.mark.parametrize("size", [1.0, 10.0])  # with the larger weights, the clamp acts
def test_a_mixed_stream_is_that_of_muse_spark(backbones, size):
    connection = ours(backbones, "scaled", scaled_form="mixed")
    connection.weight.mul_(size)
    config = SimpleNamespace(hidden_size=HIDDEN, residual_gate_temperature=0.3)
    expected = theirs("muse_spark", "MuseSparkResidualGate")(config)
    start = (SUBLAYER + 2) ** -0.5
    expected.gate.copy_(0.3 * math.log(start / (1 - start)) + connection.weight)
    stream, output, actual = written(connection)
    assert difference(actual, expected(stream, output)) < 1e-6


@torch.no_grad()
def test_a_stream_scaled_by_depth_is_that_of_beam(backbones):
    stream, output, actual = written(ours(backbones, "scaled", scaled_form="depth"))
    layer, is_mlp = divmod(SUBLAYER, 2)
    expected = theirs("beam", "depth_scaled_residual_add")(output, stream, 2 * (layer + 1) + is_mlp)
    assert difference(actual, expected) < 1e-6


@torch.no_grad()
def test_scaled_outputs_are_those_of_dinov3(backbones):
    connection = ours(backbones, "scaled", scaled_form="layer_scale")
    config = SimpleNamespace(layerscale_value=1.0, hidden_size=HIDDEN)
    expected = theirs("dinov3_vit", "DINOv3ViTLayerScale")(config)
    expected.lambda1.copy_(1 + connection.weight)
    stream, output, actual = written(connection)
    assert difference(actual, stream + expected(output)) < 1e-6


@torch.no_grad()
def test_the_map_of_laurel_is_that_of_gemma_without_its_norm(backbones):
    connection = ours(backbones, "laurel", laurel_form="lr", laurel_rank=6)
    config = SimpleNamespace(hidden_size=HIDDEN, laurel_rank=6, rms_norm_eps=EPS)
    expected = theirs("gemma3n", "Gemma3nTextLaurelBlock")(config)
    expected.post_laurel_norm = nn.Identity()  # which the paper does not have
    expected.linear_left.weight.copy_(connection.down)
    expected.linear_right.weight.copy_(connection.up)
    stream, output, actual = written(connection)
    assert difference(actual, expected(stream) + output) < 1e-6


@torch.no_grad()
def test_depth_attention_over_normed_values_is_that_of_inkling(backbones):
    fields = {"attn_res_values": "normed", "attn_res_key_norm": True, "attn_res_block_size": 4, "rms_norm_eps": 1e-6}
    connection = ours(backbones, "attn_res", attn_res_temperature=math.sqrt(HIDDEN), **fields)
    config = SimpleNamespace(hidden_size=HIDDEN, _attn_implementation="eager")  # newer releases read both
    expected = theirs("inkling2", "Inkling2BlockAttentionResidual")(config)
    connection.weight.mul_(4)  # so that the weights are far from uniform
    expected.query.copy_(connection.weight[0])
    blocks, partial = drawn(2, 5, 3, HIDDEN), drawn(2, 5, HIDDEN, seed=1)
    inputs, weights, _ = connection((*blocks.unbind(-2), partial), torch.ones(HIDDEN))
    assert weights.max() > 0.6
    assert difference(inputs, expected(blocks, partial)[0]) < 1e-6
