"""Models: attention residuals against the standard residual stream, on the same weights, beside the paper's pseudocode.

Prefill of 512 tokens; a training step on them (forward, backward, AdamW); decoding after them, one token at a time: as
it is, and as `generate` compiles it with a static cache (Llama in float32 alone: compiling takes a while).
"""

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from rich.table import Table
from torch import Tensor
from transformers import CompileConfig, PreTrainedModel, StaticCache

from .report import cell, make_table, verdict
from .shapes import compared, shapes, token_ids, unique_parameters, variants
from .timing import Setting, Ways, compare, interleave

TOKENS = 512
DECODED = 8  # tokens in each repeat
# Workload -> most that Block and Full AttnRes may take, as a ratio to the standard model.
TARGETS = {
    "prefill": (1.02, 1.06),
    "training step": (1.04, 1.12),
    "decoding": (1.02, 1.05),
    "decoding, compiled": (1.02, 1.05),
}


def measure(setting: Setting) -> Iterator[dict]:
    """A row for each model, dtype, workload and connection."""
    for name, shape in shapes(setting.quick).items():
        for dtype in ("float32", "bfloat16"):
            models = variants(shape, getattr(torch, dtype), setting.device)
            ids = token_ids(shape.config, 16 if setting.quick else TOKENS, setting.device)
            for workload, (prepare, calls, times) in WORKLOADS.items():
                if prepare is compiled_decoding and (name, dtype) != ("Llama", "float32"):
                    continue
                seconds = interleave(
                    prepare(models, ids), replace(setting, repeats=times * setting.repeats), calls=calls
                )
                for connection in shape.connections:
                    row = {"model": name, "dtype": dtype, "workload": workload, "connection": connection}
                    pairs = {f"{way} / standard": (way, "standard") for way in ("ours", "pseudocode")}
                    yield row | {"tokens": ids.shape[1]} | compare(compared(seconds, connection), pairs)
            del models
            gc.collect()


def prefill(models: dict[str, PreTrainedModel], ids: Tensor) -> Ways:
    @torch.no_grad()
    def way(model: PreTrainedModel) -> None:
        model.eval()(ids, use_cache=True, logits_to_keep=1)

    return _for_each(models, way)


def training_step(models: dict[str, PreTrainedModel], ids: Tensor) -> Ways:
    """One optimizer for all: it steps what has a gradient, so the weights' moments are there once."""
    optimizer = torch.optim.AdamW(unique_parameters(models.values()), lr=1e-6, fused=True)

    def way(model: PreTrainedModel) -> None:
        model.train()(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return _for_each(models, way)


def decoding(models: dict[str, PreTrainedModel], ids: Tensor) -> Ways:
    """Each call adds a token to the model's own cache; all caches are of one length in each repeat."""

    def one(model: PreTrainedModel) -> Callable[[], None]:
        with torch.no_grad():
            cache = model.eval()(ids, use_cache=True, logits_to_keep=1).past_key_values

        @torch.no_grad()
        def way() -> None:
            model(ids[:, :1], past_key_values=cache, use_cache=True)

        return way

    return {name: one(model) for name, model in models.items()}


def compiled_decoding(models: dict[str, PreTrainedModel], ids: Tensor) -> Ways:
    """As [`decoding`], by the calls that `generate` makes with `cache_implementation="static"` on a GPU."""
    torch.compiler.reset()
    options = CompileConfig() if ids.is_cuda else CompileConfig(mode="default")

    def one(model: PreTrainedModel) -> Callable[[], None]:
        room = ids.shape[1] + TOKENS
        cache = StaticCache(config=model.config, max_cache_len=room)
        with torch.no_grad():
            model.eval()(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        call = model.get_compiled_call(options)

        @torch.no_grad()
        def way() -> None:
            position = cache.get_seq_length()
            if position == room:
                cache.reset()  # what a token costs does not depend on the number of those before it
                position = 0
            inputs = model.prepare_inputs_for_generation(
                ids[:, :1],
                past_key_values=cache,
                position_ids=torch.full((1, 1), int(position), device=ids.device),
                use_cache=True,
            )
            call(**inputs, return_dict=True)

        return way

    return {name: one(model) for name, model in models.items()}


# Workload -> its ways, calls in a repeat, and how often it is repeated for each repeat of the setting.
WORKLOADS: dict[str, tuple[Callable[[dict[str, PreTrainedModel], Tensor], Ways], int, int]] = {
    "prefill": (prefill, 1, 2),
    "decoding": (decoding, DECODED, 4),
    "decoding, compiled": (compiled_decoding, DECODED, 4),
    "training step": (training_step, 1, 1),
}


def _for_each(models: dict[str, PreTrainedModel], way: Callable[[PreTrainedModel], None]) -> Ways:
    return {name: (lambda model=model: way(model)) for name, model in models.items()}


def target(row: dict) -> float:
    block, full = TARGETS[row["workload"]]
    return full if row["connection"] == "Full" else block


def tables(rows: list[dict]) -> dict[str, Table]:
    columns = ["model", "dtype", "workload", "connection", "ours / standard", "target", "pseudocode / standard"]
    return {
        "models": make_table(
            "Models, time as a ratio to the standard residual stream",
            columns,
            [
                [
                    *(row[key] for key in columns[:4]),
                    cell(row, "ours / standard", 3),
                    verdict(row["ratios"]["ours / standard"]["median"], target(row)),
                    cell(row, "pseudocode / standard", 3),
                ]
                for row in rows
            ],
        )
    }
