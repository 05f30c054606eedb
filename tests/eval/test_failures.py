"""Failures of benchmarks are reported in one line for each reason, with a remedy that can be run."""

from pathlib import Path

from attnres.eval.benchmarks import benchmarks
from attnres.eval.failures import Reason, TaskFailure, failure_lines
from attnres.eval.start import find_missing


def test_all_of_the_paper_without_data_are_told_in_two_lines(tmp_path):
    failures = find_missing([*benchmarks().values()], tmp_path, allow_code_execution=False)
    code, absent = failure_lines(failures, tmp_path)
    for benchmark in benchmarks().values():
        line = code if benchmark.runs_code else absent
        assert benchmark.title in line
        assert benchmark.runs_code or benchmark.dataset in line
    assert f'--local-dir "{tmp_path}/$name"; done`' in absent
    assert "these 13 benchmarks" in absent and "accept the terms at https://" in absent
    assert "--allow-code-execution" in code


def test_one_alone_and_reasons_of_their_own_are_told_as_they_are():
    gsm8k, bbh, mmlu = (benchmarks()[name] for name in ("gsm8k", "bbh", "mmlu"))
    failures = {
        gsm8k: TaskFailure(Reason.ABSENT, "GSM8K: gone."),
        bbh: TaskFailure(Reason.OTHER, "BBH: broken."),
        mmlu: TaskFailure(Reason.OTHER, "MMLU: out of memory."),
    }
    assert failure_lines(failures, Path("data")) == ["GSM8K: gone.", "BBH: broken.", "MMLU: out of memory."]


def test_what_has_a_folder_may_run(tmp_path):
    (tmp_path / "openai" / "gsm8k").mkdir(parents=True)
    chosen = [benchmarks()[name] for name in ("gsm8k", "bbh")]
    assert [benchmark.name for benchmark in find_missing(chosen, tmp_path, False)] == ["bbh"]
