"""What a training step costs with each connection, as a ratio to the standard model: all in turn, in one process."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from attnres.utils.files import atomic_write
from benchmarks.timing import Ratio, Setting, interleave, keep_freed_memory
from benchmarks.workloads import training_step

from .harness import made_by, read_stored, results_file
from .scratch import Comparison, build
from .scratch_declared import BASELINE, Experiment

REPEATS = 15
WAYS = ("eager", "compiled")


def file_of(results: Path) -> Path:
    """Beside the runs."""
    return results.with_name(f"{results.stem}-costs.json")


def measure_costs(
    experiment: Experiment, labels: Sequence[str], path: Path, device: str, ways: Sequence[str] = WAYS
) -> None:
    """Time a step of these connections (forward, backward, AdamW), as it is and with `torch.compile`, or one of these.

    Stored are ratios with their quartiles: to the standard model run the same way, and of compiled steps to eager ones,
    beside those of other connections that the file holds.

    Raises:
        ValueError: those were measured on another processor, or the file is damaged.
    """
    origin, stored = made_by(device), _stored(path) if path.exists() else None
    there, here = (_machine(own) for own in (stored["made_by"] if stored else origin, origin))
    if there != here:
        raise ValueError(
            f"{path} holds times of another machine ({_words(there)}; this is {_words(here)}): name another file by "
            "--results, and they go beside it."
        )
    compiles = " To compile them takes minutes each." if "compiled" in ways else ""
    print(f"Timing a step of {', '.join(labels)}.{compiles}", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    keep_freed_memory()
    ids = torch.randint(experiment.text.vocab_size, (experiment.batch_size, experiment.length), device=device)
    eager = {label: build(experiment, experiment.connections[label], 0).to(device) for label in labels}
    models = {
        (way, label): torch.compile(model) if way == "compiled" else model
        for way in ways
        for label, model in eager.items()
    }
    set_seed(0)
    steps = {
        name: _in_bfloat16(step, device) if experiment.bfloat16 else step
        for name, step in training_step(models, ids).items()
    }
    with torch._dynamo.config.patch(recompile_limit=2 * len(models)):  # all run through the same lines
        taken = interleave(steps, Setting(torch.get_num_threads(), REPEATS, device=device), calls=1)
    times = {name: own.wall for name, own in taken.items()}
    found = {way: {label: _ratio(times, (way, label), (way, BASELINE)) for label in eager} for way in ways}
    if set(ways) == set(WAYS):
        found["compiled to eager"] = {label: _ratio(times, ("compiled", label), ("eager", label)) for label in eager}
    if stored:
        found = stored["ratios"] | {way: stored["ratios"].get(way, {}) | of_way for way, of_way in found.items()}
    atomic_write(path, json.dumps({"ratios": found, "made_by": origin}, indent=1) + "\n")
    print(
        f"{path}: "
        + "; ".join(f"{label} {ratio['median']:.2f}" for label, ratio in found[ways[0]].items())
        + f" ({ways[0]})"
    )


def costs_of(comparison: Comparison) -> dict[str, dict[str, float]]:
    """What was measured beside its runs, or else beside those of the experiment that its declaration names."""
    other = comparison.experiment.costs
    return costs(file_of(comparison.store.path)) or (costs(file_of(results_file(other))) if other else {})


def costs(path: Path) -> dict[str, dict[str, float]]:
    """A way of [`WAYS`] -> label -> the median ratio, of what was measured."""
    if not path.exists():
        return {}
    medians = _medians(path, read_stored(path, {"ratios"})["ratios"])
    return {way: of_way for way, of_way in medians.items() if way in WAYS}


def _stored(path: Path) -> dict[str, Any]:
    """What new ratios are added to. Raises ValueError: they could not be, which is said before minutes of timing."""
    stored = read_stored(path, {"ratios", "made_by"})
    _medians(path, stored["ratios"])
    if not isinstance(stored["made_by"], dict):
        raise ValueError(f"{path} is damaged (made_by is {stored['made_by']!r}): move it away.")
    return stored


def _medians(path: Path, ratios: Any) -> dict[str, dict[str, float]]:
    """Of all ways. Raises ValueError: a ratio has none above 0."""
    try:
        medians = {way: {label: ratio["median"] for label, ratio in of_way.items()} for way, of_way in ratios.items()}
        if all(0 < median < math.inf for of_way in medians.values() for median in of_way.values()):
            return medians
    except (KeyError, TypeError, AttributeError):
        pass
    raise ValueError(f"{path} is damaged (a ratio has no median above 0): move it away.")


def _machine(origin: Mapping[str, str]) -> dict[str, str]:
    """What ratios depend on, of what made them."""
    return {name: value for name, value in origin.items() if name in ("torch", "device", "forced_avx512")}


def _words(machine: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in machine.items())


def _ratio(times: Mapping[tuple[str, str], list[float]], way: tuple[str, str], to: tuple[str, str]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in asdict(Ratio.of(times[way], times[to])).items()}


def _in_bfloat16(way: Callable[[], object], device: str) -> Callable[[], object]:
    def within() -> None:
        with torch.autocast(device, torch.bfloat16):
            way()

    return within
