"""Compare the peak memory of a training step with that of the standard residual stream.

The allocator counts it tensor by tensor, so that two runs give the same number. The memory of the whole process would
differ between runs by more than the target. There are two ratios: of all tensors (weights, moments of AdamW, gradients,
activations), and of those that live within the step (gradients, activations).
"""

import gc
import os
from collections.abc import Callable, Iterator

import torch
from torch import nn

from .models import TOKENS
from .shapes import compared, shapes, token_ids, variants
from .stored import markdown_table, verdict
from .timing import Setting
from .workloads import training_step

TARGET = 1.05  # for Block AttnRes
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the profiler on the terminal


def measure(setting: Setting) -> Iterator[dict]:
    """Yield one row per model and connection, in float32."""
    for name, shape in shapes(setting.quick).items():
        models = variants(shape, torch.float32, setting.device)
        steps = training_step(models, token_ids(shape.config, 16 if setting.quick else TOKENS, 1, setting.device))
        peaks = {variant: step_bytes(models[variant], step, setting.device) for variant, step in steps.items()}
        for connection in shape.connections:
            by_way = compared(peaks, connection)
            ratios = {
                f"{way} / standard, {key}": by_way[way][key] / by_way["standard"][key]
                for way in by_way
                for key in ("all", "step")
                if way != "standard"
            }
            yield {"model": name, "dtype": "float32", "connection": connection, "ratios": ratios, "bytes": by_way}
        del models, steps
        gc.collect()


def step_bytes(model: nn.Module, step: Callable[[], object], device: str) -> dict[str, int]:
    """Return the peak bytes of a training step: of `all` tensors, and of those that live within the `step`."""
    step()  # the optimizer makes its moments in the first step
    # Each parameter counts three times: itself and its two moments. Its gradient lives within the step.
    held = sum(3 * parameter.nbytes for parameter in model.parameters())
    peak = peak_bytes(step, device)
    return {"all": held + peak, "step": peak}


def peak_bytes(function: Callable[[], object], device: str = "cpu") -> int:
    """Return the most bytes that a call holds at once, beyond those held before it, as the allocator counts them."""
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
    # pyrefly: ignore[missing-attribute]  # the profiler is there once it has run
    memory = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(memory, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def tables(rows: list[dict]) -> dict[str, str]:
    """Return the table of all rows, by its name in the README."""

    def show(row: dict, ratio: str) -> str:
        return f"{row['ratios'][ratio]:.3f}" if ratio in row["ratios"] else "-"

    def judge(row: dict) -> str:
        return "-" if row["connection"] == "Full" else verdict(row["ratios"]["ours / standard, all"], TARGET)

    others = ["ours eager / standard, all", "pseudocode / standard, all", "ours / standard, step"]
    others += ["ours eager / standard, step", "pseudocode / standard, step"]
    return {
        "memory": markdown_table(
            "Peak memory of a training step, as a ratio to the standard residual stream",
            ["model", "connection", "ours / standard, all", "target", *others],
            [
                [row["model"], row["connection"], show(row, "ours / standard, all"), judge(row)]
                + [show(row, ratio) for ratio in others]
                for row in rows
            ],
        )
    }
