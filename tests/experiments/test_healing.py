"""Healing: recipes train the tensors that they name on the same tokens. The command stores, resumes and tabulates."""

import math
import os
import re
import shutil
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean

import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import ttest_rel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from attnres.residual_attnres import residual_tensors
from attnres.training.text import python_sources, train_tokenizer
from experiments import healing
from experiments.data import TokenData
from experiments.declared import SELECTION_SEED, HealingExperiment, HealingRecipe, ScratchExperiment
from experiments.healing import Healing
from experiments.runs import PlannedRun
from experiments.store import RunStore, results_file
from experiments.tables import healing_tables
from experiments.training import sequence_losses

from .. import forks
from .stored_runs import add

ROOT = Path(__file__).parents[2]
SETTING = {"length": 256, "held_out_length": 512, "batch_size": 2}
STORIES = HealingExperiment.load("healing-stories")


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(python_sources(30_000), 300)


@pytest.fixture(scope="module")
def start() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=300, tie_word_embeddings=True, bos_token_id=1, **sizes))


def changed(recipe: HealingRecipe, start: LlamaForCausalLM, work: Path) -> tuple[set[str], set[str]]:
    """Return the tensors of the backbone and of the residual connections that three steps of the recipe change."""
    model = healing.reconnected(start, recipe)
    attnres = set(residual_tensors(model))
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    blocks = torch.randint(3, 300, (6, 32), generator=torch.Generator().manual_seed(0))
    healing.continue_training(model, blocks, replace(recipe, steps=3), 0, lambda: None, work)
    names = {name for name, tensor in model.named_parameters() if not torch.equal(tensor, before[name])}
    return names - attnres, names & attnres


@pytest.mark.slow
def test_a_recipe_trains_the_tensors_that_it_names_and_no_others(start, tmp_path):
    backbone = {name for name, _ in start.named_parameters()}
    # The first sublayer has one source: its pseudo-query changes nothing, and gets no gradient.
    attnres = {
        name
        for name in residual_tensors(healing.reconnected(start, HealingRecipe(block_size=1)))
        if ".0.self_attention" not in name
    }
    queries = {name for name in attnres if name.endswith("_proj.weight")}
    folders = (tmp_path / str(number) for number in range(7))
    assert 0 < len(queries) < len(attnres)
    assert changed(HealingRecipe(), start, next(folders)) == (backbone, set())
    assert changed(HealingRecipe(block_size=1), start, next(folders)) == (backbone, attnres)
    assert changed(HealingRecipe(block_size=2, trained="all but key norms"), start, next(folders)) == (
        backbone,
        queries,
    )
    assert changed(HealingRecipe(block_size=2, trained="AttnRes"), start, next(folders)) == (set(), attnres)
    assert changed(HealingRecipe(trained="norms"), start, next(folders)) == (
        {name for name in backbone if "norm" in name},
        set(),
    )
    assert changed(HealingRecipe(block_size=1, alone=1.0), start, next(folders)) == (set(), attnres)
    assert changed(HealingRecipe(block_size=1, alone=0.4), start, next(folders)) == (backbone, attnres)


def test_every_recipe_sees_the_same_tokens_and_every_seed_others(start, tmp_path, monkeypatch):
    held_out = torch.zeros(1, 4, dtype=torch.long)
    data = TokenData(torch.arange(40).view(40, 1), held_out, held_out)
    experiment = replace(STORIES, batch_size=4)
    runs = Healing(experiment, start, data, RunStore(experiment, tmp_path / "runs.json"), tmp_path)

    def seen(recipe: HealingRecipe, seed: int) -> list[int]:
        parts = []
        monkeypatch.setattr(healing, "train", lambda model, part, *_, **__: parts.append(part))
        runs.measure(PlannedRun("a run", asdict(replace(recipe, steps=6)), seed, 6), lambda: None, tmp_path)
        return torch.cat(parts).flatten().tolist()

    standard = seen(HealingRecipe(), 0)
    assert len(set(standard)) == 24
    assert (
        seen(HealingRecipe(block_size=1, trained="AttnRes"), 0)
        == seen(HealingRecipe(block_size=2, alone=0.25), 0)
        == standard
    )
    assert seen(HealingRecipe(), 1) != standard


def test_the_two_stages_of_a_run_have_different_folders_for_checkpoints(start, tmp_path, monkeypatch):
    """Both may train the same tensors: the second must not begin from checkpoints of the first."""
    works = []
    monkeypatch.setattr(healing, "train", lambda model, part, run, work, *_: works.append(work))
    recipe = HealingRecipe(steps=4, block_size=2, trained="AttnRes", alone=0.5)
    model = healing.reconnected(start, recipe)
    healing.continue_training(model, torch.zeros(4, 8, dtype=torch.long), recipe, 0, lambda: None, tmp_path)
    assert len(set(works)) == 2 and {work.parent for work in works} == {tmp_path}


@pytest.mark.parametrize("seed", [0, SELECTION_SEED])
def test_runs_of_another_model_are_not_mixed(seed, start, tmp_path):
    """The store holds a retrofit, which begins with the loss of the model that it was made from."""
    held_out = torch.randint(3, 300, (2, 16), generator=torch.Generator().manual_seed(0))
    data = TokenData(held_out, held_out.flip(1), held_out)
    store = RunStore(STORIES, tmp_path / "runs.json")
    recipe = HealingRecipe(block_size=1)
    began = healing.mean_loss(healing.reconnected(start, recipe), data.held_out(seed == SELECTION_SEED))
    add(store, {"recipe": asdict(recipe), "seed": seed, "before": began, "after": 1.0, "tokens": 64})
    Healing(STORIES, start, data, store, tmp_path).check_stored()
    with pytest.raises(ValueError, match=rf"begins with a loss of {began:.4f}; .* Choose another --results"):
        Healing(
            STORIES, start, replace(data, valid=data.selection, selection=data.valid), store, tmp_path
        ).check_stored()


@pytest.fixture
def corpora(tmp_path) -> list[Path]:
    """Return the folders of two texts that share `valid.txt`."""
    documents = [document[:4000] for document in python_sources(60_000)] * 5
    folders = [tmp_path / name for name in ("one", "other")]
    for folder, train in zip(folders, (documents, documents[::-1])):
        folder.mkdir()
        for name, part in {"train": train, "valid": documents[:9]}.items():
            (folder / f"{name}.txt").write_text("\n<|endoftext|>\n".join(part))
    return folders


@pytest.mark.slow
def test_texts_that_share_their_held_out_part_have_different_fingerprints(tokenizer, corpora):
    tiny = HealingExperiment.load("healing-tiny")
    one, other = (healing.load_data(tiny, folder, tokenizer) for folder in corpora)
    assert torch.equal(one.valid, other.valid) and one.fingerprint != other.fingerprint


@pytest.fixture
def checkpoint(assets, tmp_path) -> Path:
    return Path(shutil.copytree(assets / "checkpoints" / "stories260K-hf", tmp_path / "start"))


def test_a_checkpoint_that_lacks_a_tensor_is_refused(checkpoint):
    weights = load_file(checkpoint / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"start is incomplete: it lacks `model\.layers\.1\.mlp\.up_"):
        healing.load_start(checkpoint)


def test_a_model_that_is_stored_in_bfloat16_is_trained_in_float32(checkpoint):
    AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).save_pretrained(checkpoint)
    model, _ = healing.load_start(checkpoint)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


FULL = {"recipe": asdict(HealingRecipe(block_size=1)), "seed": 0, "before": 2.0, "after": 1.0, "tokens": 64}
FULL |= {"depth_attention": [[1.0], [0.4, 0.6]], "distance_from_uniform": 0.1, "text": "0123456789ab"}


def test_tables_leave_out_the_depth_attention_of_a_run_that_diverged(tmp_path):
    """Its weights are NaN, and the others are not compared with it."""
    store, full = RunStore(STORIES, tmp_path / "runs.json"), STORIES.report["Full"]
    lost = {"recipe": asdict(full), "after": math.nan, "distance_from_uniform": math.nan, "depth_attention": [[], []]}
    for seed, run in enumerate((FULL | {"recipe": asdict(full)}, FULL | lost)):
        add(store, run | {"seed": seed})
    tables = healing_tables(STORIES, RunStore(STORIES, store.path))
    assert "| Full | 0.1000 | 0.1000 |" in tables["runs: depth attention"]

    def differences() -> list[str]:
        table = healing_tables(STORIES, store)["runs: standard: rate"]
        return re.findall(r"([^ ]*) \|$", table, re.MULTILINE)[1:]

    losses = list(zip(STORIES.sweeps["standard: rate"].values(), (math.nan, 1.0, 1.5)))
    shown = []
    for recipe, loss in losses:
        add(store, {"recipe": asdict(recipe), "seed": SELECTION_SEED, "before": 2.0, "after": loss, "tokens": 64})
        shown.append(differences())
    assert shown[0] == [""] and shown[-1] == ["+nan", "+0.0000", "+0.5000"]


def test_a_text_without_a_block_is_refused(tokenizer, tmp_path):
    for name in ("train", "valid"):
        (tmp_path / f"{name}.txt").write_text("x\n\ny")
    with pytest.raises(ValueError, match="must hold a longer text"):
        healing.load_data(STORIES, tmp_path, tokenizer)


@pytest.mark.slow
def test_the_pretrained_model_has_its_known_loss_on_this_packing(assets):
    path = assets / "checkpoints" / "stories260K-hf"
    data = healing.load_data(STORIES, assets / "corpora" / "tinystories", AutoTokenizer.from_pretrained(path))
    assert sequence_losses(AutoModelForCausalLM.from_pretrained(path), data.valid).mean().item() == pytest.approx(
        1.4745, abs=1e-3
    )


def test_the_table_shows_mean_and_interval_of_differences_within_seeds(tmp_path):
    store = RunStore(STORIES, tmp_path / "results.json")
    losses = {"standard": [1.0, 2.0, 3.0], "Full": [0.9, 1.8, 2.7]}
    for name, values in losses.items():
        for seed, loss in enumerate(values):
            recipe = asdict(STORIES.report[name])
            add(store, {"recipe": recipe, "seed": seed, "tokens": 1536, "before": 4.0, "after": loss})
    table = healing_tables(STORIES, RunStore(STORIES, store.path))["results: report"]
    full = next(row for row in table.splitlines() if row.startswith("| Full |"))
    cells = [cell.strip() for cell in full.strip("|").split("|")]
    # Student's t of three seeds is 4.3027: the deviations of 0.1 and 0.9 over the root of 3, times t.
    assert cells[-3:] == ["1.8000", "-0.2000 [-0.4484, +0.0484], tie", "-2.2000 [-4.4357, +0.0357], tie"]


def test_the_page_tells_the_difference_at_equal_time_of_the_stored_runs():
    experiment, ablations = HealingExperiment.load("healing-sixteen"), ScratchExperiment.load("ablations-cpu")
    store = RunStore(experiment, results_file(experiment.name))
    losses = {
        label: [store.find(asdict(experiment.report[label]), seed)["after"] for seed in (0, 1, 2)]
        for label in ("standard, a half", "Block, S=4, a half", "Block, S=4, a tenth")
    }
    standard, half, tenth = losses.values()
    steps = [experiment.report[f"Block, S=4, a {part}"].steps for part in ("tenth", "half")]
    cost = RunStore(ablations, results_file(ablations.name)).costs["ratios"]["eager"]["Block, S=4"]["median"]
    missing = (mean(tenth) - mean(half)) / math.log(steps[1] / steps[0]) * math.log(cost)
    low, high = (bound + missing for bound in ttest_rel(half, standard).confidence_interval(0.95))
    page = (ROOT / "experiments" / "HEALING.md").read_text(encoding="utf-8")
    page = " ".join(page.split())
    assert low < 0 < high
    difference = mean(half) - mean(standard) + missing
    assert f"after a half is {difference:+.4f} [{low:+.4f}, {high:+.4f}], tie (n = {len(half)})" in page
    assert f"takes {cost:.2f} times" in page and f"tokens are worth {missing:.4f}." in page


def healing_command(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    paths = ["--checkpoint", "start", "--corpus", ".", "--results", "r/results.json"]
    command = ["-m", "experiments", "healing", *paths, "--work", "work", *arguments]
    return forks.run(*command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)})


@pytest.mark.slow
def test_the_command_stores_each_run_resumes_and_writes_the_table(start, tokenizer, tmp_path):
    start.save_pretrained(tmp_path / "start")
    tokenizer.save_pretrained(tmp_path / "start")
    documents = python_sources(60_000)
    for name, times in (("train", 5), ("valid", 1)):  # each run reads all of the second
        (tmp_path / f"{name}.txt").write_text("\n<|endoftext|>\n".join([d[:4000] for d in documents] * times))
    page = tmp_path / "r" / "results.md"
    page.parent.mkdir()
    page.write_text("Before.\n<!-- results: report -->\nold\n<!-- end -->\nAfter.\n")

    process = healing_command(tmp_path, "--size", "tiny", "--groups", "report")
    assert process.returncode == 0, process.stderr
    tiny = HealingExperiment.load("healing-tiny")
    runs = RunStore(tiny, tmp_path / "r" / "results.json").runs
    assert "Runs stored: 0 of 9." in process.stdout and len(runs) == 9
    standard, full, _ = runs[:3]
    assert full["before"] == pytest.approx(standard["before"], abs=2e-6)
    assert [len(row) for row in full["depth_attention"]] == [1, 2, 3, 4, 5]
    text = page.read_text()
    assert text.startswith("Before.\n<!-- results: report -->\n| model") and "<!-- end -->\nAfter.\n" in text
    assert "| Full | all | 1,536 | 3 |" in text
    assert not list((tmp_path / "work").iterdir()), "checkpoints of stored runs are not needed"

    process = healing_command(tmp_path, "--size", "tiny")
    assert process.returncode == 0 and "Runs stored: 9 of 11." in process.stdout, process.stderr
    process = healing_command(tmp_path, "--size", "tiny", "--groups", "Half")
    assert process.stderr == "error: --groups must be among 'report', 'standard: rate'; got 'Half'.\n"
    process = healing_command(tmp_path, "--size", "stories", "--groups", "report")
    assert process.returncode == 1 and "holds runs with another batch_size" in process.stderr


def test_a_model_of_the_claim_trains_on_text_that_it_has_not_seen(monkeypatch, tmp_path):
    train = torch.arange(40).view(20, 2)
    data = TokenData(train, train[:1], train[1:2])
    monkeypatch.setattr(healing, "load", lambda *_: data)
    deep = replace(HealingExperiment.load("healing-deep"), length=2, seen=24)
    rest = healing.load_data(deep, tmp_path, None).train
    seen = data.order(0, 12)  # of its pretraining
    assert sorted([*seen[:, 0].tolist(), *rest[:, 0].tolist()]) == train[:, 0].tolist()
