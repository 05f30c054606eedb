"""Costs of training steps are measured in turn, and stored beside the runs."""

from dataclasses import replace
from importlib.metadata import version

import pytest

from experiments import store
from experiments.costs import costs_of, measure_costs, memory_of
from experiments.declared import ScratchExperiment
from experiments.scratch import DeclaredComparison
from experiments.store import RunStore

from .stored_runs import SMALL, stored


class Timing:
    wall = [1.0, 1.0]


def set_costs(runs: RunStore, **medians: float) -> None:
    with runs.update():
        runs.costs = {"ratios": {"eager": {label: {"median": median} for label, median in medians.items()}}}


@pytest.mark.slow
def test_costs_are_those_of_training_steps(tmp_path):
    """A model with eight times the layers takes longer than the standard model."""
    standard = {"residual_connection": "standard", "num_hidden_layers": 1}
    experiment = replace(SMALL, connections={"standard": standard, "deeper": standard | {"num_hidden_layers": 8}})
    comparison = DeclaredComparison(experiment, RunStore(experiment, tmp_path / "new" / "runs.json"))
    assert costs_of(comparison) == {}
    measure_costs(comparison, list(experiment.connections))
    costs = costs_of(DeclaredComparison(experiment, RunStore(experiment, comparison.store.path)))
    assert list(costs) == ["eager", "compiled"]
    for medians in costs.values():
        assert medians["standard"] == 1 and medians["deeper"] > 1.5
    assert memory_of(comparison)["standard"] == 1 and memory_of(comparison)["deeper"] > 1.5
    assert set(comparison.store.costs["ratios"]["compiled to eager"]) == {"standard", "deeper"}
    assert {way: made_by["torch"] for way, made_by in comparison.store.costs["made_by"].items()} == dict.fromkeys(
        ("eager", "compiled"), version("torch")
    )


def test_new_costs_replace_the_stored_ones_and_leave_the_runs(tmp_path, monkeypatch):
    """Costs of two machines would not be comparable. Those of the other way have their own standard model."""
    comparison = stored(SMALL, tmp_path / "runs.json", [("standard", 1e-3, 64, 0, 5.0)])
    set_costs(comparison.store, Full=1.5)
    with comparison.store.update():
        comparison.store.costs["ratios"]["compiled"] = {"Full": {"median": 1.25}}
        comparison.store.costs["made_by"] = {"compiled": "another machine", "eager": "an older one"}
    monkeypatch.setattr("experiments.costs.interleave", lambda steps, *_, **__: {step: Timing() for step in steps})
    measure_costs(comparison, ["standard"], ["eager"])
    assert costs_of(comparison) == {"eager": {"standard": 1.0}, "compiled": {"Full": 1.25}}
    origins = comparison.store.costs["made_by"]
    assert origins["compiled"] == "another machine" and origins["eager"]["torch"] == version("torch")
    assert len(RunStore(SMALL, comparison.store.path).runs) == 1


def test_costs_of_the_same_model_are_measured_once(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "ROOT", tmp_path)
    same, other = replace(SMALL, costs="claim-cpu"), ScratchExperiment.load("claim-cpu")
    comparison = DeclaredComparison(same, RunStore(same, tmp_path / "runs.json"))
    assert costs_of(comparison) == {}
    set_costs(RunStore(other, store.results_file("claim-cpu")), Full=1.5)
    assert costs_of(comparison) == {"eager": {"Full": 1.5}}
    set_costs(comparison.store, Full=1.25)
    assert costs_of(comparison) == {"eager": {"Full": 1.25}}, "its own costs come first"
