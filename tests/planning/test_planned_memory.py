"""The peaks that a plan counts on tensors without data are the peaks of real passes, measured in two ways."""

import json
import warnings

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from attnres.configuration import load
from attnres.conversion.family import retrofit_config
from attnres.padding_attnres import CACHE_NAME
from attnres.planning import Batch, trace
from attnres.planning.live_bytes import LiveBytes

KIMI = {"num_hidden_layers": 4, "vocab_size": 512, "hidden_size": 96, "intermediate_size": 128}


def llama(residual: str, **options):
    config = LlamaConfig(
        vocab_size=512, hidden_size=96, intermediate_size=256, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=24,
    )  # fmt: skip
    return retrofit_config(config, residual, **options)


def kimi(**fields):
    return load("attnres-tiny", **KIMI, **fields)


# Name -> configuration, batch, whether layers are checkpointed.
TRAINING = {
    "a Llama with the residual stream": (llama("standard"), Batch(2, 512, dtype=torch.float32), False),
    "a Llama with Block AttnRes": (llama("attn_res", block_size=3), Batch(2, 512, dtype=torch.float32), False),
    "a Llama with Full AttnRes, checkpointed": (llama("attn_res", full=True), Batch(4, 256, dtype=torch.float32), True),
    "a Llama with four streams": (llama("mhc"), Batch(1, 512, dtype=torch.float32), False),
    "a Kimi Linear with experts": (kimi(), Batch(1, 128), False),
    "a Kimi Linear with experts, checkpointed": (kimi(attn_res_block_size=2), Batch(1, 256), True),
}

QUICK = "a Llama with the residual stream"


def plain(batch: Batch) -> Batch:
    return Batch(batch.rows, batch.length, batch.past, batch.training, batch.dtype, fused=False)


def real_model(config, batch: Batch):
    config.depth_attention_implementation = "eager"
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=batch.dtype).train(batch.training)


def allocated(path) -> int:
    """Return the largest number of bytes that the allocator held during a profile, above its start."""
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    events.sort(key=lambda event: event["ts"])
    total, peak = 0, 0
    for event in events:
        total += event["args"]["Bytes"]
        peak = max(peak, total)
    return peak


@pytest.mark.parametrize(
    "name", [next(iter(TRAINING)), *(pytest.param(n, marks=pytest.mark.slow) for n in [*TRAINING][1:])]
)
def test_the_peak_of_training_is_within_10_percent_of_a_real_step(name, tmp_path):
    config, batch, checkpointing = TRAINING[name]
    model = real_model(config, batch)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(0, config.vocab_size, (batch.rows, batch.length))

    def step():
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    step()  # from the second step on, gradients exist
    live = LiveBytes()
    live.ignore([*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())])
    with live:
        step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))
    planned = trace(config, plain(batch)).peak(checkpointing)
    assert planned == pytest.approx(live.peak, rel=0.1)
    assert planned == pytest.approx(allocated(tmp_path / "trace.json"), rel=0.1)


@pytest.mark.parametrize(
    ("config", "batch"),
    [
        (llama("attn_res", full=True), Batch(2, 512, 0, False, torch.float32)),
        (llama("attn_res", block_size=3), Batch(8, 1, 500, False, torch.float32)),
        (kimi(), Batch(4, 1, 128, False)),
        (kimi(), Batch(1, 32, 64, False)),
    ],
    ids=["prefill", "decode", "decode of Kimi Linear", "a chunk of Kimi Linear"],
)
def test_the_peak_of_inference_and_the_cache_are_those_of_a_real_pass(config, batch, tmp_path):
    model = real_model(config, batch)
    cache = DynamicCache(config=model.config)

    def run(length: int):
        ids = torch.randint(0, config.vocab_size, (batch.rows, length))
        model(input_ids=ids, use_cache=True, logits_to_keep=1, **{CACHE_NAME: cache})

    def cached() -> list[torch.Tensor]:
        states = [layer.__dict__.values() for layer in cache.layers]
        flat = [
            v for values in states for value in values for v in (value.values() if isinstance(value, dict) else [value])
        ]
        return [value for value in flat if isinstance(value, torch.Tensor)]

    with torch.no_grad():
        if batch.past:
            run(batch.past)
        live = LiveBytes()
        live.ignore([*model.parameters(), *model.buffers()])
        live.count(cached())
        with live:
            run(batch.length)
    with warnings.catch_warnings(action="error"):  # on names that `transformers` has deprecated
        planned = trace(config, plain(batch))
    assert planned.cache == sum(tensor.untyped_storage().nbytes() for tensor in cached())
    assert planned.cache + planned.peak() == pytest.approx(live.peak, rel=0.1)


def test_tensor_parallelism_divides_activations_where_the_backbone_has_a_plan(backbones):
    kept = {}
    for case in ("llama", "mixtral", "qwen3"):
        config = backbones.member_config(case, residual_connection="attn_res")
        kept[case] = [sum(trace(config, Batch(1, 64, tensor=tensor)).kept(False, [slice(None)])) for tensor in (1, 2)]
    assert all(0.4 * whole < part < 0.95 * whole for whole, part in kept.values()), kept
