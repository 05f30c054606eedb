"""Stored runs: whole files, nothing rounded, whoever writes them at once, and one process for a run."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from experiments.declared import ScratchRecipe
from experiments.runs import PlannedRun, checkpoint_folder, make_runs
from experiments.store import RunStore

from .stored_runs import CURVE, SMALL, planned

RUN = {"recipe": {}, "seed": 0, "after": 1.0, **CURVE}


def test_two_processes_add_to_one_file(tmp_path):
    first, second = (RunStore(SMALL, tmp_path / "new" / "runs.json") for _ in range(2))
    for number, store in enumerate((first, second, first)):
        store.add(RUN | {"seed": number})
    second.add(RUN | {"seed": 2})  # both have made it
    assert [run["seed"] for run in RunStore(SMALL, first.path).runs] == [0, 1, 2]
    with pytest.raises(ValueError, match=r"another setting \(length: 32, not 64\)\. Move it away"):
        RunStore(replace(SMALL, length=64), first.path)


def test_a_run_is_one_short_line_that_holds_every_digit(tmp_path):
    """Curves and depth attention of thousands of numbers, and what a run that diverged has for a loss."""
    store = RunStore(SMALL, tmp_path / "runs.json")
    run = RUN | {
        "curve": [[10 * step, round(9 / step, 4)] for step in range(1, 400)] + [[4000, float("nan")]],
        "depth_attention": [[1.0], *[[round(1 / n, 4)] * n for n in range(2, 60)]],
    }
    store.add(run)
    store.add(RUN | {"seed": 1})
    lines = store.path.read_text().splitlines()
    assert len(lines) == 5 and len(json.dumps(run)) > 5 * len(lines[2])
    assert repr(RunStore(SMALL, store.path).runs) == repr([run, RUN | {"seed": 1}])
    store.set_costs({"ratios": {"eager": {"Full": {"median": 1.5}}}})
    assert repr(RunStore(SMALL, store.path).runs) == repr(store.runs), "costs lie beside the runs"


def test_two_processes_do_not_make_one_run(tmp_path, capsys):
    """Each has a command's checkpoints while it trains; what the other has stored meanwhile is not made again."""
    first, second = (RunStore(SMALL, tmp_path / "runs.json") for _ in range(2))
    runs = [planned(ScratchRecipe({}, rate, 64), 0) for rate in (1e-3, 2e-3)]
    folder = partial(checkpoint_folder, tmp_path / "work", {})
    made, after_runs = [], []

    def measure(run: PlannedRun, on_step, work: Path) -> dict:
        work.mkdir()
        made.append(run)
        return {"after": 1.0, "seconds": 0.0, **CURVE}

    def measure_beside(run: PlannedRun, on_step, work: Path) -> dict:
        with pytest.raises(FileExistsError, match=r"being written by another process\. Wait for it"):
            make_runs(second, [run], measure, checkpoints=folder)
        if run is runs[0]:
            make_runs(second, runs[1:], measure, checkpoints=folder)
        return measure(run, on_step, work)

    def on_stored() -> None:
        after_runs.append(len(first.runs))

    make_runs(first, runs, measure_beside, checkpoints=folder, on_stored=on_stored)
    assert made == [runs[1], runs[0]] and after_runs == [2, 2]
    assert "Runs stored: 0 of 2. To make: a run, seed 0; a run, seed 0." in capsys.readouterr().out
    make_runs(first, runs, measure, checkpoints=folder, on_stored=on_stored)
    assert len(made) == 2 and len(after_runs) == 3 and "Runs stored: 2 of 2.\n" in capsys.readouterr().out
    assert not list((tmp_path / "work").iterdir())


def test_checkpoints_are_found_by_what_makes_a_run(tmp_path):
    run = planned(ScratchRecipe(SMALL.connections["Full"], 1e-3, 128), 0)
    changed = planned(ScratchRecipe(SMALL.connections["Full"] | {"attn_res_block_size": 2}, 1e-3, 128), 0)
    folders = [checkpoint_folder(tmp_path, {"length": length}, which) for length in (1, 2) for which in (run, changed)]
    assert len(set(folders)) == 4 and folders[0] == checkpoint_folder(tmp_path, {"length": 1}, run)
    assert checkpoint_folder(None, {}, run) is None


@pytest.mark.parametrize("content", ["", '{"setting": {}, "ru', "[]", "{}", b"\x89PNG\xff", "[" * 100_000])
def test_a_damaged_file_of_runs_is_named_and_stays(content, tmp_path):
    path = tmp_path / "runs.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=r"runs\.json is damaged .*: move it away"):
        RunStore(SMALL, path)
    assert path.read_bytes() == (content if isinstance(content, bytes) else content.encode())


@pytest.mark.parametrize(
    ("runs", "problem"),
    [
        ([{"a": 1}], "ValueError: run 1 lacks recipe, seed, after, curve"),
        ([1], "AttributeError"),
        ([RUN, RUN], "ValueError: run 2 is there twice"),
        ([RUN, RUN | {"after": None}], "ValueError: run 2: after must be a number"),
        ([RUN | {"seed": True}], "ValueError: run 1: after must be a number, and seed a whole"),
        ([RUN | {"curve": "no base 85"}], "ValueError"),
        ([RUN | {"curve": "0RRV"}], "error"),
    ],
)
def test_a_file_of_runs_that_lack_something_is_named(runs, problem, tmp_path):
    path = tmp_path / "runs.json"
    path.write_text(json.dumps({"setting": SMALL.setting(), "runs": runs}))
    with pytest.raises(ValueError, match=rf"runs\.json is damaged \({problem}.*\): move it away"):
        RunStore(SMALL, path)


def test_runs_that_were_stored_in_full_are_read(tmp_path):
    """As files were before curves were compressed, or as another tool writes 1.0."""
    path, runs = tmp_path / "runs.json", [RUN, RUN | {"seed": 1, "after": 1}]
    path.write_text(json.dumps({"setting": SMALL.setting(), "runs": runs}))
    assert RunStore(SMALL, path).runs == runs


def test_a_place_where_nothing_can_be_stored_is_found_before_a_run(tmp_path):
    (tmp_path / "runs.lock").mkdir()
    with pytest.raises(OSError, match="lock"):
        make_runs(RunStore(SMALL, tmp_path / "runs.json"), [planned(ScratchRecipe({}, 1e-3, 64), 0)], measure=None)
