"""The command from scratch trains, stores and resumes. Trials leave the pages of the repository alone."""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.command import parse, run_from_scratch
from experiments.declared import SELECTION_SEED, ScratchExperiment
from experiments.store import RunStore

from .. import forks

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (["--rate", "0.001"], "claim-cpu-trial.json"),
        (["--tokens", "64"], "claim-cpu-trial.json"),
        (["--size", "tiny"], "claim-tiny-trial.json"),
        ([], "claim-cpu.json"),
    ],
)
def test_a_trial_is_stored_in_another_file(options, name, monkeypatch):
    paths = []

    def store(experiment: object, path: Path) -> None:
        paths.append(path)
        raise ValueError("opened")

    monkeypatch.setattr("experiments.command.RunStore", store)
    with pytest.raises(ValueError, match="opened"):
        run_from_scratch(parse(["claim", *options]))
    assert [path.name for path in paths] == [name]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--connections", "Fall"], r"--connections must be among 'standard', 'Block, S=2', 'Full'; got 'Fall'\."),
        (["--seeds", str(SELECTION_SEED)], "--seeds must not have 10, the seed of the runs that choose settings"),
        (["--prepare"], "--corpus must be the folder of tinystories; got None"),
        (["--prepare", "--corpus", "classics"], "--corpus must be the folder of tinystories; got classics"),
    ],
)
def test_an_option_that_does_not_fit_is_refused_before_training(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run_from_scratch(parse(["claim", "--size=tiny", f"--results={tmp_path}/runs.json", *options]))


def run(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess:
    files = ["--results", folder / "r" / "runs.json", "--work", folder / "work"]
    options = [*map(str, (*files, *arguments))]
    return forks.run("-m", "experiments", "claim", "--size", "tiny", *options, cwd=ROOT)


@pytest.mark.slow
def test_the_command_trains_stores_and_goes_on(assets, tmp_path):
    """The second call of the same command finds all runs, and writes the same tables."""
    shorter = ["--corpus", assets / "corpora" / "tinystories", "--rate", "0.004", "--tokens", "2048"]
    done = run(tmp_path, *shorter, "--keep", tmp_path / "models")
    assert done.returncode == 0, done.stderr
    runs = RunStore(ScratchExperiment.load("claim-tiny"), tmp_path / "r" / "runs.json").runs
    assert [(run["recipe"]["tokens"], run["seed"]) for run in runs] == [(2048, seed) for seed in (0, 0, 0, 1, 1, 1)]
    assert all(run["curve"][-1][0] == 4 and run["made_by"]["torch"] == version("torch") for run in runs)
    assert [len(run.get("depth_attention", ())) for run in runs] == [0, 9, 9] * 2  # eight sublayers and the output
    assert not list((tmp_path / "work").iterdir())
    kept = sorted((tmp_path / "models").iterdir())
    assert len(kept) == 6
    model, tokenizer = (auto.from_pretrained(kept[0]) for auto in (AutoModelForCausalLM, AutoTokenizer))
    assert len(tokenizer) == model.config.vocab_size
    page = (tmp_path / "r" / "runs.md").read_text()
    assert re.search(r"\| Full \| 0\.004 \| 2 \| \d\.\d+ \| [+-]\d\.\d+ \[.*, .*\]", page)
    assert "| Full | 0.004 | 2 |" in done.stdout
    again = run(tmp_path, *shorter, "--keep", tmp_path / "others")
    assert "Runs stored: 6 of 6." in again.stdout and "its model is not kept" in again.stdout
    assert not (tmp_path / "others").exists()
    assert (tmp_path / "r" / "runs.md").read_text() == page
    failed = run(tmp_path, "--connections", "Fall")
    assert failed.returncode == 1 and failed.stderr.splitlines()[-1].startswith("error: --connections must be among")


def test_an_interrupt_while_modules_load_ends_in_one_line(tmp_path):
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "experiments", "report"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "Stopped: the same command goes on from what is stored and from its checkpoints.\n"
