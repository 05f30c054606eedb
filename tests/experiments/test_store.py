"""Stored runs: nothing is rounded or lost, whichever process writes, and one process makes a run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.runs import PlannedRun, make_runs
from experiments.store import RunStore

from .stored_runs import CURVE, SMALL, add, planned

RUN = {"recipe": {}, "seed": 0, "after": 1.0, **CURVE}


def test_two_processes_add_to_one_file(tmp_path):
    first, second = (RunStore(SMALL, tmp_path / "new" / "runs.json") for _ in range(2))
    for number, store in enumerate((first, second, first)):
        add(store, RUN | {"seed": number})
    assert [run["seed"] for run in RunStore(SMALL, first.path).runs] == [0, 1, 2]


def test_runs_of_another_setting_are_refused(tmp_path):
    add(RunStore(SMALL, tmp_path / "runs.json"), RUN)
    with pytest.raises(ValueError, match=r"runs\.json holds runs with another length: choose another --results"):
        RunStore(replace(SMALL, length=64), tmp_path / "runs.json")


def test_runs_on_another_text_are_refused(tmp_path):
    store = RunStore(SMALL, tmp_path / "runs.json")
    add(store, RUN, RUN | {"seed": 1, "text": "0123"})  # the oldest runs have no fingerprint
    store.check_text("0123")
    with pytest.raises(ValueError, match=r"holds runs on another text \(0123, not 4567\): choose another --results"):
        store.check_text("4567")


def test_a_run_is_one_short_line_that_holds_every_digit(tmp_path):
    """A run has thousands of numbers, and its loss is NaN if it diverged."""
    store = RunStore(SMALL, tmp_path / "runs.json")
    run = RUN | {
        "curve": [[10 * step, round(9 / step, 4)] for step in range(1, 400)] + [[4000, float("nan")]],
        "depth_attention": [[1.0], *[[round(1 / n, 4)] * n for n in range(2, 60)]],
    }
    add(store, run, RUN | {"seed": 1})
    lines = store.path.read_text().splitlines()
    assert len(lines) == 5 and len(json.dumps(run)) > 5 * len(lines[2])
    assert repr(RunStore(SMALL, store.path).runs) == repr([run, RUN | {"seed": 1}])


def test_two_processes_do_not_make_one_run(tmp_path, capsys):
    """A process holds the checkpoints of a run while it trains, and finds what another one has stored meanwhile."""
    first, second = (RunStore(SMALL, tmp_path / "runs.json") for _ in range(2))
    runs = [planned({}, rate, 64, 0) for rate in (1e-3, 2e-3)]
    made = []

    def measure(run: PlannedRun, on_step, work: Path) -> dict:
        work.mkdir()
        made.append(run)
        return {"after": 1.0, "seconds": 0.0, **CURVE}

    def measure_beside(run: PlannedRun, on_step, work: Path) -> dict:
        with pytest.raises(FileExistsError, match=r"being written by another process\. Wait for it"):
            make_runs(second, [run], measure, tmp_path / "work", {})
        if run is runs[0]:
            make_runs(second, runs[1:], measure, tmp_path / "work", {})
        return measure(run, on_step, work)

    make_runs(first, runs, measure_beside, tmp_path / "work", {})
    assert made == [runs[1], runs[0]]
    assert "Runs stored: 0 of 2." in capsys.readouterr().out
    make_runs(first, runs, measure, tmp_path / "work", {})
    assert len(made) == 2 and "Runs stored: 2 of 2.\n" in capsys.readouterr().out
    assert not list((tmp_path / "work").iterdir())


def test_runs_that_differ_have_different_folders_for_checkpoints(tmp_path):
    folders = []

    def measure(run: PlannedRun, on_step, work: Path) -> dict:
        folders.append(work)
        return {"after": 1.0, "seconds": 0.0, **CURVE}

    full = SMALL.connections["Full"]
    for length in (1, 2, 1):
        store = RunStore(SMALL, tmp_path / f"{len(folders)}.json")
        plan = [planned(full, 1e-3, 128, 0), planned(full | {"attn_res_block_size": 2}, 1e-3, 128, 0)]
        make_runs(store, plan, measure, tmp_path, {"length": length})
    assert len(set(folders)) == 4 and folders[:2] == folders[4:]
