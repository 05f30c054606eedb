"""The command from scratch: trains, stores and goes on; what makes no sense is refused before anything is made."""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments import report
from experiments.command import parse, run_from_scratch, run_healing
from experiments.declared import SELECTION_SEED, ScratchExperiment
from experiments.store import RunStore, results_file

from .. import forks

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("trial", [["--rate", "0.001"], ["--tokens", "64"], []])
def test_a_trial_is_stored_in_a_file_of_its_own(trial, monkeypatch):
    paths = []

    def store(experiment: object, path: Path) -> None:
        paths.append(path)
        raise ValueError("opened")

    monkeypatch.setattr("experiments.command.RunStore", store)
    with pytest.raises(ValueError, match="opened"):
        run_from_scratch(parse(["claim", "--size", "cpu", *trial]))
    assert [path.name for path in paths] == ["claim-cpu-trial.json" if trial else "claim-cpu.json"]


def test_a_picture_that_runs_would_replace_is_named_first(tmp_path):
    (tmp_path / "cat.png").write_bytes(b"a cat")
    with pytest.raises(ValueError, match=r"cat\.png exists, .*Move it away"):
        run_from_scratch(parse(["claim", "--size", "cpu", f"--results={tmp_path}/cat.json"]))


def test_a_trial_leaves_the_pages_of_the_repository_alone(tmp_path):
    assert report.is_reported("claim-cpu", results_file("claim-cpu"))
    for name, path in (
        ("claim-cpu", tmp_path / "claim-cpu.json"),
        ("claim-cpu", results_file("claim-cpu-trial")),
        ("claim-tiny", results_file("claim-tiny")),
    ):
        assert not report.is_reported(name, path)


def run(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess:
    files = ["--results", folder / "r" / "runs.json", "--work", folder / "work"]
    options = [*map(str, (*files, *arguments))]
    return forks.run("-m", "experiments", "claim", "--size", "tiny", *options, cwd=ROOT)


@pytest.mark.slow
def test_the_command_trains_stores_and_goes_on(assets, tmp_path):
    """Twice the same command: the second finds everything, and the tables come out the same."""
    shorter = ["--corpus", assets / "corpora" / "tinystories", "--rate", "0.004", "--tokens", "2048"]
    done = run(tmp_path, *shorter, "--keep", tmp_path / "models")
    assert done.returncode == 0, done.stderr
    runs = RunStore(ScratchExperiment.load("claim-tiny"), tmp_path / "r" / "runs.json").runs
    assert [(run["recipe"]["tokens"], run["seed"]) for run in runs] == [(2048, seed) for seed in (0, 0, 0, 1, 1, 1)]
    assert all(run["curve"][-1][0] == 4 and run["made_by"]["torch"] == version("torch") for run in runs)
    assert [len(run.get("depth_attention", ())) for run in runs] == [0, 9, 9] * 2  # eight sublayers and the output
    assert (tmp_path / "r" / "runs.png").stat().st_size > 10_000
    assert not list((tmp_path / "work").iterdir())
    kept = sorted((tmp_path / "models").iterdir())
    assert len(kept) == 6
    model, tokenizer = (auto.from_pretrained(kept[0]) for auto in (AutoModelForCausalLM, AutoTokenizer))
    assert len(tokenizer) == model.config.vocab_size
    page = (tmp_path / "r" / "runs.md").read_text()
    assert re.search(r"\| Full \| 0.004 \| 2 \| .* ± .* \| .* ± .* \|", page)
    assert "The sweep was not made." in page
    assert "| Full | 0.004 | 2 |" in done.stdout, "what came out"
    assert f"Runs: {tmp_path / 'r' / 'runs.json'}. Tables: {tmp_path / 'r' / 'runs.md'}." in done.stdout
    again = run(tmp_path, *shorter, "--keep", tmp_path / "others")
    assert "Runs stored: 6 of 6." in again.stdout and "its model is not kept" in again.stdout
    assert not (tmp_path / "others").exists()
    assert (tmp_path / "r" / "runs.md").read_text() == page

    for arguments, status, message in (
        (["--connections", "Fall"], 1, "--connections must be among 'standard', 'Block, S=2', 'Full'; got 'Fall'."),
        (["--prepare"], 1, "--prepare needs --corpus, the folder of tinystories."),
        (["--corpus", assets / "corpora" / "classics"], 1, "--corpus must be the folder of tinystories"),
        *([] if torch.cuda.is_available() else [(["--device", "cuda"], 1, "PyTorch sees no GPU")]),
        (["--seeds", str(SELECTION_SEED)], 2, "which chooses settings"),
    ):
        failed = run(tmp_path, *arguments)
        assert failed.returncode == status and message in failed.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--rate", "0", "must be a number above 0 such as 0.004; got 0"),
        ("--rate", "high", "invalid _rate value: 'high'"),
        ("--tokens", "1e6", "invalid _count value: '1e6'"),
        ("--rate", "nan", "must be a number above 0 such as 0.004; got nan"),
        ("--tokens", "0", "must be a whole number above 0 such as 2097152; got 0"),
        ("--seeds", "-1", "must be from 0 to 2**32 - 1"),
        ("--seeds", str(SELECTION_SEED), "which chooses settings"),
        ("--results", "runs.png", "must be a .json file; got runs.png"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_is_made(option, value, message, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(["claim", f"{option}={value}"])
    assert stop.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--work", "--keep", "--results"])
def test_a_place_that_cannot_be_written_is_found_before_training(option, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / ("runs.json" if option == "--results" else "folder")
    results = [] if option == "--results" else [f"--results={tmp_path}/runs.json"]
    monkeypatch.setattr("experiments.command.load", lambda *_: pytest.fail("the text was loaded"))
    with pytest.raises(OSError, match="file"):
        run_from_scratch(parse(["claim", "--size=tiny", "--rate=0.004", *results, f"{option}={path}"]))


def test_results_at_a_link_are_those_of_the_file_that_it_names(tmp_path):
    (tmp_path / "link.json").symlink_to("runs.json")  # which is not there yet
    assert parse(["claim", f"--results={tmp_path}/link.json"]).results == tmp_path.resolve() / "runs.json"


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"<!-- runs: result -->\nPrecious.\n", "does not end with"), (b"\xff", "runs.md must be a text in UTF-8")],
)
@pytest.mark.parametrize(
    ("start", "command"),
    [(run_from_scratch, ["claim"]), (run_healing, ["healing", "--checkpoint=here", "--corpus=here"])],
    ids=["claim", "healing"],
)
def test_a_page_that_could_not_be_written_later_is_named_before_training(start, command, content, message, tmp_path):
    page = tmp_path / "runs.md"
    page.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        start(parse([*command, "--size=tiny", f"--results={tmp_path}/runs.json"]))
    assert page.read_bytes() == content


def test_an_interrupt_while_it_is_loading_ends_in_one_line(tmp_path):
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "experiments", "report"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "Stopped: the same command goes on from what is stored and from its checkpoints.\n"
