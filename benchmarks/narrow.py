"""Measure training steps of narrow and deep models on one thread, eagerly.

Attention residuals cost most in these models, because the rest of a layer grows with the square of the width. The
shapes are like those of `experiments`: 8 rows of 128 tokens, a vocabulary of 2048, and blocks of six sublayers.
"""

import gc
from collections.abc import Callable, Iterator

import torch
from rich.table import Table
from transformers import PreTrainedModel

from .layers import EVERYTHING, eager, switched, without_fused_norm
from .report import cell, make_table, verdict
from .shapes import STANDARD, build, connect, llama, token_ids
from .timing import Setting, compare, interleave
from .workloads import training_step

SHAPES = {"12 x 64": (64, 12), "24 x 128": (128, 24)}  # layers x width
BLOCK_SIZE, VOCABULARY, BATCH, TOKENS = 6, 2048, 8, 128
TARGET = 1.12
LAYERS: dict[str, Callable[[PreTrainedModel], object]] = {"no fused norm": without_fused_norm, "eager": eager}


def measure(setting: Setting) -> Iterator[dict]:
    """Yield one row per shape, measured on one thread whatever the setting says."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name, (width, layers) in {"2 x 64": (64, 2)}.items() if setting.quick else SHAPES.items():
            config = llama(width, layers)
            config.vocab_size = VOCABULARY
            standard = build(config, torch.float32, setting.device)
            model = connect(standard, block_size=BLOCK_SIZE)
            ids = token_ids(config, TOKENS, 1 if setting.quick else BATCH, setting.device)
            ways = training_step({STANDARD: standard} | dict.fromkeys((EVERYTHING, *LAYERS), model), ids)
            seconds = interleave(switched(ways, model, LAYERS), setting, calls=1)
            row = {"model": name, "workload": "training step", "block_size": BLOCK_SIZE, "tokens": ids.numel()}
            yield row | compare(seconds, {f"{way} / {STANDARD}": (way, STANDARD) for way in (EVERYTHING, *LAYERS)})
            del standard, model, ways
            gc.collect()
    finally:
        torch.set_num_threads(before)


def tables(rows: list[dict]) -> dict[str, Table]:
    """Return the table of all rows, by its name in the README."""
    columns = ["layers x width", "S", EVERYTHING, "target", *LAYERS]
    cells = [
        [
            row["model"],
            str(row["block_size"]),
            cell(row, f"{EVERYTHING} / {STANDARD}", 3),
            verdict(row["ratios"][f"{EVERYTHING} / {STANDARD}"]["median"], TARGET),
            *(cell(row, f"{layer} / {STANDARD}", 3) for layer in LAYERS),
        ]
        for row in rows
    ]
    title = "A training step of narrow models on one thread, as a ratio to the standard residual stream"
    return {"narrow": make_table(title, columns, cells)}
