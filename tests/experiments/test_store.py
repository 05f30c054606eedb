"""Stored runs: whole files, whoever writes them at once, and one process for a run."""

import json
from functools import partial
from pathlib import Path

import pytest

from experiments.costs import costs
from experiments.harness import Planned, Store, checkpoints, make_runs
from experiments.scratch import check_run
from experiments.scratch_declared import Recipe

from .stored_runs import SMALL, planned

TEXT = '"text": 5'
RUN = '{"recipe": {}, "seed": 0, "after": 1.0}'


def test_two_processes_add_to_one_file(tmp_path):
    first, second = (Store(tmp_path / "new" / "runs.json", {"length": 1}) for _ in range(2))
    for number, store in enumerate((first, second, first)):
        store.add({"recipe": {}, "seed": number, "after": 1.0})
    second.add({"recipe": {}, "seed": 2, "after": 1.0})  # both have made it
    assert [run["seed"] for run in Store(first.path, {"length": 1}).content["runs"]] == [0, 1, 2]
    with pytest.raises(ValueError, match=r"another setting \(length: 1, not 2\)\. Move it away"):
        Store(first.path, {"length": 2})


def test_two_processes_do_not_make_one_run(tmp_path, capsys):
    """Each has a command's checkpoints while it trains; what the other has stored meanwhile is not made again."""
    first, second = (Store(tmp_path / "runs.json", {}) for _ in range(2))
    runs, folder = (
        [planned(Recipe({}, rate, 64), 0) for rate in (1e-3, 2e-3)],
        partial(checkpoints, tmp_path / "work", {}),
    )
    made, after_runs = [], []

    def measure(run: Planned, on_step, work: Path) -> dict:
        work.mkdir()
        made.append(run)
        return {"after": 1.0, "seconds": 0.0}

    def measure_beside(run: Planned, on_step, work: Path) -> dict:
        with pytest.raises(FileExistsError, match=r"being written by another process\. Wait for it"):
            make_runs(second, [run], measure, folder=folder)
        if run is runs[0]:
            make_runs(second, runs[1:], measure, folder=folder)
        return measure(run, on_step, work)

    def on_stored() -> None:
        after_runs.append(len(first.content["runs"]))

    make_runs(first, runs, measure_beside, folder=folder, on_stored=on_stored)
    assert made == [runs[1], runs[0]] and after_runs == [2, 2]
    assert "Runs stored: 0 of 2. To make: a run, seed 0; a run, seed 0." in capsys.readouterr().out
    make_runs(first, runs, measure, folder=folder, on_stored=on_stored)
    assert len(made) == 2 and len(after_runs) == 3 and "Runs stored: 2 of 2.\n" in capsys.readouterr().out
    assert not list((tmp_path / "work").iterdir())


def test_checkpoints_are_found_by_what_makes_a_run(tmp_path):
    run = planned(Recipe(SMALL.connections["Full"], 1e-3, 128), 0)
    changed = planned(Recipe(SMALL.connections["Full"] | {"attn_res_block_size": 2}, 1e-3, 128), 0)
    folders = [checkpoints(tmp_path, {"length": length}, which) for length in (1, 2) for which in (run, changed)]
    assert len(set(folders)) == 4 and folders[0] == checkpoints(tmp_path, {"length": 1}, run)
    assert checkpoints(None, {}, run) is None


@pytest.mark.parametrize("content", ["", '{"setting": {}, "ru', "[]", "{}", b"\x89PNG\xff", "[" * 100_000])
def test_a_damaged_file_of_runs_is_named_and_stays(content, tmp_path):
    path = tmp_path / "runs.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    for read in (lambda: Store(path, {}), lambda: costs(path)):
        with pytest.raises(ValueError, match=r"runs\.json is (damaged|no file of experiments).*: move it away"):
            read()
    assert path.read_bytes() == (content if isinstance(content, bytes) else content.encode())


@pytest.mark.parametrize(
    ("runs", "lacks"),
    [
        ('{"a": 1}', "run 1: KeyError: 'after'"),
        ("[1]", "run 1: TypeError"),
        (f"[{RUN}, {RUN}]", "run 2: ValueError: there twice"),
        (f"[{RUN}, {RUN.replace('1.0', 'null')}]", "run 2: TypeError: after must be a number"),
        (f"[{RUN.replace('0,', '-1,')}]", "run 1: TypeError: after must be a number, and seed a whole one"),
        (f"[{RUN.replace('0,', 'true,')}]", "run 1: TypeError"),
        (f"[{RUN.replace('{}', '5')}]", "run 1: TypeError"),
        (f"[{RUN[:-1]}, {TEXT}}}]", "run 1: TypeError: text must be a fingerprint"),
    ],
)
def test_a_file_of_runs_that_lack_something_is_named(runs, lacks, tmp_path):
    path = tmp_path / "runs.json"
    path.write_text(f'{{"setting": {{}}, "runs": {runs}}}')
    with pytest.raises(ValueError, match=rf"runs\.json is damaged \({lacks}.*\): move it away"):
        Store(path, {})


@pytest.mark.parametrize(
    "change",
    [
        {"recipe": {}},
        {"recipe": {"connection": {}, "rate": "0.008", "tokens": 64}},
        {"recipe": {"connection": [], "rate": 0.008, "tokens": 64}},
        {"curve": None},
        {"curve": []},
        {"curve": [[1]]},
        {"curve": [[1, "2.0"]]},
    ],
)
def test_a_stored_run_from_scratch_has_what_its_tables_need(change, tmp_path):
    path = tmp_path / "runs.json"
    recipe = {"connection": {}, "rate": 0.008, "tokens": 64}
    whole = json.loads(RUN) | {"recipe": recipe, "curve": [[1, 2.0]]}
    path.write_text(json.dumps({"setting": {}, "runs": [whole]}))
    assert Store(path, {}, check_run).content["runs"] == [whole]
    path.write_text(json.dumps({"setting": {}, "runs": [whole | {"after": 1}]}))  # as another tool may write 1.0
    assert Store(path, {}, check_run).content["runs"] == [whole]
    path.write_text(json.dumps({"setting": {}, "runs": [whole, whole | {"seed": 1} | change]}))
    with pytest.raises(ValueError, match=r"runs\.json is damaged \(run 2: .*: move it away"):
        Store(path, {}, check_run)


def test_a_place_where_nothing_can_be_stored_is_found_before_a_run(tmp_path):
    (tmp_path / "runs.lock").mkdir()
    with pytest.raises(OSError, match="lock"):
        make_runs(Store(tmp_path / "runs.json", {}), [planned(Recipe({}, 1e-3, 64), 0)], measure=None)
