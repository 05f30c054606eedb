"""Failures of benchmarks are reported in one line for each reason, with a remedy that can be run."""

from pathlib import Path

from attnres.eval.benchmarks import benchmarks
from attnres.eval.failures import Reason, TaskFailure, failure_lines
from attnres.eval.start import find_missing


def test_failures_of_all_benchmarks_are_two_lines_one_for_each_reason(tmp_path):
    failures = find_missing([*benchmarks().values()], tmp_path, allow_code_execution=False)
    code, absent = failure_lines(failures, tmp_path)
    for benchmark in benchmarks().values():
        line = code if benchmark.runs_code else absent
        assert benchmark.title in line
        assert benchmark.runs_code or benchmark.dataset in line
    assert f'--local-dir "{tmp_path}/$name"; done`' in absent
    assert "these 13 benchmarks" in absent and "accept the terms at https://" in absent
    assert "--allow-code-execution" in code


def test_a_failure_keeps_its_line_if_it_is_alone_or_of_the_reason_other():
    gsm8k, bbh, mmlu = (benchmarks()[name] for name in ("gsm8k", "bbh", "mmlu"))
    failures = {
        gsm8k: TaskFailure(Reason.ABSENT, "GSM8K: gone."),
        bbh: TaskFailure(Reason.OTHER, "BBH: broken."),
        mmlu: TaskFailure(Reason.OTHER, "MMLU: out of memory."),
    }
    assert failure_lines(failures, Path("data")) == ["GSM8K: gone.", "BBH: broken.", "MMLU: out of memory."]


def test_a_benchmark_whose_data_folder_exists_is_not_missing(tmp_path):
    (tmp_path / "openai" / "gsm8k").mkdir(parents=True)
    chosen = [benchmarks()[name] for name in ("gsm8k", "bbh")]
    assert [benchmark.name for benchmark in find_missing(chosen, tmp_path, False)] == ["bbh"]
