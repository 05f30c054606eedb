"""Measure models on a CPU with one layer of the fast path switched off at a time.

A layer that makes no model 2% faster is not worth its code.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib import import_module
from unittest.mock import patch

import torch
from rich.table import Table
from transformers import PreTrainedModel

from attnres import accelerated, attn_res_attnres

from .report import cell, make_table
from .shapes import CONNECTIONS, STANDARD, build, connect, llama, token_ids
from .timing import Setting, Ways, compare, interleave
from .workloads import decoding, prefill, training_step

# Not by `from attnres.accelerated import`, which finds the function of this name.
inference_plan = import_module("attnres.accelerated.inference_plan")
TOKENS, DECODED = 512, 8
EVERYTHING = "ours"


def _no_plan(model: PreTrainedModel, connection: type, key_norm: type) -> None:
    """Make no plan, so that the model calls its connections and norms one by one."""


@contextmanager
def eager(model: PreTrainedModel) -> Iterator[None]:
    """Run depth attention by PyTorch's operations, which is how it runs if only PyTorch is installed."""
    with patch.object(model.config, "depth_attention_implementation", "eager"):
        yield


@contextmanager
def without_plan(model: PreTrainedModel) -> Iterator[None]:
    """Let each connection read by itself, without two phases and without the norm that follows."""
    with patch.object(accelerated, "inference_plan", _no_plan):
        yield


@contextmanager
def without_two_phases(model: PreTrainedModel) -> Iterator[None]:
    """Compute one attention for each sublayer."""
    with patch.object(inference_plan, "two_phases_pay", lambda count, numbers: False):
        yield


@contextmanager
def without_fused_norm(model: PreTrainedModel) -> Iterator[None]:
    """Compute the norm in a separate pass after the read."""
    with (
        patch.object(inference_plan, "_plain_norm", lambda norm: None),
        patch.object(accelerated, "training_plan", _no_plan),
    ):
        yield


@contextmanager
def without_later_grads(model: PreTrainedModel) -> Iterator[None]:
    """Let autograd, and not the backward kernel, add the gradients of sublayers that read a source later.

    A read with its norm always adds them, so the norm is computed apart too.
    """
    attend = attn_res_attnres.attend
    with (
        patch.object(attn_res_attnres, "attend", lambda *args, fuse_later_grads: attend(*args)),
        patch.object(accelerated, "training_plan", _no_plan),
    ):
        yield


LAYERS: dict[str, Callable[[PreTrainedModel], object]] = {
    "eager": eager,
    "no inference plan": without_plan,
    "no two phases": without_two_phases,
    "no fused norm": without_fused_norm,
    "no fused gradients": without_later_grads,
}
_LAYERS_WITHOUT_GRADIENTS = ("eager", "no inference plan", "no fused norm")
# Workload -> function that prepares it, calls per repeat, repeats per repeat of the setting, and the layers it uses.
WORKLOADS: dict[str, tuple[Callable, int, int, tuple[str, ...]]] = {
    "prefill": (prefill, 1, 2, (*_LAYERS_WITHOUT_GRADIENTS, "no two phases")),
    "decoding": (decoding, DECODED, 4, _LAYERS_WITHOUT_GRADIENTS),
    "training step": (training_step, 1, 1, ("eager", "no fused norm", "no fused gradients")),
}


def measure(setting: Setting) -> Iterator[dict]:
    """Yield one row per shape, dtype, workload and connection."""
    shapes = {"12 x 1024": llama(), "24 x 512": llama(width=512, layers=24)}
    if setting.quick:
        shapes = {"2 x 64": llama(width=64, layers=2)}
    for shape, config in shapes.items():
        for dtype in ("float32",) if setting.quick else ("float32", "bfloat16"):
            standard = build(config, getattr(torch, dtype), setting.device)
            ids = token_ids(config, 16 if setting.quick else TOKENS, 1, setting.device)
            for connection in ("Block S=4", "Full"):
                model = connect(standard, **CONNECTIONS[connection])
                for workload, (prepare, calls, times, layers) in WORKLOADS.items():
                    ways = prepare({STANDARD: standard} | dict.fromkeys((EVERYTHING, *layers), model), ids)
                    repeats = replace(setting, repeats=times * setting.repeats)
                    seconds = interleave(switched(ways, model, LAYERS), repeats, calls=calls)
                    pairs = {f"{way} / {STANDARD}": (way, STANDARD) for way in (EVERYTHING, *layers)}
                    row = {"model": shape, "dtype": dtype, "workload": workload, "connection": connection}
                    yield row | compare(seconds, pairs)
            del standard, model
            gc.collect()


def switched(
    ways: Mapping[str, Callable[[], object]],
    model: PreTrainedModel,
    layers: Mapping[str, Callable[[PreTrainedModel], object]],
) -> Ways:
    """Wrap each way that is named after a layer, so that it runs without this layer.

    Args:
        ways: functions to measure, by name.
        model: the model that they run.
        layers: name of a layer -> context that switches it off in a model.
    """

    def switch(way: Callable[[], object], layer: Callable[[PreTrainedModel], object]) -> Callable[[], None]:
        def run() -> None:
            with ExitStack() as stack:
                stack.enter_context(layer(model))
                way()

        return run

    return {name: switch(way, layers[name]) if name in layers else way for name, way in ways.items()}


def tables(rows: list[dict]) -> dict[str, Table]:
    """Return the table of all rows, by its name in the README."""
    columns = ["model", "dtype", "workload", "connection", EVERYTHING, *LAYERS]
    cells = [
        [*(row[key] for key in columns[:4]), *(cell(row, f"{way} / {STANDARD}", 3) for way in columns[4:])]
        for row in rows
    ]
    title = "The fast path, each layer switched off by itself, as a ratio to the standard residual stream"
    return {"layers": make_table(title, columns, cells)}
