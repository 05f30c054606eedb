"""Costs of training steps: measured in turn, stored beside the runs, and never mixed with those of another machine."""

from dataclasses import replace
from importlib.metadata import version

import pytest

from experiments import store
from experiments.costs import costs_of, measure_costs
from experiments.declared import ScratchExperiment
from experiments.runs import made_by
from experiments.scratch import DeclaredComparison
from experiments.store import RunStore

from .stored_runs import SMALL, stored


class Timing:
    wall = [1.0, 1.0]


def ratios(**medians: float) -> dict:
    return {"eager": {label: {"median": median} for label, median in medians.items()}}


def test_costs_are_those_of_training_steps(tmp_path):
    """A model with four times the layers takes longer; the standard model is what others are compared with."""
    deeper = {"residual_connection": "standard", "num_hidden_layers": 4 * SMALL.model["num_hidden_layers"]}
    experiment = replace(SMALL, connections={"standard": {"residual_connection": "standard"}, "deeper": deeper})
    comparison = DeclaredComparison(experiment, RunStore(experiment, tmp_path / "new" / "runs.json"))
    assert costs_of(comparison) == {}
    measure_costs(comparison, list(experiment.connections))
    costs = costs_of(DeclaredComparison(experiment, RunStore(experiment, comparison.store.path)))
    assert list(costs) == ["eager", "compiled"]
    for medians in costs.values():
        assert medians["standard"] == 1 and medians["deeper"] > 1.5
    assert set(comparison.store.costs["ratios"]["compiled to eager"]) == {"standard", "deeper"}
    assert comparison.store.costs["made_by"]["torch"] == version("torch")


def test_costs_of_other_connections_stay_and_those_of_another_processor_are_not_mixed(tmp_path, monkeypatch):
    comparison = stored(SMALL, tmp_path / "runs.json", [("standard", 1e-3, 64, 0, 5.0)])
    origin = {"device": "an abacus", "torch": version("torch")}
    comparison.store.set_costs({"ratios": ratios(Full=1.5), "made_by": origin})
    monkeypatch.setattr("experiments.costs.interleave", lambda steps, *_, **__: {step: Timing() for step in steps})
    with pytest.raises(ValueError, match=r"holds times of .*device an abacus.*; this is .*by --results"):
        measure_costs(comparison, ["standard"])
    comparison.store.set_costs({"ratios": ratios(Full=1.5), "made_by": made_by("cpu")})
    measure_costs(comparison, ["standard"])
    assert costs_of(comparison) == {"eager": {"Full": 1.5, "standard": 1.0}, "compiled": {"standard": 1.0}}
    compiled = comparison.store.costs["ratios"]["compiled"]
    measure_costs(comparison, ["standard", "Full"], ["eager"])
    assert costs_of(comparison)["eager"] == {"Full": 1.0, "standard": 1.0}
    assert comparison.store.costs["ratios"]["compiled"] == compiled, "what is not asked for stays"
    assert len(RunStore(SMALL, comparison.store.path).runs) == 1, "and so do the runs"


def test_costs_of_the_same_model_are_measured_once(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "FOLDER", tmp_path)
    same, other = replace(SMALL, costs="claim-cpu"), ScratchExperiment.load("claim-cpu")
    comparison = DeclaredComparison(same, RunStore(same, tmp_path / "runs.json"))
    assert costs_of(comparison) == {}
    RunStore(other, store.results_file("claim-cpu")).set_costs({"ratios": ratios(Full=1.5)})
    assert costs_of(comparison) == {"eager": {"Full": 1.5}}
    comparison.store.set_costs({"ratios": ratios(Full=1.25)})
    assert costs_of(comparison) == {"eager": {"Full": 1.25}}, "its own come first"
