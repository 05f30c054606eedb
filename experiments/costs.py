"""What a training step costs with each connection, as a ratio to the standard model: all in turn, in one process."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import set_seed

from attnres.files import atomic_write
from benchmarks.timing import Ratio, Setting, interleave, keep_freed_memory
from benchmarks.workloads import training_step

from .harness import made_by
from .scratch import BASELINE, Experiment, build

REPEATS = 15


def file_of(results: Path) -> Path:
    """Beside the runs."""
    return results.with_name(f"{results.stem}-costs.json")


def measure_costs(experiment: Experiment, path: Path, device: str) -> None:
    """Time a step of all connections (forward, backward, AdamW), and store the ratios with their quartiles."""
    path.parent.mkdir(parents=True, exist_ok=True)
    keep_freed_memory()
    ids = torch.randint(experiment.text.vocab_size, (experiment.batch_size, experiment.length), device=device)
    models = {label: build(experiment, fields, 0).to(device) for label, fields in experiment.connections.items()}
    set_seed(0)
    ways = {
        label: _in_bfloat16(way, device) if experiment.bfloat16 else way
        for label, way in training_step(models, ids).items()
    }
    times = interleave(ways, Setting(torch.get_num_threads(), REPEATS, device=device), calls=1)
    ratios = {label: asdict(Ratio.of(taken.wall, times[BASELINE].wall)) for label, taken in times.items()}
    atomic_write(path, json.dumps({"ratios": ratios, "made_by": made_by(device)}, indent=1) + "\n")


def costs(path: Path) -> dict[str, float]:
    """label -> the median ratio, of what was measured."""
    if not path.exists():
        return {}
    return {label: ratio["median"] for label, ratio in json.loads(path.read_text())["ratios"].items()}


def _in_bfloat16(way: Callable[[], object], device: str) -> Callable[[], object]:
    def within() -> None:
        with torch.autocast(device, torch.bfloat16):
            way()

    return within
