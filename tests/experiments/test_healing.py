"""Healing: recipes train what they name on the same tokens, and the command stores, resumes and tabulates."""

import json
import math
import os
import re
import shutil
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from attnres.residual_attnres import residual_tensors
from attnres.training.runs import sequence_losses
from attnres.training.text import python_sources, train_tokenizer
from experiments import healing
from experiments.command import parse, run_healing
from experiments.data import TokenData
from experiments.declared import SELECTION_SEED, HealingExperiment, HealingRecipe
from experiments.healing import Healing
from experiments.runs import PlannedRun
from experiments.store import RunStore
from experiments.tables import healing_tables

from .. import forks

ROOT = Path(__file__).parents[2]
SETTING = {"length": 256, "held_out_length": 512, "batch_size": 2}
STORIES = HealingExperiment.load("stories")


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(python_sources(30_000), 300)


@pytest.fixture(scope="module")
def start() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=300, tie_word_embeddings=True, bos_token_id=1, **sizes))


def changed(recipe: HealingRecipe, start: LlamaForCausalLM) -> tuple[set[str], set[str]]:
    """The tensors of the backbone, and those of the residual connections, that three steps of the recipe change."""
    model = healing.reconnected(start, recipe)
    attnres = set(residual_tensors(model))
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    blocks = torch.randint(3, 300, (6, 32), generator=torch.Generator().manual_seed(0))
    healing.continue_training(model, blocks, replace(recipe, steps=3), batch_size=2, seed=0, on_step=lambda: None)
    names = {name for name, tensor in model.named_parameters() if not torch.equal(tensor, before[name])}
    return names - attnres, names & attnres


def test_a_recipe_trains_the_tensors_that_it_names_and_no_others(start):
    backbone = {name for name, _ in start.named_parameters()}
    # The first sublayer has one source: its pseudo-query changes nothing, and gets no gradient.
    attnres = {
        name
        for name in residual_tensors(healing.reconnected(start, HealingRecipe(block_size=1)))
        if ".0.self_attention" not in name
    }
    queries = {name for name in attnres if name.endswith("_proj.weight")}
    assert 0 < len(queries) < len(attnres)
    assert changed(HealingRecipe(), start) == (backbone, set())
    assert changed(HealingRecipe(block_size=1), start) == (backbone, attnres)
    assert changed(HealingRecipe(block_size=2, trained="all but key norms"), start) == (backbone, queries)
    assert changed(HealingRecipe(block_size=2, trained="AttnRes"), start) == (set(), attnres)
    assert changed(HealingRecipe(trained="norms"), start) == ({name for name in backbone if "norm" in name}, set())
    assert changed(HealingRecipe(block_size=1, alone=1.0), start) == (set(), attnres)
    assert changed(HealingRecipe(block_size=1, alone=0.4), start) == (backbone, attnres)


def test_every_recipe_sees_the_same_tokens_and_every_seed_others(start, tmp_path, monkeypatch):
    held_out = torch.zeros(1, 4, dtype=torch.long)
    data = TokenData(torch.arange(40).view(40, 1), held_out, held_out)
    runs = Healing(replace(STORIES, batch_size=4), start, data, RunStore(STORIES, tmp_path / "runs.json"))

    def seen(recipe: HealingRecipe, seed: int) -> list[int]:
        parts = []
        monkeypatch.setattr(healing, "train", lambda model, part, *_, **__: parts.append(part))
        runs.measure(PlannedRun("a run", replace(recipe, steps=6), seed, 6), lambda: None)
        return torch.cat(parts).flatten().tolist()

    standard = seen(HealingRecipe(), 0)
    assert len(set(standard)) == 24
    assert (
        seen(HealingRecipe(block_size=1, trained="AttnRes"), 0)
        == seen(HealingRecipe(block_size=2, alone=0.25), 0)
        == standard
    )
    assert seen(HealingRecipe(), 1) != standard


def test_a_run_of_two_phases_goes_on_in_the_one_that_it_was_stopped_in(start, tmp_path, monkeypatch):
    """Both may train the same tensors: the second must not begin from checkpoints of the first."""
    works = []
    monkeypatch.setattr(healing, "train", lambda *_, work, **__: works.append(work))
    blocks, recipe = (
        torch.zeros(4, 8, dtype=torch.long),
        HealingRecipe(steps=4, block_size=2, trained="AttnRes", alone=0.5),
    )
    model = healing.reconnected(start, recipe)
    healing.continue_training(model, blocks, recipe, 1, 0, lambda: None, tmp_path)
    assert len(set(works)) == 2 and {work.parent for work in works} == {tmp_path}


def test_runs_of_another_model_or_text_are_not_mixed(start, tmp_path):
    held_out = torch.randint(3, 300, (2, 16), generator=torch.Generator().manual_seed(0))
    store = RunStore(STORIES, tmp_path / "runs.json")
    began = healing.mean_loss(start, held_out)
    store.add({"recipe": asdict(HealingRecipe(steps=0)), "seed": 0, "before": began, "after": began, "tokens": 0})
    Healing(STORIES, start, TokenData(held_out, held_out, held_out), store).make(
        [("standard", HealingRecipe(steps=0), 0)]
    )
    with pytest.raises(ValueError, match=rf"begins with a loss of {began:.4f} .* Choose another --results"):
        other = held_out.flip(1)
        Healing(STORIES, start, TokenData(other, other, other), store).make([("standard", HealingRecipe(steps=0), 0)])


@pytest.mark.parametrize("seed", [0, SELECTION_SEED])
@pytest.mark.parametrize(
    "recipe",
    [HealingRecipe(block_size=1), HealingRecipe(block_size=2, scale="mean"), HealingRecipe(block_size=1, gated=True)],
)
def test_any_stored_run_tells_another_model(recipe, seed, start, tmp_path):
    """Whatever its connection and its text: a run that is wanted need not share them."""
    held_out = torch.randint(3, 300, (2, 16), generator=torch.Generator().manual_seed(0))
    data = TokenData(held_out, held_out.flip(1), held_out)
    standard = {
        "recipe": asdict(HealingRecipe()),
        "seed": 1,
        "before": healing.mean_loss(start, data.valid),
        "after": 1.0,
        "tokens": 64,
    }

    def make(before: float) -> None:
        store = RunStore(STORIES, tmp_path / f"{before}.json")
        store.add(standard)
        store.add({"recipe": asdict(recipe), "seed": seed, "before": before, "after": 1.0, "tokens": 64})
        Healing(STORIES, start, data, store).make([("standard", HealingRecipe(), 1)])

    began = healing.mean_loss(healing.reconnected(start, recipe), data.held_out(seed == SELECTION_SEED))
    make(began)
    for before in (began + 0.01, math.nan):
        with pytest.raises(ValueError, match=rf"begins with a loss of {before:.4f} .* Choose another --results"):
            make(before)


@pytest.fixture
def corpora(tmp_path) -> list[Path]:
    """Two texts that share `valid.txt`."""
    documents = [document[:4000] for document in python_sources(60_000)] * 5
    folders = [tmp_path / name for name in ("one", "other")]
    for folder, train in zip(folders, (documents, documents[::-1])):
        folder.mkdir()
        for name, part in {"train": train, "valid": documents[:9]}.items():
            (folder / f"{name}.txt").write_text("\n<|endoftext|>\n".join(part))
    return folders


def test_runs_on_another_training_text_are_not_mixed(start, tokenizer, corpora, tmp_path):
    tiny = HealingExperiment.load("tiny")
    one, other = (
        Healing(tiny, start, healing.load_data(tiny, folder, tokenizer), RunStore(tiny, tmp_path / "runs.json"))
        for folder in corpora
    )
    assert torch.equal(one.data.valid, other.data.valid)
    one.make([("standard", tiny.report["standard"], 0)])
    other.store.read()
    with pytest.raises(ValueError, match=rf"on another text \({one.data.fingerprint}, not {other.data.fingerprint}\)"):
        other.make([("standard", tiny.report["standard"], 1)])
    del other.store.runs[0]["text"]  # as runs of before are stored
    other.check_stored()


def test_a_seed_that_is_named_twice_is_one_run(start, tokenizer, corpora, tmp_path):
    start.save_pretrained(tmp_path / "start")
    tokenizer.save_pretrained(tmp_path / "start")
    paths = [f"--checkpoint={tmp_path}/start", f"--corpus={corpora[0]}", f"--results={tmp_path}/runs.json"]
    run_healing(parse(["healing", "--size=tiny", *paths, "--groups=report", "--recipes=standard", "--seeds", "0", "0"]))
    assert "| standard | all | 1,536 | 1 |" in (tmp_path / "runs.md").read_text()


@pytest.fixture
def checkpoint(assets, tmp_path) -> Path:
    return Path(shutil.copytree(assets / "checkpoints" / "stories260K-hf", tmp_path / "start"))


def test_a_checkpoint_that_lacks_a_tensor_is_refused(checkpoint):
    weights = load_file(checkpoint / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"^--checkpoint: .*start is incomplete: it lacks `model\.layers\.1\.mlp\.up_"):
        healing.load_start(checkpoint)


def test_a_model_that_is_stored_in_bfloat16_is_trained_in_float32(checkpoint):
    AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).save_pretrained(checkpoint)
    model, _ = healing.load_start(checkpoint)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        ("config.json", {"intermediate_size": 100}, "has shape .*Use the checkpoint's own config.json"),
        ("config.json", {"hidden_size": "x"}, "has no configuration that loads.*hidden_size"),
        ("config.json", {"model_type": "unheard"}, "has no configuration that loads.*unheard"),
        ("tokenizer.json", None, "has no tokenizer that loads"),
        ("tokenizer_config.json", {"bos_token": None}, "has no beginning-of-text token.*Name it as bos_token"),
    ],
)
def test_a_damaged_checkpoint_is_refused_in_one_line(file, fields, message, checkpoint, assets, tmp_path):
    path = checkpoint / file
    path.write_text(json.dumps(json.loads(path.read_text()) | fields if fields else {}))
    given = [f"--checkpoint={checkpoint}", f"--corpus={assets / 'corpora' / 'tinystories'}"]
    with pytest.raises(ValueError, match=f"^--checkpoint: .*{message}") as refusal:
        run_healing(parse(["healing", "--size=tiny", *given, f"--results={tmp_path}/runs.json"]))
    assert "\n" not in str(refusal.value)


def test_a_checkpoint_without_a_tokenizer_is_refused_in_one_line(checkpoint):
    for path in checkpoint.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ValueError, match=r"^--checkpoint: .* has no tokenizer that loads: save one there by [^\n]*$"):
        healing.load_start(checkpoint)


FULL = {"recipe": asdict(HealingRecipe(block_size=1)), "seed": 0, "before": 2.0, "after": 1.0, "tokens": 64}
FULL |= {"depth_attention": [[1.0], [0.4, 0.6]], "distance_from_uniform": 0.1, "text": "0123456789ab"}


@pytest.mark.parametrize("lacking", ["before", "tokens"])
def test_a_stored_run_that_tables_cannot_show_is_named(lacking, tmp_path):
    path = tmp_path / "runs.json"
    run = {key: value for key, value in FULL.items() if key != lacking} | {"seed": 1}
    path.write_text(json.dumps({"setting": STORIES.setting(), "runs": [FULL, run]}))
    with pytest.raises(ValueError, match=rf"runs\.json is damaged \(ValueError: run 2 lacks {lacking}\): move it away"):
        run_healing(parse(["healing", f"--results={path}", "--checkpoint=here", "--corpus=here"]))


def test_tables_leave_out_what_a_run_that_diverged_lacks(tmp_path):
    """The weights of its depth attention are no numbers, and it is no rival of the others."""
    store, full = RunStore(STORIES, tmp_path / "runs.json"), STORIES.report["Full"]
    lost = {"recipe": asdict(full), "after": math.nan, "distance_from_uniform": math.nan, "depth_attention": [[], []]}
    for seed, run in enumerate((FULL | {"recipe": asdict(full)}, FULL | lost)):
        store.add(run | {"seed": seed})
    tables = healing_tables(STORIES, RunStore(STORIES, store.path), [0, 1])
    assert "| Full | 0.1000 | 0.1000 |" in tables["runs: depth attention"]

    def differences() -> list[str]:
        table = healing_tables(STORIES, store, [0, 1])["runs: standard: rate"]
        return re.findall(r"([^ ]*) \|$", table, re.MULTILINE)[1:]

    losses = dict(zip(STORIES.sweeps["standard: rate"].values(), (math.nan, 1.0, 1.5)))
    shown = []
    for recipe, loss in losses.items():
        store.add({"recipe": asdict(recipe), "seed": SELECTION_SEED, "before": 2.0, "after": loss, "tokens": 64})
        shown.append(differences())
    assert shown[0] == [""] and shown[-1] == ["+nan", "+0.0000", "+0.5000"]


def test_a_text_without_a_block_is_refused(tokenizer, tmp_path):
    for name in ("train", "valid"):
        (tmp_path / f"{name}.txt").write_text("x\n\ny")
    with pytest.raises(ValueError, match="longer text"):
        healing.load_data(STORIES, tmp_path, tokenizer)


@pytest.mark.slow
def test_the_pretrained_model_has_its_known_loss_on_this_packing(assets):
    path = assets / "checkpoints" / "stories260K-hf"
    data = healing.load_data(STORIES, assets / "corpora" / "tinystories", AutoTokenizer.from_pretrained(path))
    assert sequence_losses(AutoModelForCausalLM.from_pretrained(path), data.valid).mean().item() == pytest.approx(
        1.4745, abs=1e-3
    )


def test_the_table_shows_mean_and_deviation_of_differences_within_seeds(tmp_path):
    store = RunStore(STORIES, tmp_path / "results.json")
    losses = {"standard": [1.0, 2.0, 3.0], "Full": [0.9, 1.8, 2.7]}
    for name, values in losses.items():
        for seed, loss in enumerate(values):
            recipe = asdict(STORIES.report[name])
            store.add({"recipe": recipe, "seed": seed, "tokens": 1536, "before": 4.0, "after": loss})
    table = healing_tables(STORIES, RunStore(STORIES, store.path), [0, 1, 2])["results: report"]
    full = next(row for row in table.splitlines() if row.startswith("| Full |"))
    assert re.findall(r"[+-]?\d\.\d+ ± \d\.\d+", full) == ["1.8000 ± 0.9000", "-0.2000 ± 0.1000", "-2.2000 ± 0.9000"]


def healing_command(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    paths = ["--checkpoint", "start", "--corpus", ".", "--results", "r/results.json"]
    command = ["-m", "experiments", "healing", *paths, "--work", "work", *arguments]
    return forks.run(*command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)})


@pytest.mark.slow
def test_the_command_stores_each_run_resumes_and_writes_the_table(start, tokenizer, tmp_path):
    start.save_pretrained(tmp_path / "start")
    tokenizer.save_pretrained(tmp_path / "start")
    documents = python_sources(60_000)
    for name in ("train", "valid"):
        (tmp_path / f"{name}.txt").write_text("\n<|endoftext|>\n".join([d[:4000] for d in documents] * 5))
    page = tmp_path / "r" / "results.md"
    page.parent.mkdir()
    page.write_text("Before.\n<!-- results: report -->\nold\n<!-- end -->\nAfter.\n")

    report = ("--size", "tiny", "--groups", "report", "--seeds", "0")
    process = healing_command(tmp_path, *report, "--recipes", "standard")
    assert process.returncode == 0, process.stderr
    tiny = HealingExperiment.load("tiny")
    assert tiny.setting() == SETTING
    first = RunStore(tiny, tmp_path / "r" / "results.json").runs
    assert len(first) == 1

    process = healing_command(tmp_path, *report, "--recipes", "standard", "Full", "Full, gated")
    assert process.returncode == 0, process.stderr
    assert "Runs stored: 1 of 3." in process.stdout
    standard, full, gated = RunStore(tiny, tmp_path / "r" / "results.json").runs
    assert [standard] == first
    assert full["before"] == pytest.approx(standard["before"], abs=2e-6)
    assert [len(row) for row in full["depth_attention"]] == [1, 2, 3, 4, 5]
    assert "gamma" not in full and 0 < gated["gamma"] < 0.01
    text = page.read_text()
    assert text.startswith("Before.\n<!-- results: report -->\n| model") and "<!-- end -->\nAfter.\n" in text
    assert f"| Full | all | 1,536 | 1 | {full['after']:.4f} | {full['after'] - standard['after']:+.4f} |" in text

    assert not list((tmp_path / "work").iterdir()), "checkpoints of stored runs are not needed"

    process = healing_command(tmp_path, *report, "--recipes", "Half")
    assert (process.returncode, process.stderr) == (
        1,
        "error: --recipes must be among 'standard', 'Full', 'Full, gated'; got 'Half'.\n",
    )
    process = healing_command(tmp_path, "--size", "stories", "--groups", "report")
    assert process.returncode == 1 and len(process.stderr.strip().splitlines()) == 1
    assert "another setting" in process.stderr
    process = healing_command(tmp_path, "--size", "sixteen", "--results", "r/sixteen.json")
    assert process.returncode == 1
    assert "--checkpoint: start has a vocabulary of 300 tokens, and sixteen is declared for" in process.stderr
    weights = tmp_path / "start" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    process = healing_command(tmp_path, *report)
    assert process.returncode == 1 and process.stderr.startswith(
        "error: --checkpoint: start/model.safetensors is truncated or damaged ("
    )
    process = healing_command(tmp_path, "--seeds", str(SELECTION_SEED))
    assert process.returncode == 2 and "which chooses settings" in process.stderr


def test_a_model_of_the_claim_goes_on_with_text_that_it_has_not_seen(monkeypatch, tmp_path):
    train = torch.arange(40).view(20, 2)
    data = TokenData(train, train[:1], train[1:2])
    monkeypatch.setattr(healing, "load", lambda *_: data)
    monkeypatch.setattr(healing, "prepared_file", lambda text: tmp_path)
    deep = replace(HealingExperiment.load("deep"), length=2, seen=24)
    rest = healing.load_data(deep, tmp_path, None).train
    seen = data.order(0, 12)  # of its pretraining
    assert sorted([*seen[:, 0].tolist(), *rest[:, 0].tolist()]) == train[:, 0].tolist()
    with pytest.raises(ValueError, match=r"seen is 40 tokens, which is all of the 40 that classics"):
        healing.load_data(replace(deep, seen=40), tmp_path, None)
