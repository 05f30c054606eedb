"""The parts of a pipeline in one process: settings, the layers of chunks, transfers, and chunks of every model."""

import json
import re
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from transformers import AutoModelForCausalLM

from attnres import CONNECTIONS
from attnres.backbones_attnres import config_on
from attnres.configuration import load
from attnres.conversion import retrofit
from attnres.residual_attnres import residual_tensors
from attnres.training.launch import Launch, check_launch, divide_batch
from attnres.training.parallel.pipeline import split_batch
from attnres.training.parallel.pipeline_model import check_model, chunk_layers, count_costs, view_of
from attnres.training.parallel.pipeline_settings import PipelineSettings, count_replicas
from attnres.training.parallel.pipeline_stage import BlockCache, ChunkModule, join_groups
from attnres.training.parallel.pipeline_transfers import Chunk, assign_transfers, trace_states
from attnres.training.recipe import Recipe, read_recipe

from ...cases import each_once
from ...conversion.backbones import CASES, build


def chunks_of(model, layers: list[range], processes: int, cache: bool = False, batch=2, length=11) -> list[Chunk]:
    states = trace_states(model.config, batch, length)
    return assign_transfers(states, layers, processes, cache)


def consecutive(counts: list[int]) -> list[range]:
    """Return the layers of chunks that have these numbers of layers."""
    return [range(end - count, end) for end, count in zip(accumulate(counts), counts)]


def loss_by_chunks(model, chunks: list[Chunk], ids: torch.Tensor, **others) -> torch.Tensor:
    """Run a model chunk by chunk in this process, with all gradients in one graph."""
    state = ()
    for chunk in chunks:
        is_last = chunk.index == len(chunks) - 1
        view = view_of(model, chunk.layers, chunk.index == 0, is_last)
        batch = {"input_ids": ids, "labels": ids, "num_items_in_batch": 20} | others
        state = ChunkModule(view, BlockCache(), is_last)(*state, chunk=chunk, batch=batch)
    return state


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
    layers = chunk_layers(model, PipelineSettings(stages=3))
    assert_same_as_whole(model, chunks_of(model, layers, 3), token_ids)


def test_chunks_of_kimi_k3_compute_what_the_model_computes(token_ids):
    torch.manual_seed(0)
    config = load("attnres-k3-tiny", num_hidden_layers=4, vocab_size=99)
    model = AutoModelForCausalLM.from_config(config).eval()
    make_vivid(model)
    assert_same_as_whole(model, chunks_of(model, [range(1), range(1, 3), range(3, 4)], 3), token_ids)


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
    model, layers = tiny_model(**fields), [range(1), range(1, 3), range(3, 4)]
    assert_same_as_whole(model, chunks_of(model, layers, 2), token_ids)


@pytest.mark.parametrize(("connection", "way"), each_once([*CONNECTIONS], ["bf16", "autocast"]))
def test_chunks_in_16_bits_compute_what_the_model_computes(connection, way, tiny_model, token_ids):
    model = tiny_model(residual_connection=connection)
    model = model.bfloat16() if way == "bf16" else model
    narrow = {"bf16": (torch.bfloat16, None), "autocast": (torch.float32, torch.bfloat16)}[way]
    states = trace_states(model.config, *token_ids.shape, *narrow)
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"), torch.no_grad():
        by_chunks = loss_by_chunks(model, assign_transfers(states, [range(1), range(1, 4)], 2, False), token_ids)
        with torch.enable_grad():  # as the chunks read, without an inference plan
            loss = model(token_ids, labels=token_ids, num_items_in_batch=20, use_cache=False).loss
    assert by_chunks.item() == pytest.approx(loss.item(), rel=1e-3)


def test_chunks_keep_the_documents_of_a_row_apart(tiny_model, token_ids):
    model = tiny_model()
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6], [*range(11)]])
    batch = {"position_ids": places, "labels": token_ids, "num_items_in_batch": 20}
    by_chunks = loss_by_chunks(model, chunks_of(model, [range(2), range(2, 4)], 2), token_ids, **batch).item()
    assert by_chunks == pytest.approx(model(token_ids, **batch, use_cache=False).loss.item(), rel=1e-6)
    batch["position_ids"] = places[1:].expand(2, -1)
    assert by_chunks != pytest.approx(model(token_ids, **batch, use_cache=False).loss.item(), rel=1e-3)


@pytest.mark.parametrize("connection", ["attn_res", "denseformer", "dca", "gated_residual"])
def test_a_backward_pass_in_two_parts_gives_the_gradients_of_one(connection, token_ids):
    """Layers of the chunk read tensors that it sends, which the engine cuts off their graph after the first part."""
    fields = {"num_hidden_layers": 6, "residual_connection": connection}
    fields |= {"attn_res_block_size": 3} if connection == "attn_res" else {}
    config = config_on("llama")(vocab_size=99, hidden_size=16, num_attention_heads=2, intermediate_size=24, **fields)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    make_vivid(model)
    chunks = chunks_of(model, [range(1), range(1, 4), range(4, 6)], 3)
    state = [torch.randn(piece.shape) for piece in chunks[1].received]
    results = []
    for is_split in (False, True):
        view = view_of(model, chunks[1].layers, False, False)
        module = ChunkModule(view, BlockCache(), False, clones_sent=is_split)
        received = [tensor.clone().requires_grad_() for tensor in state]
        sent = module(*received, chunk=chunks[1], batch={"input_ids": token_ids})
        gradients = [torch.full_like(tensor, 0.1 * number) for number, tensor in enumerate(sent, start=1)]
        if is_split:
            _, groups = stage_backward_input(list(sent), gradients, received, module.parameters())
            stage_backward_weight(module.parameters(), join_groups(groups), retain_graph=True)
        else:
            torch.autograd.backward(sent, gradients)
        named = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
        results.append(named | {f"received {number}": tensor.grad for number, tensor in enumerate(received)})
        model.zero_grad()
    assert results[0].keys() == results[1].keys()
    for name in results[0]:
        torch.testing.assert_close(results[1][name], results[0][name], rtol=1e-4, atol=1e-6, msg=name)


# The layers of chunks


def test_the_layers_of_chunks_are_about_equal_in_cost_or_listed():
    fields = {"vocab_size": 99, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_on("llama")(num_hidden_layers=6, **fields))

    def counts(**fields) -> list[int]:
        layers = chunk_layers(model, PipelineSettings(stages=2, **fields))
        assert [layer for part in layers for layer in part] == [*range(6)]
        return [*map(len, layers)]

    assert counts() == [3, 3]
    assert counts(layers=[1, 5]) == [1, 5]
    with pytest.raises(ValueError, match="add up to 5, but the model has 6 layers"):
        counts(layers=[1, 4])
    with pytest.raises(ValueError, match=r"the model has 6 layers, but `stages` times `virtual` .* is 8"):
        counts(virtual=4)


def test_the_cost_of_a_layer_counts_the_experts_that_a_token_uses(tiny_model):
    costs, head = count_costs(model := tiny_model())
    experts = model.model.layers[1].mlp.experts
    stacked = sum(parameter.numel() for parameter in experts.parameters())
    assert costs[1] == sum(p.numel() for p in model.model.layers[1].parameters()) - stacked * 6 / 8  # 2 of 8 experts
    assert head == 99 * 32


# Transfers


def counted(processes: int, virtual: int, cache: bool, layers: list[int], block_size: int) -> list[int]:
    """Return the number of sources of one token that each transfer carries."""
    config = config_on("llama")(
        hidden_size=16, num_attention_heads=2, num_hidden_layers=sum(layers), attn_res_block_size=block_size
    )
    states = trace_states(config, batch=1, length=1)
    chunks = assign_transfers(states, consecutive(layers), processes, cache)
    assert len(chunks) == processes * virtual
    return [len(chunk.sent) for chunk in chunks[:-1]]


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("virtual", [1, 2, 4])
def test_transfers_carry_what_the_formulas_of_the_paper_say(processes, virtual):
    """Chunks end inside blocks, with one block begun in each. The embedding, which the formulas leave out, is apart."""
    chunks, layers = processes * virtual, [1] + [2] * (processes * virtual - 1)
    naive = counted(processes, virtual, False, layers, block_size=4)
    cached = counted(processes, virtual, True, layers, block_size=4)
    assert sum(naive) - (chunks - 1) == chunks * (chunks - 1) / 2
    assert sum(cached) - (processes - 1) == processes * (processes - 1) / 2 + (virtual - 1) * processes**2
    assert max(naive) == chunks
    assert max(cached) == processes


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("virtual", [1, 2, 4])
@pytest.mark.parametrize("per_chunk", [1, 2])
def test_a_block_that_the_receiver_has_made_is_not_sent_back(processes, virtual, per_chunk):
    """Where chunks end with blocks, (V - 1) P transfers go to a process that has made N_p of the blocks by itself."""
    chunks, layers = processes * virtual, [per_chunk] * (processes * virtual)
    naive = counted(processes, virtual, False, layers, block_size=2)
    cached = counted(processes, virtual, True, layers, block_size=2)
    paper = (processes * (processes - 1) / 2 + (virtual - 1) * processes**2) * per_chunk
    assert sum(naive) - (chunks - 1) == chunks * (chunks - 1) / 2 * per_chunk
    assert sum(cached) - (processes - 1) == paper - (virtual - 1) * processes * per_chunk
    assert max(cached) <= processes * per_chunk


@given(
    st.lists(st.integers(1, 3), min_size=2, max_size=8),
    st.integers(2, 4),
    st.integers(1, 7),
    st.sampled_from(["attn_res", "denseformer", "standard"]),
)
def test_each_chunk_finds_its_state_and_nothing_stays_in_the_cache(layers, processes, block_size, connection):
    fields = {
        "hidden_size": 16,
        "num_attention_heads": 2,
        "attn_res_block_size": block_size,
        "residual_connection": connection,
    }
    config = config_on("llama")(num_hidden_layers=sum(layers), **fields)
    chunks = assign_transfers(trace_states(config, 1, 1), consecutive(layers), processes, cache=True)
    caches = [set() for _ in range(processes)]
    for chunk, sender in zip(chunks, [None, *chunks]):
        cache, received = caches[chunk.index % processes], [piece.number for piece in chunk.received]
        if sender is not None:
            assert received == [piece.number for piece in sender.sent]
            assert {*received, *chunk.cached} == {*chunk.before.numbers}
        assert cache >= {*chunk.cached} and cache.isdisjoint(received)
        cache |= {*chunk.kept}
        cache -= {*chunk.freed}
    assert not any(caches)


def test_the_cache_notices_blocks_and_gradients_that_are_left():
    cache = BlockCache()
    cache.keep(0, 3, torch.ones(2))
    assert (cache.num_bytes, cache.peak_bytes) == (8, 8)
    assert cache.take(0, 3).requires_grad
    cache.deposit(0, 3, torch.ones(2))
    cache.deposit(0, 3, torch.ones(2))
    cache.deposit(0, 3, None)
    assert cache.collect(0, 3).tolist() == [2, 2]
    assert cache.collect(0, 3) is None
    cache.free(0, 3)
    cache.check_empty()
    cache.keep(1, 3, torch.ones(2))
    cache.deposit(2, 4, torch.ones(2))
    with pytest.raises(RuntimeError, match=r"left 1 blocks and 1 gradients .*\(1, 3\), \(2, 4\)"):
        cache.check_empty()
    cache.check_empty()


def test_groups_of_parameters_that_share_a_node_are_joined():
    """The third group joins the first two, which the engine had begun apart. A node without a gradient adds none."""
    groups = [
        {"params": {"a"}, "intermediates": [1, 2], "grads": ["of 1", "of 2"]},
        {"params": {"b"}, "intermediates": [3], "grads": ["of 3"]},
        {"params": {"c"}, "intermediates": [5, 6], "grads": ["of 5", None]},
        {"params": {"d"}, "intermediates": [2, 3], "grads": ["of 2", "of 3"]},
        {"params": {"e"}, "intermediates": [7]},
    ]
    joined = {
        frozenset(group["params"]): dict(zip(group["intermediates"], group["grads"])) for group in join_groups(groups)
    }
    assert joined == {
        frozenset("abd"): {1: "of 1", 2: "of 2", 3: "of 3"},
        frozenset("c"): {5: "of 5"},
        frozenset("e"): {},
    }


# Settings


@pytest.mark.parametrize(
    "settings, message",
    [
        ({}, "The recipe lacks `pipeline.stages`"),
        ({"stages": None}, "The recipe lacks `pipeline.stages`"),
        ({"stages": 1}, "`pipeline.stages` of the recipe is 1, but must be at least 2."),
        ({"stages": 2, "virtuel": 2}, "`pipeline` has no `virtuel`. Did you mean `virtual`?"),
        ({"stages": 2, "virtual": True}, "`pipeline.virtual` of the recipe is True"),
        ({"stages": 2, "schedule": "2F2B"}, "'2F2B', but must be 'GPipe', '1F1B', 'Interleaved1F1B'"),
        ({"stages": 2, "schedule": []}, "`pipeline.schedule` of the recipe is [], but must be 'GPipe'"),
        ({"stages": 2, "schedule": {}}, "`pipeline.schedule` of the recipe is {}, but must be 'GPipe'"),
        ({"stages": 2, "schedule": ""}, "`pipeline.schedule` of the recipe is '', but must be 'GPipe'"),
        ({"stages": 2, "microbatches": False}, "`pipeline.microbatches` of the recipe is False"),
        ({"stages": 2, "microbatches": 0}, "`pipeline.microbatches` of the recipe is 0"),
        ({"stages": 2, "timeout": 10**10}, "`pipeline.timeout` of the recipe is 10000000000, but must be at most"),
        ({"stages": 2, "virtual": 2, "schedule": "1F1B"}, "the schedule 1F1B runs one chunk per process"),
        ({"stages": 4, "microbatches": 3}, "is 3, but with the schedule 1F1B must be at least `stages`, 4"),
        ({"stages": 2, "virtual": 2, "microbatches": 5}, "is 5, but with the schedule Interleaved1F1B must be a"),
        ({"stages": 2, "layers": [1, 2, 3]}, "has 3 numbers, but must have 2, one for each chunk"),
        ({"stages": 2, "layers": [4, 0]}, "`pipeline.layers` of the recipe is 0, but must be"),
        ({"stages": 2, "cache": 1}, "`pipeline.cache` of the recipe is 1, but must be true or false."),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read_recipe("pretrain", ["model=x", "train=y", "out=z", "tokenizer=t", f"pipeline={json.dumps(settings)}"])


@pytest.mark.parametrize(
    "trainer, message",
    [
        ({"fp16": True}, "`trainer.fp16` of the recipe does not work with `pipeline`: use `bf16`"),
        ({"torch_compile": True}, "`trainer.torch_compile` of the recipe does not work with"),
        ({"torch_compile_mode": "default"}, "`trainer.torch_compile_mode` of the recipe does not work"),
        ({"fsdp": "full_shard"}, "does not work with `pipeline`: set `fsdp: true` in `pipeline`."),
    ],
)
def test_fields_of_the_trainer_that_contradict_a_pipeline_are_refused(trainer, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Recipe("model", ("a.txt",), "out", steps=1, pipeline={"stages": 2}, trainer=trainer)


def test_a_batch_that_no_micro_batches_fill_is_refused():
    pipeline = {"stages": 2, "microbatches": 4}
    recipe = Recipe("model", ("a.txt",), "out", steps=1, batch_size=6, micro_batch_size=6, pipeline=pipeline)
    with pytest.raises(ValueError, match=r"`pipeline\.microbatches` of the recipe is 4, but must divide the 6 "):
        divide_batch(recipe, 2)


@pytest.mark.parametrize(
    "launch, message",
    [
        ({"ACCELERATE_USE_FSDP": "true"}, "accelerate's FSDP would both shard the model: leave out one"),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "does not train in fp16, as accelerate's settings ask: use bf16"),
    ],
)
def test_an_engine_or_fp16_of_accelerate_beside_a_pipeline_is_refused(launch, message):
    recipe = Recipe("model", ("a.txt",), "out", steps=1, pipeline={"stages": 2})
    with pytest.raises(ValueError, match=message):
        check_launch(recipe, Launch(processes=2, **launch))


def test_the_schedule_follows_from_the_chunks_of_a_process():
    settings = PipelineSettings(stages=4)
    assert (settings.virtual, settings.schedule, settings.microbatches) == (1, "1F1B", 4)
    assert PipelineSettings(stages=2, virtual=2).schedule == "Interleaved1F1B"


def test_a_pipeline_that_does_not_fit_the_processes_is_refused():
    settings = PipelineSettings(stages=4)
    assert count_replicas(settings, 8) == 2
    for processes in (1, 2, 6):
        with pytest.raises(ValueError, match=f"is 4, but this run has {processes} process.*--num_processes 4"):
            count_replicas(settings, processes)


def test_a_pipeline_excludes_other_sharding():
    with pytest.raises(ValueError, match="exclude each other"):
        read_recipe("pretrain", ["model=x", "train=y", "out=z", "pipeline={stages: 2}", "distributed={fsdp_size: 2}"])


def test_models_that_cannot_be_cut_are_refused(backbones, tiny_model):
    with pytest.raises(ValueError, match="needs a language model of the family, not llama"):
        check_model(backbones.build("llama"))
    model = retrofit(backbones.build("mixtral"), block_size=2)
    model.config.output_router_logits = True
    with pytest.raises(ValueError, match="auxiliary loss"):
        check_model(model)
    check_model(tiny_model())


@pytest.mark.parametrize("rows, parts, sizes", [(8, 4, [2] * 4), (6, 4, [3] * 2), (5, 4, [5]), (3, 3, [1] * 3)])
def test_a_batch_is_split_into_equal_micro_batches(rows, parts, sizes):
    batch = {"input_ids": torch.arange(rows)[:, None], "labels": torch.arange(rows)[:, None], "other": 3}
    split = split_batch(batch, parts)
    assert [len(part["labels"]) for part in split] == sizes
    assert torch.equal(torch.cat([part["input_ids"] for part in split]), batch["input_ids"])
    assert all(part["other"] == 3 for part in split)
