"""Compare models with attention residuals with the standard residual stream, on the same weights.

It measures prefill of 512 tokens, a training step on them (forward, backward, AdamW), and decoding after them, one
token at a time. Decoding runs eagerly, and as `generate` compiles it with a static cache (on Llama only, because
compiling takes a while). The paper's pseudocode is measured too, and a second copy of the standard model, which shows
how far a ratio is from 1 by chance.
"""

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .shapes import STANDARD, Shape, compared, copy_with_shared_weights, llama, shapes, token_ids, variants
from .stored import cell, markdown_table, verdict
from .timing import Setting, Ways, compare, interleave
from .workloads import compiled_decoding, decoding, prefill, training_step

TOKENS = 512
DECODED = 8  # tokens in each repeat
AGAIN = "standard again"
# Workload -> targets for Block and Full AttnRes, as ratios to the standard model.
TARGETS = {
    "prefill": (1.02, 1.06),
    "training step": (1.04, 1.12),
    "decoding": (1.02, 1.05),
    "decoding, compiled": (1.02, 1.05),
}
# In a model this small, the time depends on the number of operations and not on their sizes.
TOY = "Llama, d = 64"
TOY_TARGETS = {"prefill": 1.3, "training step": 1.1, "decoding": 1.3}


def measure(setting: Setting) -> Iterator[dict]:
    """Yield one row per model, dtype, workload and connection."""
    measured = shapes(setting.quick)
    if not setting.quick:
        measured |= {TOY: Shape(llama(width=64, layers=5), ("Block S=4", "Full"))}
    for name, shape in measured.items():
        for dtype in ("float32",) if setting.quick else ("float32", "bfloat16"):
            # Without depth attention by PyTorch's operations, which the part `ops` measures.
            models = variants(shape, getattr(torch, dtype), setting.device, eager=False)
            models[AGAIN] = copy_with_shared_weights(models[STANDARD])
            ids = token_ids(shape.config, 16 if setting.quick else TOKENS, 1, setting.device)
            for workload, (prepare, calls, times) in WORKLOADS.items():
                if prepare is compiled_decoding and name != "Llama":
                    continue
                chosen, connections = models, shape.connections
                if setting.quick and prepare is compiled_decoding:  # to compile all takes most of a quick run
                    connections = connections[:1]
                    chosen = {way: model for way, model in models.items() if way not in shape.connections[1:]}
                seconds = interleave(
                    prepare(chosen, ids), replace(setting, repeats=times * setting.repeats), calls=calls
                )
                for connection in connections:
                    row = {"model": name, "dtype": dtype, "workload": workload, "connection": connection}
                    by_way = compared(seconds, connection) | {AGAIN: seconds[AGAIN]}
                    pairs = {f"{way} / standard": (way, STANDARD) for way in ("ours", AGAIN, "pseudocode")}
                    yield row | {"tokens": ids.shape[1]} | compare(by_way, pairs)
            del models
            gc.collect()


# Workload -> function that prepares its ways, calls per repeat, and repeats per repeat of the setting.
WORKLOADS: dict[str, tuple[Callable[[dict[str, PreTrainedModel], Tensor], Ways], int, int]] = {
    "prefill": (prefill, 1, 4),
    "decoding": (decoding, DECODED, 4),
    "decoding, compiled": (compiled_decoding, DECODED, 4),
    "training step": (training_step, 1, 2),
}


def target(row: dict) -> float:
    """Return the target ratio of a row."""
    if row["model"] == TOY:
        return TOY_TARGETS[row["workload"]]
    block, full = TARGETS[row["workload"]]
    return full if row["connection"] == "Full" else block


def tables(rows: list[dict]) -> dict[str, str]:
    """Return the table of all rows, by its name in the README."""
    columns = ["model", "dtype", "workload", "connection", "ours / standard", "target"]
    columns += [f"{AGAIN} / standard", "pseudocode / standard"]
    return {
        "models": markdown_table(
            "Models, time as a ratio to the standard residual stream",
            columns,
            [
                [
                    *(row[key] for key in columns[:4]),
                    cell(row, "ours / standard", 3),
                    verdict(row["ratios"]["ours / standard"]["median"], target(row)),
                    *(cell(row, ratio, 3) for ratio in columns[6:]),
                ]
                for row in rows
            ],
        )
    }
