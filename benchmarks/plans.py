"""Write the tables of layouts: `python -m benchmarks.plans`. No device is needed."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from transformers import LlamaConfig

from attnres import ResidualConfig
from attnres.analysis.tables import markdown, update_tables
from attnres.commands.plan import gathered, gigabytes
from attnres.configuration import load
from attnres.conversion.family import retrofit_config
from attnres.planning import (
    Batch,
    Costs,
    Device,
    Job,
    Pipeline,
    Plan,
    missing_engine,
    overhead,
    paper_sends,
    search,
    trace,
)

PAGE = Path(__file__).resolve().with_name("layouts.md")
LLAMA = "a Llama of 70B"
H100, H200 = Device(memory=80e9), Device(memory=141e9, memory_bandwidth=4.8e12)
# Configuration -> context, tokens of a step, and numbers of devices.
TRAINED = {
    "attnres-194m": (8192, 192 * 8192, (8, 64)),
    "attnres-241m": (8192, 256 * 8192, (8, 64)),
    "attnres-296m": (8192, 320 * 8192, (8, 64)),
    "attnres-436m": (8192, 384 * 8192, (8, 64)),
    "attnres-528m": (8192, 432 * 8192, (8, 64)),
    "attnres-48b-a3b": (4096, 2**23, (8, 16, 64, 256, 1024)),
    LLAMA: (8192, 2**22, (64, 256, 1024)),
    "kimi-k3": (4096, 2**24, (256, 512, 1024, 2048)),
}
# The same, but the second number counts the tokens in all caches.
SERVED = {
    "attnres-48b-a3b": (32768, 64 * 32768, (8, 16)),
    "kimi-k3": (32768, 256 * 32768, (64, 128, 256)),
}
BANDWIDTHS = (25e9, 50e9, 450e9)  # bytes per second: 200 and 400 Gbit/s of a network, and links within a node


def llama_70b() -> ResidualConfig:
    """Return a Llama of 70B parameters with Block AttnRes, for the shape alone."""
    config = LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, max_position_embeddings=8192, tie_word_embeddings=False,
    )  # fmt: skip
    return retrofit_config(config, block_size=20)


def rows(jobs: dict[str, tuple[int, int, tuple[int, ...]]], training: bool) -> Iterator[list[str]]:
    """Yield the best layout of each configuration, number of devices, and size of device."""
    for name, (context, tokens, counts) in jobs.items():
        config = llama_70b() if name == LLAMA else load(name)
        costs = Costs(config, Job(1, context, tokens, training))
        for count in counts:
            for device in (H100, H200):
                result = search(costs, device, replace(costs.job, devices=count))
                head = [f"`{name}`" if name != LLAMA else name, f"{count:,}", gigabytes(device.memory)]
                if not result.fitting:
                    part = result.nearest.dominant_memory
                    text = f"none; the nearest needs {gigabytes(result.nearest.total_memory)} GB, mostly {part}"
                    yield [*head, text, *[""] * (7 if training else 5)]
                    continue
                yield [*head, *cells(result.fitting[0], count, training)]


def cells(plan: Plan, devices: int, training: bool) -> Iterator[str]:
    """Yield the cells of a plan after its model and devices."""
    layout = plan.layout
    yield f"{layout.data} x {layout.tensor} x {layout.pipeline}" + (f" x {layout.virtual}" * (layout.virtual > 1))
    yield str(layout.expert)
    if training:
        yield f"{layout.shard} {gathered(layout)}" if layout.shard > 1 else "1"
        yield "yes" if layout.checkpointing else "no"
    yield f"{gigabytes(plan.total_memory)}, mostly {plan.dominant_memory}"
    yield f"{plan.tokens_per_second / devices:,.0f}"
    yield plan.dominant_time
    yield "yes" if missing_engine(layout, training) is None else "no"


def prefill_rows() -> Iterator[list[str]]:
    """Yield the block states of Kimi K3 for a prompt of 128K tokens."""
    config, length = load("kimi-k3"), 131072
    costs = Costs(config, Job(8, length, length, training=False))
    whole = trace(config, Batch(1, length, training=False)).block_states
    yield ["whole prompt, one device", gigabytes(whole), "15"]
    yield ["sharded along the sequence among 8 devices", gigabytes(whole / 8), "1.9"]
    yield ["the same, in chunks of 16K tokens", gigabytes(costs.trace(8).block_states), "below 0.3"]


def overhead_rows() -> Iterator[list[str]]:
    """Yield the predicted overhead of Block AttnRes under pipeline parallelism."""
    costs = Costs(load("kimi-k3"), Job(1, 4096, 4096))
    for ranks in (2, 4, 8, 16):
        for virtual in (1, 2):
            row = [str(ranks), str(virtual)]
            for bandwidth in BANDWIDTHS:
                # Each stage is a node of 8 devices, and each of them sends its part of the tokens.
                pipeline = Pipeline(ranks, virtual, 4 * ranks, bandwidth * 8, devices_per_stage=8)
                shares = [overhead(costs, H100, replace(pipeline, cached=cached)) for cached in (False, True)]
                row.append(" / ".join(f"{share:.1%}" for share in shares))
            yield row


def sent_rows() -> Iterator[list[str]]:
    """Yield the numbers of block tensors that the paper's formulas send, for one block that ends in each stage."""
    for ranks in (2, 4, 8, 16):
        for virtual in (1, 2, 4):
            naive, cached = (paper_sends(ranks, virtual, 1, is_cached) for is_cached in (False, True))
            yield [str(ranks), str(virtual), str(naive), str(cached), f"{naive / cached:.2f}"]


def main() -> None:
    """Compute all tables, and write them into the page."""
    rates = [f"{bandwidth / 1e9:.0f} GB/s" for bandwidth in BANDWIDTHS]
    head = "model", "devices", "GB", "layout", "expert"
    tail = "GB used", "tokens/s and device", "time is mostly", "runs here"
    tables = {
        "training layouts": markdown([*head, "shards", "recompute", *tail], rows(TRAINED, training=True)),
        "serving layouts": markdown([*head, *tail], rows(SERVED, training=False)),
        "prefill states": markdown(["block states of `kimi-k3`, 128K tokens", "GB", "paper"], prefill_rows()),
        "pipeline overhead": markdown(["P", "V", *(f"{rate}: naive / cached" for rate in rates)], overhead_rows()),
        "pipeline sends": markdown(["P", "V", "naive", "cached", "ratio"], sent_rows()),
    }
    update_tables(PAGE, tables)


if __name__ == "__main__":
    main()
