"""The parts of a pipeline in one process: settings, the division of layers, transfers, and chunks of every model."""

import copy
import re
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from transformers import AutoModelForCausalLM

from attnres import CONNECTIONS, AttnResConfig
from attnres.configuration import load
from attnres.conversion import retrofit
from attnres.residual_attnres import residual_tensors
from attnres.training.pipeline import split_batch
from attnres.training.pipeline_cache import BlockCache
from attnres.training.pipeline_layers import count_costs, divide_layers, listed_layers
from attnres.training.pipeline_model import ChunkModule, check_model, view_of
from attnres.training.pipeline_settings import PipelineSettings, read_settings
from attnres.training.pipeline_transfers import Chunk, plan_chunks, trace_states, transfer_bytes

from ..conversion.backbones import CASES, build


def chunks_of(model, layers: list[range], processes: int, cache: bool = False, batch=2, length=11) -> list[Chunk]:
    states = trace_states(model.config, batch, length)
    return plan_chunks(states, layers, processes, cache)


def loss_by_chunks(model, chunks: list[Chunk], ids: torch.Tensor) -> torch.Tensor:
    """Run a model chunk by chunk in this process, with all gradients in one graph."""
    state = {}
    for chunk in chunks:
        is_last = chunk.index == len(chunks) - 1
        module = ChunkModule(view_of(model, chunk, len(chunks)), chunk, BlockCache(), is_last)
        batch = {"input_ids": ids, "labels": ids, "num_items_in_batch": 20}
        outputs = module.run(state, batch)
        if not is_last:
            state = dict(zip(chunk.after.numbers, module.tensors_of(outputs), strict=True))
    return outputs.loss


def assert_same_as_whole(model, chunks: list[Chunk], ids: torch.Tensor) -> None:
    """Assert that a model gives the same loss and gradients whole and by chunks."""
    loss = model(ids, labels=ids, num_items_in_batch=20, use_cache=False).loss
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    by_chunks = loss_by_chunks(model, chunks, ids)
    by_chunks.backward()
    assert by_chunks.item() == pytest.approx(loss.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-5, atol=1e-7, msg=name)
    model.zero_grad()


@pytest.mark.parametrize("case", CASES)
def test_chunks_of_every_backbone_compute_what_the_model_computes(case, token_ids):
    torch.manual_seed(0)
    model = retrofit(build(case), block_size=3).eval()
    make_vivid(model)
    layers, head = count_costs(model)
    assert_same_as_whole(model, chunks_of(model, divide_layers(layers, 3, head), 3), token_ids)


def test_chunks_of_kimi_k3_compute_what_the_model_computes(token_ids):
    torch.manual_seed(0)
    config = load("attnres-k3-tiny", num_hidden_layers=4, vocab_size=99)
    model = AutoModelForCausalLM.from_config(config).eval()
    make_vivid(model)
    assert_same_as_whole(model, chunks_of(model, [range(0, 1), range(1, 3), range(3, 4)], 3), token_ids)


def make_vivid(model) -> None:
    """Give the residual connections random weights, far from uniform."""
    for tensor in residual_tensors(model).values():
        torch.nn.init.normal_(tensor, mean=1.0 if tensor.ndim == 1 else 0.0, std=0.3)


@pytest.mark.parametrize(
    "fields",
    [{"residual_connection": name} for name in CONNECTIONS]
    + [{"attn_res_block_size": size} for size in (1, 2, 3)]
    + [{"attn_res_window": 1}, {"attn_res_blocks": "rms", "attn_res_block_size": 3}, {"attn_res_gated": True}]
    + [{"attn_res_query": "input_dependent"}, {"tie_word_embeddings": True}],
    ids=lambda fields: ", ".join(f"{name} {value}" for name, value in fields.items()),
)
def test_chunks_of_every_connection_compute_what_the_model_computes(fields, tiny_model, token_ids):
    model = tiny_model(**fields)
    for layers in ([range(0, 1), range(1, 4)], [range(0, 2), range(2, 3), range(3, 4)]):
        assert_same_as_whole(model, chunks_of(model, layers, 2), token_ids)
