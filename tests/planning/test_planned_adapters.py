"""The memory that a plan counts for frozen weights and adapters is that of a real step of LoRA."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from attnres.configuration import load
from attnres.planning import Batch, Costs, Device, Job, Layout, plan_layout, trace
from attnres.planning.live_bytes import LiveBytes
from attnres.training.lora import add_adapters

from ..training.test_lora import EXPERTS, SMALL

QUANTIZATION = {
    "config_groups": {"group_0": {"weights": {"group_size": 32, "num_bits": 4, "type": "float"}}},
    "format": "mxfp4-pack-quantized",
    "quant_method": "compressed-tensors",
}
MOE = EXPERTS | {"head_dim": 8, "num_experts": 4}
CASES = {
    "kimi_k3": (lambda: load("attnres-k3-tiny", num_hidden_layers=4, vocab_size=99), False),
    "packed kimi_k3": (
        lambda: load(
            "attnres-k3-tiny",
            num_hidden_layers=4,
            vocab_size=99,
            moe_intermediate_size=256,
            packed_experts=True,
            stored_quantization=QUANTIZATION,
        ),
        True,
    ),
    "hybrid": (lambda: load("attnres-tiny", num_hidden_layers=4, vocab_size=99), False),
    "llama": (lambda: AutoConfig.for_model("attnres_llama", **SMALL), False),
    "qwen3_moe": (lambda: AutoConfig.for_model("attnres_qwen3_moe", **SMALL, **MOE), False),
}
RANK = 8


@pytest.mark.parametrize("name", CASES)
def test_weights_and_adapters_take_the_planned_memory_within_3_percent(name):
    make, packed = CASES[name]
    model = AutoModelForCausalLM.from_config(make(), dtype=torch.bfloat16)
    adapted = add_adapters(model, rank=RANK)
    optimizer = torch.optim.AdamW(parameter for parameter in adapted.parameters() if parameter.requires_grad)
    ids = torch.arange(3, 35)[None]
    with torch.autocast("cpu", torch.bfloat16):
        adapted(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for parameter in adapted.parameters():
        # Not every expert gets a token, and layer 0 reads a single source.
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    states = [t for state in optimizer.state.values() for t in state.values() if t.ndim]
    adapters = sum(t.nbytes for t in (*trained, *(p.grad for p in trained), *states))
    frozen = sum(parameter.nbytes for parameter in adapted.parameters() if not parameter.requires_grad)

    costs = Costs(make(), Job(1, 64, 64, lora=RANK, packed=packed))
    memory = plan_layout(costs, Layout(), Device()).memory
    assert memory["weights"] == pytest.approx(frozen, rel=0.03)
    assert memory["adapters"] == pytest.approx(adapters, rel=0.03)


@pytest.mark.parametrize("name", ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in CASES if n != "llama")])
def test_a_step_takes_the_planned_activations_within_3_percent(name):
    make, packed = CASES[name]
    config, ids = make(), torch.arange(128)[None] % 90 + 3
    config.depth_attention_implementation = "eager"
    adapted = add_adapters(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), rank=RANK).train()

    def step():
        adapted(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    step()  # from the second step on, gradients exist
    held = [*adapted.parameters(), *adapted.buffers()]
    live = LiveBytes()
    live.ignore([*held, *(parameter.grad for parameter in held if parameter.grad is not None)])
    with live:
        step()
    batch = Batch(1, 128, fused=False, lora=RANK, packed=packed)
    assert trace(make(), batch).peak() == pytest.approx(live.peak, rel=0.03)


def test_shards_divide_frozen_weights_and_not_adapters():
    costs = Costs(CASES["llama"][0](), Job(4, 64, 256, lora=RANK))
    whole, sharded = (
        plan_layout(costs, layout, Device()).memory for layout in (Layout(4), Layout(4, shard=4, reshard=True))
    )
    assert sharded["adapters"] == whole["adapters"]
    largest = max(costs.stage_weights(Layout(4), [slice(0, 1)]).largest_layer_bytes, 0)
    assert sharded["weights"] < whole["weights"] / 4 + 3 * largest


def test_packed_experts_cannot_be_trained():
    with pytest.raises(ValueError, match="Packed experts cannot be trained"):
        Job(1, 64, 64, packed=True)
