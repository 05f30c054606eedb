"""The time and memory of a training step with each connection, as ratios to the standard model, in one process."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from transformers import set_seed

from benchmarks.memory import step_bytes
from benchmarks.timing import Ratio, Setting, interleave, keep_freed_memory
from benchmarks.workloads import training_step

from .declared import BASELINE, ScratchExperiment
from .runs import made_by
from .scratch import DeclaredComparison, build
from .store import RunStore, results_file

REPEATS = 15
WAYS = ("eager", "compiled")
TITLES = {"eager": "not compiled", "compiled": "compiled"}  # the ways in the headings of tables


def measure_costs(comparison: DeclaredComparison, labels: Sequence[str], ways: Sequence[str] = WAYS) -> None:
    """Time a training step (forward, backward, AdamW) of some connections, and store its ratio to the standard model.

    The median and the quartiles of ratios to the standard model that runs the same way are stored, and the peak memory
    of an eager step. If both ways are timed, the ratios of compiled steps to eager ones are stored too. All of this
    replaces what was stored of the timed ways, perhaps on another machine. The ratios of the other way stay.

    Args:
        comparison: The models, and the store of the ratios.
        labels: The connections, the standard model among them.
        ways: `eager`, `compiled` (`torch.compile`) or both.
    """
    experiment, store, device = comparison.experiment, comparison.store, comparison.device
    print(f"Timing a step of {', '.join(labels)}. To compile a model takes minutes.", flush=True)
    keep_freed_memory()
    ids = torch.randint(experiment.text.vocab_size, (experiment.batch_size, experiment.length), device=device)
    # pyrefly: ignore[bad-argument-type]  # `transformers` wraps `to`, and the checker loses its `self`
    eager = {label: build(experiment, experiment.connections[label], 0).to(device) for label in labels}
    models = {
        f"{way} {label}": torch.compile(model) if way == "compiled" else model
        for way in ways
        for label, model in eager.items()
    }
    set_seed(0)
    # pyrefly: ignore[bad-argument-type]  # a compiled model has the methods of the model
    steps = dict(training_step(models, ids))
    if experiment.bfloat16:
        steps = {name: torch.autocast(device, torch.bfloat16)(step) for name, step in steps.items()}
    # All models run through the same lines of code, each of which is compiled anew for each model.
    with torch._dynamo.config.patch(recompile_limit=2 * len(models)):
        timings = interleave(steps, Setting(torch.get_num_threads(), REPEATS, device=device), calls=1)

    def ratio(step: str, base: str) -> dict[str, float]:
        return {name: round(v, 4) for name, v in asdict(Ratio.of(timings[step].wall, timings[base].wall)).items()}

    ratios = {way: {label: ratio(f"{way} {label}", f"{way} {BASELINE}") for label in eager} for way in ways}
    if set(ways) == set(WAYS):
        ratios["compiled to eager"] = {label: ratio(f"compiled {label}", f"eager {label}") for label in eager}
    memory = {}
    if "eager" in ways:
        peaks = {label: step_bytes(model, steps[f"eager {label}"], device)["step"] for label, model in eager.items()}
        memory = {label: round(peak / peaks[BASELINE], 4) for label, peak in peaks.items()}
    with store.update():
        stored = store.costs
        kept = {way for way in stored.get("ratios", {}) if way in WAYS and way not in ways}
        store.costs = {
            "ratios": {way: stored["ratios"][way] for way in kept} | ratios,
            "memory": memory or stored.get("memory", {}),
            "made_by": {way: stored["made_by"][way] for way in kept} | dict.fromkeys(ways, made_by(device)),
        }


def memory_of(comparison: DeclaredComparison) -> dict[str, float]:
    """Return label -> peak memory of a training step (activations and gradients); empty if it was not measured."""
    return _stored(comparison).get("memory", {})


def costs_of(comparison: DeclaredComparison) -> dict[str, dict[str, float]]:
    """Return way -> label -> time of a step as a ratio to the standard model.

    If none is stored with the runs, those of the experiment that the declaration names are used.
    """
    ratios = _stored(comparison).get("ratios", {})
    return {way: {label: ratio["median"] for label, ratio in ratios[way].items()} for way in WAYS if way in ratios}


def _stored(comparison: DeclaredComparison) -> dict[str, Any]:
    costs, other = comparison.store.costs, comparison.experiment.costs
    return RunStore(ScratchExperiment.load(other), results_file(other)).costs if not costs and other else costs
