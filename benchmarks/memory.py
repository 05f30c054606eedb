"""Peak memory of a training step: attention residuals against the standard residual stream.

Counted by the allocator, tensor by tensor, so that two runs give the same number; what a process holds in all differs
from run to run by more than the target. Two ratios: of everything (weights, moments of AdamW, gradients, activations),
and of what only the step holds (gradients and activations).
"""

import gc
import os
from collections.abc import Callable, Iterator

import torch
from rich.table import Table
from torch import nn

from .models import TOKENS
from .report import make_table, verdict
from .shapes import compared, shapes, token_ids, variants
from .timing import Setting
from .workloads import training_step

TARGET = 1.05  # of Block AttnRes
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own notes on the terminal


def measure(setting: Setting) -> Iterator[dict]:
    """A row for each model and connection, in float32."""
    for name, shape in shapes(setting.quick).items():
        models = variants(shape, torch.float32, setting.device)
        steps = training_step(models, token_ids(shape.config, 16 if setting.quick else TOKENS, 1, setting.device))
        found = {variant: step_bytes(models[variant], step, setting.device) for variant, step in steps.items()}
        for connection in shape.connections:
            own = compared(found, connection)
            ratios = {
                f"{way} / standard, {key}": own[way][key] / own["standard"][key]
                for way in own
                for key in ("all", "step")
                if way != "standard"
            }
            yield {"model": name, "dtype": "float32", "connection": connection, "ratios": ratios, "bytes": own}
        del models, steps
        gc.collect()


def step_bytes(model: nn.Module, step: Callable[[], object], device: str) -> dict[str, int]:
    """Peak bytes of a training step: of all that exists in it, and of what only the step holds."""
    step()  # the moments exist from here on
    # A weight, and two moments of it; gradients are made in the step, and go with it.
    held = sum(3 * parameter.nbytes for parameter in model.parameters())
    peak = peak_bytes(step, device)
    return {"all": held + peak, "step": peak}


def peak_bytes(function: Callable[[], object], device: str = "cpu") -> int:
    """The most bytes that a call held at once beyond those held before it, by the allocator."""
    if device != "cpu":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = function()
    del result
    held = peak = 0
    memory = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(memory, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def tables(rows: list[dict]) -> dict[str, Table]:
    def show(row: dict, ratio: str) -> str:
        return f"{row['ratios'][ratio]:.3f}" if ratio in row["ratios"] else "-"

    def judge(row: dict) -> str:
        return "-" if row["connection"] == "Full" else verdict(row["ratios"]["ours / standard, all"], TARGET)

    others = ["ours eager / standard, all", "pseudocode / standard, all", "ours / standard, step"]
    others += ["ours eager / standard, step", "pseudocode / standard, step"]
    return {
        "memory": make_table(
            "Peak memory of a training step, as a ratio to the standard residual stream",
            ["model", "connection", "ours / standard, all", "target", *others],
            [
                [row["model"], row["connection"], show(row, "ours / standard, all"), judge(row)]
                + [show(row, ratio) for ratio in others]
                for row in rows
            ],
        )
    }
