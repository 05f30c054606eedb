"""Tests of `python -m benchmarks --device cuda`: its rows, its files, its exit status. The quick form needs no GPU."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from attnres.functional_attnres import DEPTH_ATTENTION
from benchmarks import gpu, gpu_check, gpu_libraries, gpu_models, gpu_ops, gpu_tests, peers
from benchmarks.clock import Clock

ROOT = Path(__file__).parents[2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def clock() -> Clock:
    clock = Clock(600)
    clock.begin_part(1.0)
    return clock


def test_the_check_covers_every_implementation_and_finds_all_right(clock):
    rows = list(gpu_check.measure(DEVICE, True, clock))
    assert {row["implementation"] for row in rows} >= set(DEPTH_ATTENTION) - {"auto"}
    done = [row for row in rows if "error" in row]
    assert {row["dtype"] for row in done if row["implementation"] == "eager"} == set(gpu_check.DTYPES)
    assert all(row["is_right"] for row in done)


def test_the_check_finds_a_wrong_implementation(clock, monkeypatch):
    right = DEPTH_ATTENTION["eager"]

    def wrong(query, sources, eps, is_sum, fuse_later_grads=False):
        result, weights, sources = right(query, sources, eps, is_sum)
        return 1.1 * result, weights, sources

    monkeypatch.setitem(DEPTH_ATTENTION, "eager", wrong)
    rows = [row for row in gpu_check.measure(DEVICE, True, clock) if row["implementation"] == "eager"]
    assert rows and not any(row["is_right"] for row in rows)
    assert "wrong" in str(gpu_check.table(rows))


def test_a_result_that_is_not_a_number_is_wrong():
    assert not gpu_check.judged(gpu_check.relative_error(torch.tensor([float("nan")]), torch.ones(1)), torch.float32)[
        "is_right"
    ]


def test_an_aggregation_is_compared_with_a_copy_and_with_eager(clock):
    rows = list(gpu_ops.measure(DEVICE, True, clock))
    assert [row["pass"] for row in rows] == ["forward", "forward+backward"]
    assert all({"ours / bound", "ours eager / ours"} <= row["ratios"].keys() for row in rows)
    _, columns, cells, _ = gpu_ops.table(rows)
    assert all(len(line) == len(columns) for line in cells)
    assert all(line[5].startswith("<= 1.3 ") for line in cells)


def test_a_faster_library_is_a_missed_target(clock):
    row = next(gpu_ops.measure(DEVICE, True, clock))
    row["ratios"]["fla fused / ours"] = {"median": 0.9, "low": 0.9, "high": 0.9}
    _, columns, (line,), _ = gpu_ops.table([row])
    assert line[columns.index("fla fused / ours") + 1] == ">= 1 missed"


@pytest.mark.slow
def test_libraries_are_measured_or_listed_as_missing(clock):
    for row in gpu_libraries.measure(DEVICE, True, clock):
        tried = {*row["missing"], *(ratio.removesuffix(" / ours") for ratio in row["ratios"])}
        assert tried >= peers.gpu_peers().keys() and "ours / bound" in row["ratios"]


@pytest.mark.slow
def test_models_are_compared_with_the_standard_one_for_every_connection(clock, monkeypatch):
    points = [point for point in gpu_models.points(quick=True) if point.mode == "eager"]
    monkeypatch.setattr(gpu_models, "points", lambda quick: points[:3])
    rows = list(gpu_models.measure(DEVICE, True, clock))
    assert [(row["workload"], row["connection"]) for row in rows] == [
        (workload, connection) for workload in gpu_models.TARGETS for connection in gpu_models.CONNECTIONS
    ]
    assert all("ours / standard" in row["ratios"] for row in rows)
    assert sum("ours eager / standard" in row["ratios"] for row in rows) == 3
    _, columns, cells, _ = gpu_models.table(rows)
    assert all(len(line) == len(columns) for line in cells)


def test_every_model_workload_and_mode_is_planned_with_quick_modes_first():
    points = gpu_models.points(quick=False)
    assert len({(point.mode, point.model, point.workload) for point in points}) == len(points) == 3 * 4 * 3
    assert {point.config.hidden_size for point in points} == {1024, 2048}
    assert [point.mode for point in points] == sorted(
        (p.mode for p in points), key=["eager", "CUDA graph", "compiled"].index
    )


@pytest.mark.slow
def test_a_failing_workload_is_named_and_the_others_are_measured(clock, monkeypatch):
    points = [point for point in gpu_models.points(quick=True) if point.mode == "eager"][:2]

    def fails(models, ids):
        raise RuntimeError("cannot be captured\nand why")

    monkeypatch.setattr(gpu_models, "points", lambda quick: points)
    monkeypatch.setitem(gpu_models.MODES["eager"], points[0].workload, fails)
    rows = list(gpu_models.measure(DEVICE, True, clock))
    assert rows[0]["missing"] == "cannot be captured"
    assert len(rows) == 1 + len(gpu_models.CONNECTIONS)


def test_without_time_every_row_says_so():
    spent = Clock(0)
    spent.begin_part(1.0)
    rows = [*gpu_ops.measure(DEVICE, True, spent), *gpu_models.measure(DEVICE, True, spent)]
    rows += [*gpu_tests.measure(DEVICE, True, spent), *gpu_check.measure(DEVICE, True, spent)]
    assert rows and not any("ratios" in row or "error" in row or "counts" in row for row in rows)


@pytest.mark.slow
def test_rows_are_stored_one_by_one_and_a_run_that_is_cut_off_leaves_them(tmp_path, monkeypatch):
    class Endless:
        @staticmethod
        def measure(device, quick, clock):
            yield {"implementation": "eager", "dtype": "float32", "case": [1, 2, 3], "missing": "not asked"}
            while True:
                pass

        table = staticmethod(gpu_check.table)

    monkeypatch.setitem(gpu.PARTS, "check", (Endless, 1.0))
    monkeypatch.setattr(gpu, "MARGIN", 59)
    assert gpu.run_gpu(["check", "ops"], tmp_path / "out", minutes=1, quick=True) == 0
    stored = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert stored["is_cut_off"] and [*stored["parts"]] == ["check"]
    assert len(stored["parts"]["check"]) == 1
    assert "not asked" in (tmp_path / "out" / "gpu.md").read_text()


def test_a_wrong_implementation_is_the_exit_status(tmp_path, monkeypatch):
    monkeypatch.setattr(
        gpu_check, "judged", lambda *arguments, **options: {"error": 1.0, "allowed": 0.1, "is_right": False}
    )
    assert gpu.main(["--quick", "--only", "check", "--out", str(tmp_path)]) == 1


@pytest.mark.slow
def test_the_command_prints_and_stores_all_it_can_and_needs_neither_rich_nor_typer(tmp_path):
    program = (
        "import sys, runpy\n"
        "for name in ('rich', 'typer', 'matplotlib', 'psutil'): sys.modules[name] = None\n"
        "sys.argv[:1] = 'benchmarks --device cuda --quick --only check --only ops --out'.split()\n"
        "runpy.run_module('benchmarks', run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "One aggregation" in done.stdout
    stored = json.loads((tmp_path / "gpu.json").read_text())
    assert stored["parts"].keys() == {"check", "ops"} and not stored["is_cut_off"]
    assert stored["versions"]["torch"] == version("torch")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_names_the_remedy(capsys):
    assert gpu.main([]) == 1
    assert "no GPU" in capsys.readouterr().err


def test_a_budget_of_no_time_is_bad_usage(capsys):
    with pytest.raises(SystemExit) as stopped:
        gpu.main(["--minutes", "0"])
    assert stopped.value.code == 2
    assert "--minutes" in capsys.readouterr().err
