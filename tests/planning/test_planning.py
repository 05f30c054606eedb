"""Plans shard the weights of the meta device, need less memory on more devices, and name the largest part."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig

from attnres.backbones_attnres import config_on
from attnres.configuration import count_parameters, load, names
from attnres.conversion.family import retrofit_config
from attnres.planning import (
    Batch,
    Costs,
    Device,
    Job,
    Layout,
    SimulatedPipeline,
    overhead,
    plan_layout,
    rank_actions,
    search,
    sent_bytes,
    simulate,
    trace,
)
from attnres.planning.search import devices_that_fit, layouts
from attnres.planning.traces import Trace
from attnres.training.optimizer import build_optimizer

SMALL = Device(memory=1e9, per_node=4)


@pytest.fixture(scope="module")
def tiny() -> Costs:
    return Costs(load("attnres-tiny"), Job(devices=8, context=256, batch_tokens=64 * 256))


@pytest.fixture(scope="module")
def k3() -> Costs:
    return Costs(load("kimi-k3"), Job(1, 4096, 2**24))


@pytest.mark.parametrize("name", names())
def test_weights_are_those_that_the_meta_device_counts(name):
    config = load(name)
    costs, count = Costs(config, Job(1, 1, 1)), count_parameters(config)
    experts, used = costs.experts
    # The count has the routers' biases too, which no optimizer trains.
    biases = experts * len({weights.layer for weights in costs.weights if weights.is_expert})
    assert sum(weights.number for weights in costs.weights) + biases == count.total
    active = sum(w.number * (used / experts if w.is_expert else 1) for w in costs.weights) + biases
    embeddings = count.total - count.non_embedding
    assert active - embeddings == pytest.approx(count.activated_non_embedding, rel=1e-12)


def block_states(traced: Trace) -> int:
    """Return the bytes of the largest state, without the one tensor that a standard residual stream holds too."""
    states = (*(layer.states for layer in traced.layers), traced.output)
    return max(sum(state.values()) for state in states) - traced.stream


@pytest.mark.slow
def test_128k_tokens_of_kimi_k3_hold_the_block_states_of_the_paper():
    config = load("kimi-k3")
    whole = block_states(trace(config, Batch(1, 131072, training=False)))
    assert whole == 8 * 131072 * 7168 * 2  # 15 GB for 8 blocks
    costs = Costs(config, Job(8, 131072, 131072, training=False))
    assert whole / 1e9 == pytest.approx(15, rel=0.01)
    assert whole / 8 / 1e9 == pytest.approx(1.9, rel=0.02)
    assert block_states(costs.trace(8)) / 1e9 < 0.3  # sharded among 8 ranks, in chunks of 16K tokens
    assert block_states(costs.trace(8)) == whole / 8 / 8


@given(rows=st.integers(1, 4), length=st.sampled_from([64, 128, 192]))
@settings(max_examples=3)
def test_states_grow_with_the_tokens(rows, length):
    config = load("attnres-tiny", num_hidden_layers=4)
    one, many = (trace(config, Batch(count, length, training=False)) for count in (1, rows))
    assert block_states(many) == rows * block_states(one)
    assert many.cache == rows * one.cache


def test_parts_of_the_memory_add_up_and_stages_share_all_weights(tiny):
    for layout in (Layout(8, shard=8), Layout(2, pipeline=4, shard=2), Layout(4, pipeline=2, expert=4, shard=4)):
        plan = plan_layout(tiny, layout, SMALL)
        assert plan.total_memory == sum(plan.memory.values())
        assert plan.memory[plan.dominant_memory] == max(plan.memory.values())
    stages = tiny.stages(4)
    assert [stage.start for stage in stages][1:] == [stage.stop for stage in stages][:-1]
    number = sum(weights.number for weights in tiny.weights)
    stored = [tiny.stage_weights(Layout(2, pipeline=4), [stage]).stored for stage in stages]
    assert sum(stored) == pytest.approx(number)


def test_the_memory_of_one_device_is_that_of_its_parts_counted_by_hand(tiny):
    number = sum(weights.number for weights in tiny.weights)
    plan = plan_layout(tiny, Layout(), SMALL)
    assert plan.memory["weights"] == number * (4 + 2)
    assert plan.memory["optimizer"] == number * 8
    kept = plan.memory["activations"] + plan.memory["block states"]
    assert kept == tiny.trace(1).peak()


@pytest.mark.parametrize(
    ("optimizer", "query", "vocabulary"),
    [
        ("adamw", "learned", 64),
        ("adamw", "input_dependent", 512),
        ("muon", "learned", 512),
        ("muon", "input_dependent", 64),
    ],
)
def test_an_optimizer_keeps_as_many_bytes_as_planned(optimizer, query, vocabulary):
    config = config_on("llama")(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        residual_connection="attn_res", attn_res_query=query,
    )  # fmt: skip
    plan = plan_layout(Costs(config, Job(1, 64, 128, optimizer=optimizer)), Layout(), SMALL)
    model = AutoModelForCausalLM.from_config(config)
    real = build_optimizer(model, name=optimizer, learning_rate=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    real.step()
    kept = [tensor for state in real.state.values() for tensor in state.values() if torch.is_tensor(tensor)]
    assert plan.memory["optimizer"] == sum(tensor.nbytes for tensor in kept if tensor.ndim)  # without counts of steps


def test_a_llama_on_eight_devices_has_the_weights_of_a_sum_on_paper():
    config = retrofit_config(
        LlamaConfig(
            vocab_size=64, hidden_size=64, intermediate_size=256, num_hidden_layers=4, num_attention_heads=8,
            num_key_value_heads=4, tie_word_embeddings=False,
        ),
        "attn_res",
    )  # fmt: skip
    plan = plan_layout(
        Costs(config, Job(8, 128, 16 * 128)), Layout(data=2, tensor=2, pipeline=2, shard=2, reshard=True), SMALL
    )
    # Two of four layers, and the embedding. Tensor parallelism halves queries and outputs, keys and values, and three
    # matrices of the MLP, and leaves two norms, and a query and a norm for each of two reads.
    layer = (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 256) / 2 + (2 + 4) * 64
    stage = 2 * layer + 64 * 64 / 2
    assert plan.memory["optimizer"] == stage / 2 * 8
    assert plan.memory["weights"] == stage / 2 * 4 + 2 * layer * 2
    assert plan.memory["gradients"] == stage / 2 * 4 + layer * 2


def test_a_stage_of_kimi_k3_on_1024_devices_has_the_weights_of_a_sum_on_paper(k3):
    layout = Layout(data=64, pipeline=16, expert=64, shard=64)
    stage = k3.stages(16)[8]
    weights = k3.stage_weights(layout, [stage])
    kinds = k3.config.layer_types[stage]
    assert len(kinds) == 6
    # 14 of 896 experts in each layer: 3 matrices between 3,584 and 3,072 columns. Each has one shard.
    experts = 6 * 14 * 3 * 3584 * 3072
    assert weights.expert_bytes == 2 * experts
    # Two shared experts in the model's width, two projections to the latent space, and a router.
    others = 6 * (2 * 3 * 7168 * 3072 + 2 * 7168 * 3584 + 896 * 7168)
    # Queries, keys, values, gate and output of KDA; of MLA, queries and keys through latents, gate and output.
    others += kinds.count("linear_attention") * 5 * 7168 * 12288
    others += kinds.count("full_attention") * (7168 * (1536 + 576) + 96 * (1536 * 192 + 512 * 256) + 2 * 7168 * 12288)
    assert weights.computed == pytest.approx(experts + others, rel=0.005)
    assert weights.stored == pytest.approx(experts + others / 64, rel=0.005)
    assert weights.optimizer == 8 * weights.stored
    # A token uses 16 of 896 experts.
    assert weights.activated == pytest.approx(experts * 64 * 16 / 896 + others, rel=0.005)


def test_caches_have_the_bytes_of_a_sum_on_paper():
    context = 65536
    config = load("attnres-48b-a3b", num_hidden_layers=4)
    costs = Costs(config, Job(8, context, 32 * context, training=False))
    plan = plan_layout(costs, Layout(data=8, expert=8), Device())
    latents = (512 + 64) * 2 * context  # a layer of MLA
    states = 3 * (32 * 128 * 128 * 4 + 3 * 4096 * 4 * 2)  # 3 layers of KDA, and the inputs of their convolutions
    assert plan.memory["caches"] == 4 * (latents + states)


few = st.sampled_from([1, 2, 4])


@given(pipeline=few, shard=few, reshard=st.booleans(), checkpointing=st.booleans())
def test_more_devices_never_need_more_memory(tiny, pipeline, shard, reshard, checkpointing):
    layout = Layout(8, 1, pipeline, 1, shard, reshard and shard > 1, checkpointing)

    def plan(**changes):
        return plan_layout(tiny, replace(layout, **changes), SMALL)

    assert plan(shard=2 * shard).total_memory < plan().total_memory
    assert plan(expert=shard).total_memory <= plan().total_memory
    assert plan(checkpointing=True).total_memory <= plan(checkpointing=False).total_memory
    # FSDP needs less memory than a gather once a step, and sends more.
    if shard > 1:
        per_layer, per_step = plan(reshard=True), plan(reshard=False)
        assert per_layer.total_memory <= per_step.total_memory
        assert per_layer.sent["weights"] >= per_step.sent["weights"]


@pytest.mark.parametrize(("pipeline", "virtual"), [(2, 1), (4, 1), (2, 2), (4, 2)])
def test_the_time_of_a_pipeline_is_nearly_that_of_the_simulated_schedule(tiny, pipeline, virtual):
    device = replace(SMALL, flops=1e12, network=2e9, per_node=1)
    layout = Layout(4, 1, pipeline, virtual=virtual)
    plan = plan_layout(tiny, layout, device)
    forward = [flops / device.flops / device.efficiency for flops in tiny.forward_flops(layout)]
    stages = tiny.stages(layout.stages)[1:]
    sent = sent_bytes([tiny.trace(1).layers[stage.start].states for stage in stages], pipeline, cached=True)
    schedule = "Interleaved1F1B" if virtual > 1 else "1F1B"
    actions = [rank_actions(schedule, rank, pipeline, plan.microbatches, virtual) for rank in range(pipeline)]
    times = forward, [2 * time for time in forward], [size / device.network for size in sent]
    planned = sum(plan.seconds[part] for part in ("compute", "pipeline", "bubble"))
    assert planned == pytest.approx(simulate(actions, *times).total, rel=0.15)


def test_a_gather_among_nodes_uses_all_their_network_links_and_an_exchange_each_devices_own():
    device = Device(link=450, network=50, per_node=8)
    assert device.collective_rate(8) == 450
    assert device.collective_rate(16) == 8 * 50
    assert device.collective_rate(4, stride=8) == 50
    assert device.collective_rate(4, stride=4) == 2 * 50
    # Of 15 parts, 7 stay in the node, and 8 leave it.
    assert device.exchange_seconds(15 * 90, 16) == 8 * 90 / 50
    assert device.exchange_seconds(7 * 90, 8) == 7 * 90 / 450
    assert device.exchange_seconds(0, 1) == 0


@pytest.mark.parametrize("backbone", ["mistral", "gemma3_text"])  # a window in every layer, and in five of six
@pytest.mark.parametrize("tokens", [1, 200, 512])
def test_attention_counts_the_pairs_that_its_window_shows(backbone, tokens):
    context, window = 512, 100
    config = config_on(backbone)(
        hidden_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=99,
        intermediate_size=96,
        sliding_window=window,
    )
    query, key = torch.arange(context - tokens, context)[:, None], torch.arange(context)
    # A token sees itself by half, as an integral over the tokens counts it.
    seen = (key < query) + 0.5 * (key == query)
    full, sliding = seen.sum().item(), (seen * (key > query - window)).sum().item()
    layers = 6 if backbone == "mistral" else 5
    expected = 4 * 4 * 16 * (layers * sliding + (6 - layers) * full)
    found = Costs(config, Job(1, context, context)).attention_flops(tokens)
    assert found == pytest.approx(expected, rel=0.01)


def test_layouts_use_all_devices_and_divide_what_they_share(tiny):
    found = [*layouts(tiny, tiny.job, SMALL)]
    assert len(found) == len({*found}) > 20
    for layout in found:
        assert layout.data * layout.tensor * layout.pipeline == 8
        assert layout.shard * layout.tensor % layout.expert == 0
        assert 8 % layout.expert == 0  # its experts
        assert layout.tensor <= SMALL.per_node


def test_the_fastest_layouts_that_fit_come_first_and_the_simplest_of_those_as_fast(tiny):
    found = search(tiny, SMALL)
    speeds = [plan.tokens_per_second for plan in found.fitting]
    assert all(earlier * 1.05 > later for i, earlier in enumerate(speeds) for later in speeds[i:])
    alike = [plan.layout.stages for plan in found.fitting if plan.tokens_per_second * 1.05 > max(speeds)]
    assert alike == sorted(alike)
    assert all(plan.total_memory <= 0.92e9 for plan in found.fitting)
    least = found.nearest.total_memory
    barely = replace(SMALL, memory=least / 0.92 * 1.001)
    assert least in [plan.total_memory for plan in search(tiny, barely).fitting]
    assert search(tiny, replace(SMALL, memory=least / 0.92 * 0.999)).fitting == ()


def test_more_devices_are_named_if_they_would_fit():
    costs = Costs(load("attnres-tiny"), Job(devices=1, context=64, batch_tokens=64 * 64))
    device = Device(memory=18e6, per_node=1)
    assert search(costs, device).fitting == ()
    enough = devices_that_fit(costs, device)
    assert enough > 1
    assert search(costs, device, replace(costs.job, devices=enough)).fitting


def test_caching_and_bandwidth_lower_the_predicted_overhead():
    costs = Costs(load("attnres-tiny"), Job(devices=1, context=4096, batch_tokens=4096))
    device = Device()
    for ranks, virtual in ((2, 1), (2, 2), (4, 2)):
        pipeline = SimulatedPipeline(ranks, virtual, microbatches=2 * ranks)
        cached, naive = (overhead(costs, device, replace(pipeline, cached=is_cached)) for is_cached in (True, False))
        assert 0 < cached <= naive
        assert overhead(costs, device, replace(pipeline, bandwidth=450e9)) <= cached


@pytest.mark.slow
def test_kimi_k3_is_trained_in_stages_of_a_node_with_the_overhead_that_the_paper_states(k3):
    for ranks, virtual in ((4, 1), (8, 2), (16, 2)):
        pipeline = SimulatedPipeline(ranks, virtual, 4 * ranks, 8 * 50e9, devices_per_stage=8)
        assert 0 < overhead(k3, Device(), pipeline) < 0.04


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 8, 8), "devices must be at least 1, got 0"),
        ((8, 512, 700), r"multiple of the context \(512\), got 700: 512 is one"),
        ((8, 512, 512, True, "sgd"), "The optimizer must be one of adamw, muon, got 'sgd'"),
    ],
)
def test_a_job_that_cannot_be_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Job(*arguments)


def test_a_model_that_tensor_parallelism_cannot_shard_is_refused(tiny):
    with pytest.raises(ValueError, match="5 devices cannot share a dimension of "):
        tiny.trace(5)


def test_no_layout_for_these_sequences_is_said():
    costs = Costs(load("attnres-tiny"), Job(devices=7 * 11, context=256, batch_tokens=256))
    with pytest.raises(ValueError, match=r"No layout of 77 devices divides a batch of 1 sequences: .* 19,712"):
        search(costs, SMALL)
