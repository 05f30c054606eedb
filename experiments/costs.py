"""The cost of a training step with each connection, as a ratio to the standard model, timed in turn in one process."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from transformers import set_seed

from benchmarks.timing import Ratio, Setting, interleave, keep_freed_memory
from benchmarks.workloads import training_step

from .declared import BASELINE
from .runs import made_by
from .scratch import DeclaredComparison, build, stored_comparison

REPEATS = 15
WAYS = ("eager", "compiled")


def measure_costs(comparison: DeclaredComparison, labels: Sequence[str], ways: Sequence[str] = WAYS) -> None:
    """Time a training step (forward, backward, AdamW) of some connections, and store its ratio to the standard model.

    Stored are the median and the quartiles of ratios to the standard model that runs the same way and, if both ways
    are timed, of compiled steps to eager ones. Ratios of other connections stay.

    Args:
        comparison: names the models, and holds the store that the ratios go into.
        labels: of the connections, the standard model among them.
        ways: `eager`, `compiled` (`torch.compile`) or both.

    Raises:
        ValueError: the stored ratios were measured on another machine.
    """
    experiment, store, device = comparison.experiment, comparison.store, comparison.device
    origin, stored = made_by(device), store.costs
    there, here = (_machine(made) for made in (stored.get("made_by", origin), origin))
    if there != here:
        raise ValueError(
            f"{store.path} holds times of another machine ({there}; this is {here}): name another file by --results."
        )
    compiles = " To compile them takes minutes each." if "compiled" in ways else ""
    print(f"Timing a step of {', '.join(labels)}.{compiles}", flush=True)
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
    # All models run through the same lines of code, each of which is compiled anew for each model.
    with torch._dynamo.config.patch(recompile_limit=2 * len(models)):
        timings = interleave(steps, Setting(torch.get_num_threads(), REPEATS, device=device), calls=1)

    def ratio(step: tuple[str, str], base: tuple[str, str]) -> dict[str, float]:
        return {name: round(v, 4) for name, v in asdict(Ratio.of(timings[step].wall, timings[base].wall)).items()}

    ratios = {way: {label: ratio((way, label), (way, BASELINE)) for label in eager} for way in ways}
    if set(ways) == set(WAYS):
        ratios["compiled to eager"] = {label: ratio(("compiled", label), ("eager", label)) for label in eager}
    earlier = stored.get("ratios", {})
    store.set_costs(
        {"ratios": earlier | {way: earlier.get(way, {}) | own for way, own in ratios.items()}, "made_by": origin}
    )
    medians = "; ".join(f"{label} {own['median']:.2f}" for label, own in ratios[ways[0]].items())
    print(f"{store.path}: {medians} ({ways[0]})")


def costs_of(comparison: DeclaredComparison) -> dict[str, dict[str, float]]:
    """Return way -> label -> time of a step as a ratio to the standard model.

    If none is stored with the runs, those of the experiment that the declaration names are used.
    """
    ratios = comparison.store.costs.get("ratios", {})
    if not ratios and comparison.experiment.costs and (other := stored_comparison(comparison.experiment.costs)):
        ratios = other.store.costs.get("ratios", {})
    return {way: {label: own["median"] for label, own in ratios[way].items()} for way in WAYS if way in ratios}


def _machine(origin: Mapping[str, Any]) -> str:
    """Return the part of a machine's description that ratios depend on."""
    return ", ".join(f"{name} {origin[name]}" for name in ("torch", "device", "forced_avx512") if name in origin)


def _in_bfloat16(step: Callable[[], object], device: str) -> Callable[[], object]:
    def within() -> None:
        with torch.autocast(device, torch.bfloat16):
            step()

    return within
