"""Plans divide the weights of the meta device, need less memory on more devices, and name the largest part."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnres.analysis.planning import Batch, Costs, Device, Job, Layout, Pipeline, overhead, search, trace
from attnres.analysis.planning.search import devices_that_fit, layouts
from attnres.configuration import count_parameters, load, names

SMALL = Device(memory=1e9, per_node=4)


@pytest.fixture(scope="module")
def tiny() -> Costs:
    return Costs(load("attnres-tiny"), Job(devices=8, context=256, batch_tokens=64 * 256))


@pytest.mark.parametrize("name", names())
def test_weights_are_those_that_the_meta_device_counts(name):
    config = load(name)
    costs, count = Costs(config, Job(1, 1, 1)), count_parameters(config)
    assert sum(weights.number for weights in costs.weights) == count.total
    experts, used = costs.experts
    active = sum(w.number * (used / experts if w.is_expert else 1) for w in costs.weights)
    embeddings = count.total - count.non_embedding
    assert active - embeddings == pytest.approx(count.activated_non_embedding, rel=1e-12)


@pytest.mark.slow
def test_128k_tokens_of_kimi_k3_hold_the_block_states_of_the_paper():
    config = load("kimi-k3")
    whole = trace(config, Batch(1, 131072, training=False)).block_states
    assert whole == 8 * 131072 * 7168 * 2  # 15 GB for 8 blocks
    costs = Costs(config, Job(8, 131072, 131072, training=False))
    assert whole / 1e9 == pytest.approx(15, rel=0.01)
    assert whole / 8 / 1e9 == pytest.approx(1.9, rel=0.02)
    assert costs.trace(8).block_states / 1e9 < 0.3  # sharded among 8 ranks, in chunks of 16K tokens
    assert costs.trace(8).block_states == whole / 8 / 8


@given(rows=st.integers(1, 4), length=st.sampled_from([64, 128, 192]))
@settings(max_examples=6)
def test_states_grow_with_the_tokens(rows, length):
    config = load("attnres-tiny", num_hidden_layers=4)
    one, many = (trace(config, Batch(count, length, training=False)) for count in (1, rows))
    assert many.block_states == rows * one.block_states
    assert many.cache == rows * one.cache


def test_parts_of_the_memory_add_up_and_stages_share_all_weights(tiny):
    for layout in (Layout(8, shard=8), Layout(2, pipeline=4, shard=2), Layout(4, pipeline=2, expert=4, shard=4)):
        plan = tiny.plan(layout, SMALL)
        assert plan.total_memory == sum(plan.memory.values())
        assert plan.memory[plan.dominant_memory] == max(plan.memory.values())
    stages = tiny.stages(4)
    assert [stage.start for stage in stages][1:] == [stage.stop for stage in stages][:-1]
    number = sum(weights.number for weights in tiny.weights)
    stored = [tiny._weight_costs(Layout(2, pipeline=4), stage)["stored"] for stage in stages]
    assert sum(stored) == pytest.approx(number)


def test_the_memory_of_one_device_is_that_of_its_parts_counted_by_hand(tiny):
    number = sum(weights.number for weights in tiny.weights)
    plan = tiny.plan(Layout(), SMALL)
    assert plan.memory["weights"] == number * (4 + 2)
    assert plan.memory["optimizer"] == number * 8
    kept = plan.memory["activations"] + plan.memory["block states"]
    assert kept == tiny.trace(1).peak()


def test_weights_on_more_devices_never_need_more_memory(tiny):
    for pipeline in (1, 2, 4):
        for shard in (1, 2, 4):
            less = tiny.plan(Layout(8, pipeline=pipeline, shard=shard), SMALL)
            for other in (Layout(8, pipeline=pipeline, shard=2 * shard), Layout(8, 1, pipeline, 2, 2 * shard)):
                more = tiny.plan(other, SMALL)
                assert more.memory["optimizer"] <= less.memory["optimizer"]
                assert more.memory["gradients"] <= less.memory["gradients"] or shard == 1
    checkpointed = tiny.plan(Layout(8, checkpointing=True), SMALL)
    assert checkpointed.total_memory < tiny.plan(Layout(8), SMALL).total_memory


def test_layouts_use_all_devices_and_divide_what_they_share(tiny):
    found = [*layouts(tiny, tiny.job, SMALL)]
    assert len(found) == len({*found}) > 20
    for layout in found:
        assert layout.data * layout.tensor * layout.pipeline == 8
        assert layout.shard * layout.tensor % layout.expert == 0
        assert 8 % layout.expert == 0  # its experts
        assert layout.tensor <= SMALL.per_node


def test_the_fastest_layouts_that_fit_come_first(tiny):
    found = search(tiny, SMALL)
    speeds = [plan.tokens_per_second for plan in found.fitting]
    assert speeds == sorted(speeds, reverse=True)
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
        pipeline = Pipeline(ranks, virtual, microbatches=2 * ranks)
        cached, naive = (overhead(costs, device, replace(pipeline, cached=is_cached)) for is_cached in (True, False))
        assert 0 < cached <= naive
        assert overhead(costs, device, replace(pipeline, bandwidth=450e9)) <= cached


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 8, 8), "devices must be at least 1, got 0"),
        ((8, 512, 700), "whole sequences of 512 tokens, got 700 tokens: 512 would"),
        ((8, 512, 512, True, "sgd"), "The optimizer must be one of adamw, muon, got 'sgd'"),
    ],
)
def test_a_job_that_cannot_be_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Job(*arguments)


def test_a_model_that_tensor_parallelism_cannot_divide_is_refused(tiny):
    with pytest.raises(ValueError, match="5 devices cannot share a dimension of "):
        tiny.trace(5)


def test_no_layout_for_these_sequences_is_said():
    costs = Costs(load("attnres-tiny"), Job(devices=7 * 11, context=256, batch_tokens=256))
    with pytest.raises(ValueError, match="77 devices have no layout for 1 sequences"):
        search(costs, SMALL)
