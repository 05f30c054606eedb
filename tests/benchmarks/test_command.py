"""`python -m benchmarks` prints tables, stores results, and keeps the rows of a run that is stopped."""

import json
import signal
import subprocess
import time
from importlib import import_module
from pathlib import Path

import pytest

from attnres import CONNECTIONS
from attnres.commands import connections as listed
from benchmarks import command, connections

from .. import forks

ROOT = Path(__file__).parents[2]
QUICK = ("--quick", "--repeats", "2", "--threads", "1")
# The fields of each part's first row beside its times.
FIELDS = {
    "ops": {"pass", "dtype", "width", "sources", "tokens"},
    "phases": {"sources", "sublayers", "tokens", "width", "chosen"},
    "models": {"model", "dtype", "workload", "connection", "tokens"},
    "connections": {"model", "workload", "bytes"},
    "kimi_k3": {"dtype", "workload", "form", "tokens", "products"},
    "drafts": {"mlp", "draft", "per_pass"},
}
TIMED = {"ratios", "processor_ratios", "seconds"}


def run_bench(*arguments: object) -> subprocess.CompletedProcess:
    return forks.run("-m", "benchmarks", *arguments, cwd=ROOT)


def test_every_connection_is_measured():
    assert {form["residual_connection"] for form in connections.FORMS.values()} == CONNECTIONS.keys()
    assert next(iter(connections.FORMS)) == connections.STANDARD


def test_the_list_of_connections_has_the_times_that_were_measured():
    stored = json.loads((ROOT / "benchmarks" / "results" / "connections.json").read_text())
    (row,) = [row for row in stored["rows"] if row["workload"] == "training step"]
    measured = {}
    for form, fields in connections.FORMS.items():
        ratio = row["ratios"].get(f"{form} / {connections.STANDARD}", {"median": 1})
        measured.setdefault(fields["residual_connection"], f"{ratio['median']:.2f}")  # the first form has no options
    shown = {name: float(one.measured["step"]) for name, one in listed.connections().items() if name in measured}
    assert shown == {name: float(time) for name, time in measured.items()}


@pytest.mark.slow
@pytest.mark.parametrize("part", FIELDS)
def test_a_part_prints_its_tables_and_stores_their_numbers(part, tmp_path):
    done = run_bench("--only", part, *QUICK, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "median [quartiles]" in done.stdout.splitlines()[0]
    stored = json.loads((tmp_path / "out" / f"{part}.json").read_text())
    assert stored.keys() == {
        *("machine", "versions", "commit", "dirty", "date"),
        *("setting", "others_share", "rows"),
    }
    assert stored["setting"] == {"threads": 1, "repeats": 2, "quick": True, "device": "cpu"}
    for row in stored["rows"]:
        assert row.keys() - {"missing"} == FIELDS[part] | TIMED
        for name, ratio in row["ratios"].items():
            first, second = (row["seconds"][way]["wall"] for way in name.split(" / "))
            assert (
                min(a / b for a, b in zip(first, second))
                <= ratio["median"]
                <= max(a / b for a, b in zip(first, second))
            )
    assert {path.name for path in (tmp_path / "out").iterdir()} == {f"{part}.json", "README.md"}
    readme = (tmp_path / "out" / "README.md").read_text()
    assert readme.count("<!-- end -->") == (4 if part == "ops" else 1)


@pytest.mark.slow
def test_the_memory_of_a_training_step_is_stored_for_every_connection(tmp_path):
    done = run_bench("--only", "memory", *QUICK, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads((tmp_path / "out" / "memory.json").read_text())["rows"]
    assert [(row["model"], row["connection"]) for row in rows] == [
        *(("Llama", name) for name in ("Block S=4", "Block S=2", "Full")),
        *(("Kimi Linear", name) for name in ("Block S=4", "Full")),
    ]
    for row in rows:
        assert 0 < row["bytes"]["ours"]["step"] < row["bytes"]["ours"]["all"]
    assert "profiler" not in done.stderr


def test_the_help_names_the_command_and_does_not_wait_for_pytorch():
    code = "import sys; sys.modules['torch'] = None; from benchmarks.command import main; main(['--help'])"
    done = forks.run("-c", code, cwd=ROOT)
    assert done.returncode == 0 and done.stdout.startswith("usage: python -m benchmarks "), done.stderr


def test_every_part_that_can_be_named_measures_and_has_tables():
    for name in command.PARTS:
        part = import_module(f"benchmarks.{name}")
        assert callable(part.measure) and callable(part.tables)


@pytest.mark.slow
def test_the_folder_runs_as_a_module_and_a_quick_run_writes_nothing():
    results = ROOT / "benchmarks" / "results"
    before = {path: path.stat().st_mtime_ns for path in [*results.iterdir(), ROOT / "benchmarks" / "README.md"]}
    done = run_bench("--only", "phases", *QUICK)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Two phases" in done.stdout
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert {*results.iterdir()} < {*before}


@pytest.mark.slow
def test_a_terminated_run_leaves_whole_files_only(tmp_path):
    arguments = ("-m", "benchmarks", *QUICK, "--out", tmp_path / "out", "--only", "phases", "--only", "models")
    with forks.start(*arguments, cwd=ROOT) as process:
        deadline = time.monotonic() + 300
        while not (tmp_path / "out" / "phases.json").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGTERM
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"phases.json"} <= files <= {"phases.json", "models.json", "README.md"}
    for path in (tmp_path / "out").glob("*.json"):
        assert json.loads(path.read_text())["rows"]


@pytest.mark.slow
def test_rows_are_printed_as_they_are_measured_and_kept_when_the_run_is_interrupted(tmp_path):
    arguments = ("-m", "benchmarks", "--only", "models", "--quick", "--out", tmp_path / "out")
    with forks.start(*arguments, cwd=ROOT) as process:
        first = next(line for line in process.stdout if line.startswith("Llama, float32, prefill, Block S=4"))
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
        lines = [first, *rest.splitlines()]
        assert process.returncode == 128 + signal.SIGINT, errors[-3000:]
    rows = json.loads((tmp_path / "out" / "models.json").read_text())["rows"]
    assert [row["workload"] for row in rows][:1] == ["prefill"]
    printed = [line for line in lines if line.startswith("Llama, float32, ")]
    assert len(rows) - len(printed) in (0, 1)  # the signal may come between storing and printing
    assert f"Rows measured so far: {len(rows)}, stored in" in lines[-1]


@pytest.mark.parametrize("arguments", [("--only", "nothing"), ("--repeats", "0"), ("--threads", "none")])
def test_wrong_usage_exits_with_status_two_before_any_measurement(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        command.main([*arguments])
    assert exit.value.code == 2
    assert arguments[0] in capsys.readouterr().err
