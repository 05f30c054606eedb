"""Comparisons from scratch: the same start and the same tokens for all, rates chosen apart, and honest tables."""

import json
import lzma
import math
import re
import shutil
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from attnres.residual_attnres import residual_tensors
from attnres.training.runs import train
from experiments import harness, report, scratch
from experiments.costs import costs, costs_of, file_of, measure_costs
from experiments.data import Data, load, prepare
from experiments.harness import SELECTION_SEED, Planned, Store
from experiments.scratch import Comparison
from experiments.scratch_declared import DECLARED, Experiment, Recipe, declared
from experiments.tables import sweep_table

from .stored_runs import SMALL, planned, stored

ROOT = Path(__file__).parents[2]
MOE = replace(
    declared("moe-cpu"),
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
def data(prepared) -> Data:
    return load(SMALL.text, SMALL.length, SMALL.held_out, prepared)


@pytest.mark.parametrize("experiment", [SMALL, MOE], ids=["Llama", "MoE"])
def test_one_seed_gives_every_connection_the_same_backbone(experiment):
    models = {label: scratch.build(experiment, fields, 3) for label, fields in experiment.connections.items()}
    tensors = {label: dict(model.named_parameters()) for label, model in models.items()}
    attnres = {label: set(residual_tensors(model)) for label, model in models.items()}
    assert not attnres["standard"] and attnres["Full"]
    for label, own in tensors.items():
        assert own.keys() - attnres[label] == tensors["standard"].keys()
        assert all(torch.equal(own[name], tensors["standard"][name]) for name in tensors["standard"])
    other = dict(scratch.build(experiment, experiment.connections["standard"], 4).named_parameters())
    assert not torch.equal(other["model.embed_tokens.weight"], tensors["standard"]["model.embed_tokens.weight"])


def test_every_connection_sees_the_same_batches_and_rates_are_chosen_on_other_text(data, monkeypatch):
    seen = []
    assert not {tuple(row) for row in data.selection.tolist()} & {tuple(row) for row in data.valid.tolist()}
    monkeypatch.setattr(scratch, "train", lambda model, blocks, run, *rest, **more: seen.append(blocks) or [])
    monkeypatch.setattr(scratch, "sequence_losses", lambda model, blocks: seen.append(blocks) or torch.ones(1))
    for label, rate in (("standard", 1e-3), ("Full", 2e-3)):
        recipe = Recipe(SMALL.connections[label], rate, 512)
        for seed in (0, SELECTION_SEED):
            scratch.measure(SMALL, data, planned(recipe, seed), lambda: None, None, "cpu")
    batches, reported, others, selected, again, *_ = seen
    assert len(batches) == 16 and torch.equal(batches, again) and not torch.equal(batches, others)
    assert reported is data.valid and selected is data.selection


def test_the_mix_of_experts_is_balanced_and_its_load_stored(data, tmp_path):
    recipe = Recipe(MOE.connections["Block, S=2"], 1e-3, 256)
    run = scratch.measure(MOE, data, planned(recipe, 0), lambda: None, None, "cpu")
    assert 0 < run["expert_load_entropy"] <= 1
    assert [len(row) for row in run["depth_attention"]] == [1, 2, 2, 3, 3]
    assert run["curve"][-1][0] == 4


def test_a_mix_of_experts_that_was_stopped_after_its_last_step_is_stored(data, tmp_path, monkeypatch):
    """No step is left then that would measure the load of its experts."""
    run = planned(Recipe(MOE.connections["standard"], 1e-3, 256), 0)
    monkeypatch.setattr(scratch, "train", partial(train, save_seconds=0))
    whole = scratch.measure(MOE, data, run, lambda: None, tmp_path, "cpu")
    resumed = scratch.measure(MOE, data, run, lambda: None, tmp_path, "cpu")
    assert resumed["after"] == whole["after"] and "expert_load_entropy" not in resumed


def test_checkpoints_of_another_text_are_not_gone_on_from(data, tmp_path, monkeypatch):
    folders = []
    monkeypatch.setattr(scratch, "make_runs", lambda store, plan, measure, device, folder, on: folders.append(folder))
    for text in ("one", "two"):
        store = Store(tmp_path / "runs.json", {})
        Comparison(SMALL, store, replace(data, fingerprint=text), tmp_path).make([("standard", 1e-3, 64, 0)])
    run = planned(Recipe(SMALL.connections["standard"], 1e-3, 64), 0)
    assert len({folder(run) for folder in folders}) == 2


def test_a_run_that_diverged_is_stored_without_its_depth_attention(data):
    run = scratch.measure(
        SMALL, data, planned(Recipe(SMALL.connections["Full"], 1e30, 64), 0), lambda: None, None, "cpu"
    )
    assert not math.isfinite(run["after"]) and "depth_attention" not in run


def test_models_of_two_experiments_are_kept_apart(data, tmp_path):
    """Their runs have the same labels."""
    for name in ("one", "two"):
        store = Store(tmp_path / f"{name}.json", {})
        comparison = Comparison(replace(SMALL, name=name), store, data, keep=tmp_path / "kept")
        comparison.make([("standard", 1e-3, 64, 0)])
    kept = tmp_path / "kept" / "three-standard_rate_0.001_64_tokens_seed_0"
    assert [path.name for path in sorted(kept.parent.iterdir())] == [
        kept.name.replace("three", name) for name in ("one", "two")
    ]
    kept.symlink_to(tmp_path / "nowhere")
    comparison = replace(comparison, experiment=replace(SMALL, name="three"), store=Store(tmp_path / "three.json", {}))
    with pytest.raises(ValueError, match=rf"--keep: {kept} exists, .*Move it away"):
        comparison.make([("standard", 1e-3, 64, 0)])
    assert kept.is_symlink() and not comparison.store.content["runs"], "found before anything is trained"


def test_a_run_is_stored_though_its_model_cannot_be_kept(data, tmp_path, monkeypatch, capsys):
    """Another process, with another file of runs, has kept the same model meanwhile."""
    kept = tmp_path / "tiny-standard_rate_0.001_64_tokens_seed_0"
    comparison = Comparison(replace(SMALL, name="tiny"), Store(tmp_path / "runs.json", {}), data, keep=tmp_path)
    monkeypatch.setattr(scratch, "train", lambda *arguments, **more: kept.mkdir() or [(1, 2.0)])
    comparison.make([("standard", 1e-3, 64, 0)])
    assert len(comparison.store.content["runs"]) == 1 and not list(kept.iterdir())
    assert f"Another process has made {kept} meanwhile" in capsys.readouterr().out


def test_a_page_shows_the_runs_of_all_processes_whoever_writes_it_last(tmp_path):
    first = stored(SMALL, tmp_path / "runs.json", [("standard", 1e-3, 64, 0, 5.0), ("Full", 1e-3, 64, 0, 4.0)])
    runs = [(label, 1e-3, 64, 1, loss) for label, loss in (("standard", 5.0), ("Full", 4.5))]
    stored(SMALL, tmp_path / "runs.json", runs)  # another process
    report.write(first, 64, tmp_path / "page.md")
    assert "| Full | 0.001 | 2 |" in (tmp_path / "page.md").read_text()


@pytest.mark.slow
def test_a_compiled_run_is_the_same_run(data):
    connection = {"residual_connection": "identity_hc"}
    run = planned(Recipe(connection, 1e-3, 256), 0)
    ways = (False, True)
    eager, compiled = (scratch.measure(SMALL, data, run, lambda: None, None, "cpu", compiled=way) for way in ways)
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


def test_the_sweep_goes_on_while_the_best_rate_is_the_last_one(tmp_path, monkeypatch):
    """Upwards for one connection, downwards for another."""
    experiment = replace(SMALL, rates=(1e-3, 2e-3, 4e-3))
    best = {"standard": 8e-3, "Block, S=2": 1e-3, "Full": 1.9e-3}
    measured = []

    def measure(experiment: Experiment, data, run: Planned, *rest) -> dict:
        label = next(name for name, fields in experiment.connections.items() if fields == run.recipe.connection)
        measured.append((label, run.recipe.rate))
        return {"after": abs(math.log(run.recipe.rate / best[label])), "seconds": 0.0}

    monkeypatch.setattr(scratch, "measure", measure)
    comparison = Comparison(experiment, Store(tmp_path / "runs.json", {}))
    assert comparison.sweep(list(best)) == {**best, "Full": 2e-3}
    assert measured[9:] == [("standard", 8e-3), ("Block, S=2", 5e-4), ("standard", 16e-3)]
    again = Comparison(replace(experiment, rates=(8e-3, 16e-3)), comparison.store)
    assert again.sweep(["standard"]) == {"standard": 8e-3} and len(measured) == 12, "4e-3 is stored too"
    assert again.choose_rates(["standard"]) == {"standard": 8e-3}
    one_rate = Comparison(replace(experiment, rate=3e-3), comparison.store)
    assert one_rate.choose_rates(["standard", "Full"]) == {"standard": 3e-3, "Full": 3e-3} and len(measured) == 12
    table = sweep_table(comparison)
    assert table.splitlines()[0] == "| model | 0.0005 | 0.001 | 0.002 | 0.004 | 0.008 | 0.016 |"
    assert "| Full |  | 0.6419 | 0.0513 | 0.7444 |  |  |" in table


def test_each_connection_may_have_a_declared_rate(tmp_path):
    """Whatever the sweep says, and the last run."""
    rates = {"standard": 1e-3, "Block, S=2": 2e-3, "Full": 2e-3}
    runs = [("standard", 1e-3, 64, 0, 5.0), ("Full", 2e-3, 64, 0, 4.5), ("Full", 4e-3, 64, 0, 4.0)]
    runs += [("Full", 4e-3, SMALL.sweep_tokens, harness.SELECTION_SEED, 4.0)]
    comparison = stored(replace(SMALL, rate=rates), tmp_path / "runs.json", runs)
    assert comparison.choose_rates(["standard", "Full"]) == {"standard": 1e-3, "Full": 2e-3}
    assert comparison.reported(64) == {"standard": 1e-3, "Full": 2e-3}
    assert comparison.differences("Full", rates, 64) == [-0.5]


def test_costs_are_those_of_training_steps(tmp_path):
    """A model with four times the layers takes longer; the standard model is what others are compared with."""
    deeper = {"residual_connection": "standard", "num_hidden_layers": 4 * SMALL.model["num_hidden_layers"]}
    experiment = replace(SMALL, connections={"standard": {"residual_connection": "standard"}, "deeper": deeper})
    path = file_of(tmp_path / "new" / "runs.json")
    assert costs(path) == {}
    measure_costs(experiment, list(experiment.connections), path, "cpu")
    found = costs(path)
    assert list(found) == ["eager", "compiled"]
    for of_way in found.values():
        assert of_way["standard"] == 1 and of_way["deeper"] > 1.5
    stored_costs = json.loads(path.read_text())
    assert set(stored_costs["ratios"]["compiled to eager"]) == {"standard", "deeper"}
    assert stored_costs["made_by"]["torch"] == version("torch")


def test_costs_of_other_connections_stay_and_those_of_another_processor_are_not_mixed(tmp_path, monkeypatch):
    experiment, path = SMALL, file_of(tmp_path / "runs.json")
    origin = {"device": "an abacus", "torch": version("torch")}
    path.write_text(json.dumps({"ratios": {"eager": {"Full": {"median": 1.5}}}, "made_by": origin}))
    assert costs(path) == {"eager": {"Full": 1.5}}
    with pytest.raises(ValueError, match=r"holds times of .*device an abacus.*; this is .*by --results"):
        measure_costs(experiment, ["standard"], path, "cpu")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"made_by": harness.made_by("cpu")}))
    monkeypatch.setattr("experiments.costs.interleave", lambda ways, *_, **__: {way: Taken() for way in ways})
    measure_costs(experiment, ["standard"], path, "cpu")
    assert costs(path) == {"eager": {"Full": 1.5, "standard": 1.0}, "compiled": {"standard": 1.0}}
    compiled = json.loads(path.read_text())["ratios"]["compiled"]
    measure_costs(experiment, ["standard", "Full"], path, "cpu", ["eager"])
    assert costs(path)["eager"] == {"Full": 1.0, "standard": 1.0}
    assert json.loads(path.read_text())["ratios"]["compiled"] == compiled, "what is not asked for stays"


def test_costs_of_the_same_model_are_measured_once(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "FOLDER", tmp_path)
    same, path = replace(SMALL, costs="claim-cpu"), tmp_path / "results" / "claim-cpu-costs.json"
    comparison = Comparison(same, Store(tmp_path / "runs.json", {}))
    assert costs_of(comparison) == {}
    path.parent.mkdir()
    path.write_text('{"ratios": {"eager": {"Full": {"median": 1.5}}}}')
    assert costs_of(comparison) == {"eager": {"Full": 1.5}}
    file_of(comparison.store.path).write_text('{"ratios": {"eager": {"Full": {"median": 1.25}}}}')
    assert costs_of(comparison) == {"eager": {"Full": 1.25}}, "its own come first"


class Taken:
    wall = [1.0, 1.0]


def test_runs_on_texts_of_one_name_are_not_mixed(data, tmp_path):
    run = {"recipe": {"connection": SMALL.connections["standard"], "rate": 1e-3, "tokens": 64}, "seed": 0, "after": 5.0}
    comparison = Comparison(SMALL, Store(tmp_path / "runs.json", {}), data)
    comparison.store.add(run | {"text": data.fingerprint})
    comparison.make([("standard", 1e-3, 64, 0)])  # stored
    comparison.store.add(run | {"seed": 1, "text": "0123456789ab"})
    with pytest.raises(ValueError, match=rf"another words \(.*0123456789ab.*, not {data.fingerprint}\): choose"):
        comparison.make([("standard", 1e-3, 64, 0)])


@pytest.mark.parametrize(
    "ratios",
    ["[]"]
    + [f'{{"eager": {of_way}}}' for of_way in ("[]", '{"Full": 1.2}', '{"Full": {}}')]
    + [f'{{"eager": {{"Full": {{"median": {median}}}}}}}' for median in ("-1", '"1.2"', "NaN")],
)
def test_a_file_of_costs_that_lack_something_is_named(ratios, tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(f'{{"ratios": {ratios}}}')
    with pytest.raises(ValueError, match=r"costs\.json is damaged \(a ratio has no median above 0\): move it away"):
        costs(path)


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"made_by": "x"}, "made_by is 'x'"),
        ({"ratios": []}, "a ratio has"),
        ({"ratios": {"eager": []}}, "a ratio has"),
        ({"ratios": {"compiled to eager": []}}, "a ratio has"),
    ],
)
def test_a_damaged_file_of_costs_is_named_before_anything_is_timed(changed, what, tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.costs.interleave", lambda *_, **__: pytest.fail("a step was timed"))
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"ratios": {}, "made_by": harness.made_by("cpu")} | changed))
    with pytest.raises(ValueError, match=rf"costs\.json is damaged \({what}.*\): move it away"):
        measure_costs(SMALL, ["standard"], path, "cpu", ["eager"])


def test_the_size_that_tries_the_path_is_not_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "FOLDER", tmp_path)
    tiny = declared("claim-tiny")
    for name, own in (("claim-tiny", tiny), ("claim-cpu", declared("claim-cpu"))):
        store = Store(harness.results_file(name), own.setting())
        recipe = {"connection": own.connections["standard"], "rate": 1e-3, "tokens": own.tokens}
        store.add({"recipe": recipe, "seed": 0, "after": 5.0, "curve": [[1, 5.0]]})
    report.write_all()
    page = (tmp_path / "claim.md").read_text()
    assert "<!-- cpu: result -->" in page and "tiny" not in page


def test_what_cannot_be_used_is_refused_in_one_line(corpus, prepared, tmp_path):
    with pytest.raises(ValueError, match=r"words gives \d+ sequences of 32 tokens, not 20000"):
        load(SMALL.text, 32, 10_000, prepared)
    with pytest.raises(FileNotFoundError, match=r"words-300-60000.xz does not exist: .*--corpus"):
        load(SMALL.text, 32, 4, tmp_path)
    damaged = tmp_path / "words-300-60000.xz"
    for content in (b"no archive", (prepared / damaged.name).read_bytes()[:1000], lzma.compress(b"[]")):
        damaged.write_bytes(content)
        with pytest.raises(ValueError, match=r"words-300-60000\.xz is damaged \(.*: prepare it anew"):
            load(SMALL.text, 32, 4, tmp_path)


@pytest.mark.parametrize("name", [path.stem for path in DECLARED.glob("*.yaml") if report.stored(path.stem)])
def test_the_tables_in_the_repository_are_those_of_the_stored_runs(name):
    comparison = report.stored(name)
    tokens = comparison.experiment.tokens
    page = (ROOT / "experiments" / f"{name.partition('-')[0]}.md").read_text()
    for place, table in report.tables(comparison, tokens, comparison.reported(tokens)).items():
        assert f"<!-- {place} -->\n{table}\n<!-- end -->" in page


def test_report_makes_all_tables_anew(tmp_path, monkeypatch):
    """Every number of a table struck out, and all of them come back; pages without tables of runs stay as they are."""
    folder = ROOT / "experiments"
    copy = tmp_path / "experiments"
    shutil.copytree(folder / "results", copy / "results")
    pages = {page.name: page.read_text() for page in folder.glob("*.md")}
    for name, text in pages.items():
        (copy / name).write_text(re.sub(r"(?s)(<!-- (?!end)[^>]+ -->\n).*?(?=<!-- end -->)", r"\1", text))
    assert any((copy / name).read_text() != text for name, text in pages.items())
    monkeypatch.setattr(harness, "FOLDER", copy)
    report.write_all()
    assert {page.name: page.read_text() for page in copy.glob("*.md")} == pages
