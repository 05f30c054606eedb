"""Comparisons from scratch: all connections have the same start and the same tokens, and rates are chosen apart."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attnres.residual_attnres import residual_tensors
from experiments import scratch
from experiments.data import TokenData, load, prepare
from experiments.declared import SELECTION_SEED, ScratchExperiment
from experiments.runs import PlannedRun
from experiments.scratch import DeclaredComparison
from experiments.store import RunStore
from experiments.tables import rate_table

from .stored_runs import CURVE, SMALL, add, planned, stored

ROOT = Path(__file__).parents[2]
MOE = replace(
    ScratchExperiment.load("moe-cpu"),
    model={
        "name": "attnres-tiny",
        "num_hidden_layers": 2,
        "num_local_experts": 4,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    length=32,
    batch_size=2,
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    words = [f"{a}{b}{c}" for a in "bdkmt" for b in "aeiou" for c in "lnrs"]
    numbers = torch.randint(len(words), (12_000,), generator=torch.Generator().manual_seed(0)).tolist()
    text = " ".join(words[number] for number in numbers)
    folder = tmp_path_factory.mktemp("corpora") / SMALL.text.corpus
    folder.mkdir()
    (folder / "train.txt").write_text(text[:40_000])
    (folder / "valid.txt").write_text(text[40_000:])
    return folder


@pytest.fixture(scope="module")
def prepared(corpus, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("prepared")
    prepare(SMALL.text, corpus, out)
    return out


@pytest.fixture
def data(prepared) -> TokenData:
    return load(SMALL.text, SMALL.length, SMALL.held_out, out=prepared)


def measured(experiment: ScratchExperiment, data: TokenData, run: PlannedRun, folder: Path, **how: bool) -> dict:
    comparison = DeclaredComparison(experiment, RunStore(experiment, folder / "runs.json"), data, **how)
    return comparison.measure(run, lambda: None, folder / "work" / str(how))


@pytest.mark.parametrize("experiment", [SMALL, MOE], ids=["Llama", "MoE"])
def test_one_seed_gives_every_connection_the_same_backbone(experiment):
    models = {label: scratch.build(experiment, fields, 3) for label, fields in experiment.connections.items()}
    tensors = {label: dict(model.named_parameters()) for label, model in models.items()}
    attnres = {label: set(residual_tensors(model)) for label, model in models.items()}
    assert not attnres["standard"] and attnres["Full"]
    for label, parameters in tensors.items():
        assert parameters.keys() - attnres[label] == tensors["standard"].keys()
        assert all(torch.equal(parameters[name], tensors["standard"][name]) for name in tensors["standard"])
    other = dict(scratch.build(experiment, experiment.connections["standard"], 4).named_parameters())
    assert not torch.equal(other["model.embed_tokens.weight"], tensors["standard"]["model.embed_tokens.weight"])


def test_every_connection_sees_the_same_batches_and_rates_are_chosen_on_other_text(data, tmp_path, monkeypatch):
    seen = []
    assert not {tuple(row) for row in data.selection.tolist()} & {tuple(row) for row in data.valid.tolist()}
    monkeypatch.setattr(scratch, "train", lambda model, blocks, run, *rest, **more: seen.append(blocks) or [])
    monkeypatch.setattr(scratch, "sequence_losses", lambda model, blocks: seen.append(blocks) or torch.ones(1))
    for label, rate in (("standard", 1e-3), ("Full", 2e-3)):
        for seed in (0, SELECTION_SEED):
            measured(SMALL, data, planned(SMALL.connections[label], rate, 512, seed), tmp_path)
    batches, reported, others, selected, again, *_ = seen
    assert len(batches) == 16 and torch.equal(batches, again) and not torch.equal(batches, others)
    assert reported is data.valid and selected is data.selection


@pytest.mark.slow
def test_the_mixture_of_experts_is_balanced(data, tmp_path, monkeypatch):
    """The biases of the routers are zero at the start and follow the load."""
    models = []
    monkeypatch.setattr(scratch, "sequence_losses", lambda model, blocks: models.append(model) or torch.ones(1))
    run = measured(MOE, data, planned(MOE.connections["Block, S=2"], 1e-3, 256, 0), tmp_path)
    biases = [tensor for name, tensor in models[0].state_dict().items() if name.endswith("e_score_correction_bias")]
    assert biases and all(bias.abs().max() >= scratch.BALANCING for bias in biases)
    assert [len(row) for row in run["depth_attention"]] == [1, 2, 2, 3, 3]
    assert run["curve"][-1][0] == 4


def test_a_run_does_not_resume_from_checkpoints_of_another_text(data, tmp_path, monkeypatch):
    identities = []
    monkeypatch.setattr(
        scratch, "make_runs", lambda store, plan, measure, work, identity, device: identities.append(identity)
    )
    for text in ("one", "two"):
        store = RunStore(SMALL, tmp_path / "runs.json")
        DeclaredComparison(SMALL, store, replace(data, fingerprint=text), tmp_path).make([("standard", 1e-3, 64, 0)])
    assert identities[0] == identities[1] | {"fingerprint": "one"} != identities[1]


def test_a_connection_without_a_declared_rate_is_swept(tmp_path, monkeypatch):
    experiment = replace(SMALL, rate={"standard": 1e-3})
    comparison = DeclaredComparison(experiment, RunStore(experiment, tmp_path / "runs.json"))
    monkeypatch.setattr(DeclaredComparison, "sweep", lambda self, labels: dict.fromkeys(labels, 2e-3))
    assert comparison.choose_rates(["standard", "Full"]) == {"standard": 1e-3, "Full": 2e-3}
    monkeypatch.delattr(DeclaredComparison, "sweep")
    assert comparison.choose_rates(["standard"]) == {"standard": 1e-3}


@pytest.mark.slow
def test_a_run_that_diverged_is_stored_without_its_depth_attention(data, tmp_path):
    run = measured(SMALL, data, planned(SMALL.connections["Full"], 1e30, 64, 0), tmp_path)
    assert not math.isfinite(run["after"]) and "depth_attention" not in run


@pytest.mark.slow
def test_models_of_two_experiments_are_kept_apart(data, tmp_path):
    """Their runs have the same labels."""
    for name in ("one", "two"):
        experiment = replace(SMALL, name=name)
        store = RunStore(experiment, tmp_path / f"{name}.json")
        comparison = DeclaredComparison(experiment, store, data, tmp_path / "work", keep=tmp_path / "kept")
        comparison.make([("standard", 1e-3, 64, 0)])
    names = [f"{name}-standard_rate_0.001_64_tokens_seed_0" for name in ("one", "two")]
    assert [path.name for path in sorted((tmp_path / "kept").iterdir())] == names


def test_a_folder_in_the_place_of_a_kept_model_is_refused_before_training(data, tmp_path):
    taken = tmp_path / "kept" / f"{SMALL.name}-standard_rate_0.001_64_tokens_seed_0"
    taken.parent.mkdir()
    taken.symlink_to(tmp_path / "nowhere")
    store = RunStore(SMALL, tmp_path / "runs.json")
    comparison = DeclaredComparison(SMALL, store, data, tmp_path / "work", keep=tmp_path / "kept")
    with pytest.raises(ValueError, match=rf"--keep: {taken} exists, .*Move it away"):
        comparison.make([("standard", 1e-3, 64, 0)])
    assert taken.is_symlink() and not store.runs


@pytest.mark.slow
def test_a_run_is_stored_even_if_its_model_cannot_be_kept(data, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    store = RunStore(SMALL, tmp_path / "runs.json")
    comparison = DeclaredComparison(SMALL, store, data, tmp_path / "work", keep=tmp_path / "file")
    comparison.make([("standard", 1e-3, 64, 0)])
    assert len(RunStore(SMALL, tmp_path / "runs.json").runs) == 1
    assert "The model of standard, rate 0.001, 64 tokens, seed 0 is not kept" in capsys.readouterr().out


def test_a_file_of_runs_that_cannot_be_written_is_found_before_training(data, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    store = RunStore(SMALL, tmp_path / "file" / "runs.json")
    monkeypatch.setattr(DeclaredComparison, "measure", lambda *_: pytest.fail("a run was trained"))
    with pytest.raises(OSError, match="file"):
        DeclaredComparison(SMALL, store, data, tmp_path / "work").make([("standard", 1e-3, 64, 0)])


@pytest.mark.slow
def test_a_compiled_run_is_the_same_run(data, tmp_path):
    connection = {"residual_connection": "identity_hc", "num_hidden_layers": 1}
    run = planned(connection, 1e-3, 256, 0)
    eager, compiled = (measured(SMALL, data, run, tmp_path, compiled=way) for way in (False, True))
    assert compiled["compiled"] and "compiled" not in eager
    assert compiled["after"] == pytest.approx(eager["after"], abs=1e-4)
    losses, again = ([loss for _, loss in result["curve"]] for result in (eager, compiled))
    assert again == pytest.approx(losses, abs=2e-4)


def test_the_rate_is_each_connections_best_of_the_sweep(tmp_path):
    losses = {1e-3: 3.0, 2e-3: 2.5, 4e-3: 2.7}
    runs = [("Full", rate, 128, SELECTION_SEED, loss) for rate, loss in losses.items()]
    runs += [("standard", rate, 128, SELECTION_SEED, -loss) for rate, loss in losses.items()]
    runs += [("Full", 4e-3, 128, 0, 0.1), ("Full", 4e-3, 256, SELECTION_SEED, 0.1)]  # what is reported
    comparison = stored(SMALL, tmp_path / "runs.json", runs)
    assert comparison.best_rate("Full") == 2e-3
    assert comparison.best_rate("standard") == 1e-3


def test_a_run_that_diverged_is_not_the_best(tmp_path):
    runs = [("Full", rate, 128, SELECTION_SEED, loss) for rate, loss in ((1e-3, math.nan), (2e-3, 3.0), (4e-3, 5.0))]
    assert stored(SMALL, tmp_path / "runs.json", runs).best_rate("Full") == 2e-3


def test_the_sweep_goes_on_while_the_best_rate_is_the_last_one(tmp_path, monkeypatch, data):
    """The sweep of one connection goes upwards, the sweep of another downwards."""
    experiment = replace(SMALL, rates=[1e-3, 2e-3, 4e-3])
    best = {"standard": 8e-3, "Block, S=2": 1e-3, "Full": 1.9e-3}
    tried = []

    def measure(comparison: DeclaredComparison, run: PlannedRun, *rest) -> dict:
        connections = comparison.experiment.connections
        label = next(name for name, fields in connections.items() if fields == run.recipe["connection"])
        tried.append((label, run.recipe["rate"]))
        return {"after": abs(math.log(run.recipe["rate"] / best[label])), "seconds": 0.0, **CURVE}

    monkeypatch.setattr(DeclaredComparison, "measure", measure)
    comparison = DeclaredComparison(experiment, RunStore(experiment, tmp_path / "runs.json"), data, tmp_path)
    assert comparison.sweep(list(best)) == {**best, "Full": 2e-3}
    assert tried[9:] == [("standard", 8e-3), ("Block, S=2", 5e-4), ("standard", 16e-3)]
    again = replace(comparison, experiment=replace(experiment, rates=[8e-3, 16e-3]))
    assert again.sweep(["standard"]) == {"standard": 8e-3} and len(tried) == 12  # 4e-3 is stored too
    assert again.choose_rates(["standard"]) == {"standard": 8e-3}
    one_rate = DeclaredComparison(replace(experiment, rate=3e-3), comparison.store)
    assert one_rate.choose_rates(["standard", "Full"]) == {"standard": 3e-3, "Full": 3e-3} and len(tried) == 12
    table = rate_table(comparison)
    assert table.splitlines()[0] == "| model | 0.0005 | 0.001 | 0.002 | 0.004 | 0.008 | 0.016 |"
    assert "| Full |  | 0.6419 | 0.0513 | 0.7444 |  |  |" in table


def test_each_connection_may_have_a_declared_rate(tmp_path):
    """The declared rate is shown even if the sweep or the last run had another."""
    rates = {"standard": 1e-3, "Block, S=2": 2e-3, "Full": 2e-3}
    runs = [("standard", 1e-3, 64, 0, 5.0), ("Full", 2e-3, 64, 0, 4.5), ("Full", 4e-3, 64, 0, 4.0)]
    runs += [("Full", 4e-3, SMALL.sweep_tokens, SELECTION_SEED, 4.0)]
    comparison = stored(replace(SMALL, rate=rates), tmp_path / "runs.json", runs)
    assert comparison.choose_rates(["standard", "Full"]) == {"standard": 1e-3, "Full": 2e-3}
    assert comparison.shown(64).rates == {"standard": 1e-3, "Full": 2e-3}
    assert comparison.shown(64).differences("Full") == [-0.5]


def test_runs_on_texts_of_one_name_are_not_mixed(data, tmp_path):
    run = {"recipe": planned(SMALL.connections["standard"], 1e-3, 64, 0).recipe, "seed": 0, "after": 5.0, **CURVE}
    comparison = DeclaredComparison(SMALL, RunStore(SMALL, tmp_path / "runs.json"), data, tmp_path)
    add(comparison.store, run | {"text": data.fingerprint})
    comparison.make([("standard", 1e-3, 64, 0)])  # stored
    add(comparison.store, run | {"seed": 1, "text": "0123456789ab"})
    with pytest.raises(ValueError, match=rf"another text \(0123456789ab, not {data.fingerprint}\): choose"):
        comparison.make([("standard", 1e-3, 64, 0)])
