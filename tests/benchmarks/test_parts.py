"""Tests of parts and their helpers: memory, machines, tables, files, runs that are stopped."""

import json
import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from benchmarks import machine, memory, run, stored
from benchmarks.timing import Setting


def test_the_peak_counts_the_memory_that_is_held_at_once():
    def two_then_one() -> torch.Tensor:
        first, second = torch.zeros(1000), torch.zeros(3000)
        del first, second
        return torch.zeros(500)

    before = torch.zeros(10**6)
    assert memory.peak_bytes(lambda: before.add_(1)) < 100
    assert memory.peak_bytes(two_then_one) == pytest.approx(16_000, rel=0.02)


def test_the_peak_is_the_same_number_each_time():
    def work() -> None:
        x = torch.ones(100, 100, requires_grad=True)
        (x.exp() @ x).sin().sum().backward()

    work()
    assert len({memory.peak_bytes(work) for _ in range(3)}) == 1


def test_a_machine_is_described_with_versions_and_commit():
    about = machine.describe("cpu")
    assert about["machine"]["cores"] >= 1
    assert about["machine"]["memory_gib"] > 0
    assert about["versions"]["torch"] == version("torch")
    assert about.keys() >= {"commit", "dirty", "date"}


def test_own_work_does_not_count_as_that_of_others():
    others = machine.Others()
    torch.randn(10**6).sort()
    assert 0 <= others.share() <= 1


def test_a_table_counts_its_targets_and_aligns_numbers():
    rows = [["a", 1, stored.verdict(1.0, 1.02)], ["b", 2, stored.verdict(2.0, 1.02)]]
    text = stored.markdown_table("Title", ["name", "value", "target"], rows, note="Note.")
    assert text.splitlines()[0] == "**Title**"
    assert "| a    |     1 | <= 1.02 met    |" in text
    assert text.splitlines()[-1] == "Targets met: 1 of 2. Note."


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "ops.json"
    stored.store(path, {"date": "then", "rows": [{"a": 1}, {"b": 2}]})
    assert json.loads(path.read_text()) == {"date": "then", "rows": [{"a": 1}, {"b": 2}]}

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("attnres.utils.files.os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stored.store(path, {"date": "now", "rows": []})
    assert json.loads(path.read_text())["date"] == "then"
    assert [file.name for file in tmp_path.iterdir()] == ["ops.json"]


class Part:
    """A part whose second row does not come, because the run is stopped or fails by `error`."""

    def __init__(self, error):
        self.error = error

    def measure(self, setting):
        yield {"dtype": "float32", "tokens": 16, "ratios": {"ours / standard": {"median": 1.25}}}
        if self.error is not None:
            raise self.error

    def tables(self, rows):
        raise RuntimeError("no table")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError, MemoryError])
@pytest.mark.parametrize("is_stored", [False, True])
def test_a_stopped_run_keeps_its_rows_and_the_results_of_a_whole_run(tmp_path, monkeypatch, capsys, is_stored, error):
    monkeypatch.setitem(sys.modules, "benchmarks.phases", Part(error))
    whole, stopped = tmp_path / "phases.json", tmp_path / "phases.stopped.json"
    if is_stored:
        whole.write_text("a whole run")
    with pytest.raises(error):
        run.run_bench(["phases"], Setting(threads=torch.get_num_threads()), tmp_path)
    shown = capsys.readouterr().out
    assert "float32, tokens 16: ours / standard 1.250" in shown
    kept = stopped if is_stored else whole
    assert f"Stopped. Rows measured so far: 1, stored in {kept}" in shown
    assert len(json.loads(kept.read_text())["rows"]) == 1
    assert {*tmp_path.iterdir()} == {kept, whole}
    assert not is_stored or whole.read_text() == "a whole run"


def test_a_part_whose_package_is_not_installed_is_left_out_and_its_stored_results_stay(tmp_path, monkeypatch, capsys):
    for name in ["triton", *(name for name in sys.modules if name.startswith("triton."))]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "benchmarks.without_launches", raising=False)  # which imports Triton
    monkeypatch.setattr(Part, "tables", lambda self, rows: {})
    monkeypatch.setitem(sys.modules, "benchmarks.phases", Part(None))
    (tmp_path / "host.json").write_text("a whole run")
    setting = Setting(threads=torch.get_num_threads(), quick=True)
    run.run_bench(["host", "phases"], setting, tmp_path)
    assert re.search(r"host is left out: the package triton is not installed\..* pip install", capsys.readouterr().out)
    assert len(json.loads((tmp_path / "phases.json").read_text())["rows"]) == 1
    with pytest.raises(ModuleNotFoundError, match="the package triton is not installed"):
        run.run_bench(["host"], setting, tmp_path)
    assert (tmp_path / "host.json").read_text() == "a whole run"


def test_a_folder_that_cannot_be_written_to_is_refused_before_the_first_row(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "benchmarks.phases", Part(None))
    (tmp_path / "file").touch()
    for out in (tmp_path / "file" / "out", Path("/proc")):
        with pytest.raises(OSError):
            run.run_bench(["phases"], Setting(threads=torch.get_num_threads()), out)
    assert capsys.readouterr().out == ""


def test_a_whole_run_is_stored_before_its_tables_are_made(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "benchmarks.phases", Part(None))
    with pytest.raises(RuntimeError, match="no table"):
        run.run_bench(["phases"], Setting(threads=torch.get_num_threads()), tmp_path)
    assert len(json.loads((tmp_path / "phases.json").read_text())["rows"]) == 1


def test_a_part_takes_at_least_the_time_of_its_stored_calls(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    shared, first, second = ({"calls": 2, "wall": wall} for wall in ([1.0, 2.0], [3.0, 4.0], [5.0, 6.0]))
    rows = [{"seconds": {"standard": shared, "ours": ours}} for ours in (first, second)]
    stored.store(tmp_path / "phases.json", {"setting": {"repeats": 2}, "rows": rows})
    assert run.expected("phases", Setting(repeats=2)) == (2, 2 * (1 + 2 + 3 + 4 + 5 + 6))
    assert run.expected("phases", Setting(repeats=4)) == (2, 4 * (1 + 2 + 3 + 4 + 5 + 6))
    assert run.expected("phases", Setting(quick=True)) is None
    assert run.expected("models", Setting()) is None


def test_the_stored_results_tell_how_long_the_models_take():
    rows, seconds = run.expected("models", Setting())
    assert rows > 10
    assert seconds > 60
