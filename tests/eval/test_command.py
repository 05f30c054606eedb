"""Run `attnres eval` from end to end: a real checkpoint and its retrofit on real questions."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnres.commands.errors import describe
from attnres.commands.eval import run_eval
from attnres.conversion import retrofit
from attnres.eval import sandbox
from attnres.eval.benchmarks import benchmarks, load, pick, task_path
from attnres.eval.shared_prefix import SharedPrefixLM
from attnres.eval.start import EvalOptions, check_run
from attnres.eval.stored_results import ResultStore
from attnres.eval.suite import find_unfinished, run_jobs

from .. import forks

LIMIT = 2
COMPARED = 12  # items on which `other` and `source` differ
BENCHMARKS = "arc_challenge,gsm8k,cmath"
LEAF_TASKS = {"arc_challenge", "gsm8k_cot", "attnres_cmath_validation", "attnres_cmath_test"}


@pytest.fixture(scope="module")
def models(assets, tmp_path_factory) -> Path:
    """Return a folder with the pretrained model `source`, its `retrofit`, and `other`, which answers differently."""
    folder = tmp_path_factory.mktemp("models")
    source = assets / "checkpoints" / "stories260K-hf"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    retrofitted = retrofit(model, block_size=2)
    for name in ("source", "retrofit", "other"):
        if name == "other":
            model.model.layers[2].self_attn.v_proj.weight.data.mul_(-3)
        (retrofitted if name == "retrofit" else model).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def evaluated(models, assets, tmp_path_factory) -> Path:
    """Return the folder of a run that compared the retrofit with its source."""
    out = tmp_path_factory.mktemp("evaluated") / "out"
    arguments = {
        "baseline": str(models / "source"),
        "benchmarks": pick(BENCHMARKS),
        "data": assets / "hub",
        "limit": LIMIT,
    }
    run_eval(EvalOptions(str(models / "retrofit"), out, **arguments))
    return out


@pytest.fixture
def evaluate(models, assets, monkeypatch) -> Callable:
    """Return `evaluate(model, out, **options)`, which calls `run_eval` in the folder of the models."""
    monkeypatch.chdir(models)

    def run(model: str, out: Path, tasks: str = BENCHMARKS, **arguments) -> None:
        defaults = {"benchmarks": pick(tasks), "data": assets / "hub", "limit": LIMIT}
        run_eval(EvalOptions(model, out, **defaults | arguments))

    return run


def answers(folder: Path, task: str) -> list:
    samples = json.loads((folder / f"{task}.json").read_text())["samples"]
    return [(sample["doc_id"], sample["prompt_hash"], sample["filtered_resps"], sample["filter"]) for sample in samples]


@pytest.mark.slow
def test_a_file_that_exceeds_a_limit_is_named(models, evaluated, assets, tmp_path):
    """The limit on the size of files is like a full disk. Results are stored already, and only the chart exceeds it."""
    shutil.copytree(evaluated, tmp_path / "out")
    for name in ("results.json", "baseline.json", "report.md", "scores.png"):
        (tmp_path / "out" / name).unlink()
    limited = (
        "import resource, sys; sys.dont_write_bytecode = True; "  # Python would store cut bytecode
        "resource.setrlimit(resource.RLIMIT_FSIZE, (25_000, 25_000)); "
        "from attnres.commands.main import main; main()"
    )
    arguments = ("eval", models / "retrofit", "--baseline", models / "source", "--tasks", BENCHMARKS)
    options = ("--data", assets / "hub", "--limit", LIMIT, "--out", tmp_path / "out")
    done = forks.run("-c", limited, *arguments, *options)
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1] == f"attnres: {tmp_path / 'out' / 'scores.png'}: File too large"


def test_a_retrofit_scores_what_its_source_scores(evaluated):
    model, baseline = (json.loads((evaluated / name).read_text()) for name in ("results.json", "baseline.json"))
    for benchmark in pick(BENCHMARKS):
        assert model["results"][benchmark.group] == baseline["results"][benchmark.group]
    assert answers(evaluated / "model", "gsm8k_cot") == answers(evaluated / "baseline", "gsm8k_cot")


def test_results_json_has_the_format_of_the_harness(evaluated):
    results = json.loads((evaluated / "results.json").read_text())
    assert results["results"].keys() >= LEAF_TASKS
    assert set(results["group_subtasks"]["attnres_cmath"]) == {"attnres_cmath_validation", "attnres_cmath_test"}
    assert results["groups"]["attnres_cmath"]["sample_len"] == 2 * LIMIT
    assert results["n-shot"]["gsm8k_cot"] == 8
    assert results["n-samples"]["arc_challenge"] == {"original": 1172, "effective": LIMIT}
    assert results["config"]["limit"] == LIMIT
    assert results["config"]["model_num_parameters"] > 260_000


def test_the_report_has_a_line_for_each_benchmark_beside_the_papers_numbers(evaluated):
    report = (evaluated / "report.md").read_text()
    rows = [line.split("|")[1:-1] for line in report.splitlines() if line.startswith("|")]
    header, _, *body = [[cell.strip() for cell in row] for row in rows]
    assert [row[0] for row in body if "(" in row[0]] == ["GSM8K (flexible-extract)", "CMath (flexible-extract)"]
    body = [row for row in body if "(" not in row[0]]
    assert [row[0] for row in body] == [benchmark.title for benchmark in pick(BENCHMARKS)]
    assert header[-2:] == ["paper: baseline", "paper: AttnRes"]
    assert [row[-2:] for row in body] == [[str(b.baseline), str(b.attn_res)] for b in pick(BENCHMARKS)]
    assert [int(row[1]) for row in body] == [LIMIT, LIMIT, 2 * LIMIT]
    assert all(row[5].startswith("+0.0 [-") and row[6] == "1" for row in body)
    assert "lost their beginning: ARC-Challenge 100%, GSM8K 100%" in report  # 25 and 8 shots in 512 tokens
    assert Image.open(evaluated / "scores.png").size[0] > 300


def test_published_files_contain_no_path_of_this_machine(evaluate, tmp_path, models, assets):
    """Names and the data folder are relative, as you give them from the folder of the models."""
    (models / "hub").symlink_to(assets / "hub")
    with pytest.raises(RuntimeError, match="1 of 2 benchmarks"):
        evaluate("source", tmp_path / "out", "arc_challenge,ceval", data=Path("hub"))
    for name in ("results.json", "report.md"):
        text = (tmp_path / "out" / name).read_text()
        assert str(models) not in text
        assert str(assets) not in text
        assert sys.prefix not in text


@pytest.mark.slow
def test_a_model_that_answers_differently_is_compared_item_by_item(evaluate, tmp_path, capsys):
    evaluate("other", tmp_path / "out", "arc_challenge", baseline="source", limit=COMPARED)
    scores = [
        {sample["doc_id"]: sample["acc_norm"] for sample in json.loads(path.read_text())["samples"]}
        for path in (tmp_path / "out" / role / "arc_challenge.json" for role in ("model", "baseline"))
    ]
    difference = sum(scores[0][item] - scores[1][item] for item in scores[1]) / COMPARED
    assert difference != 0
    note = "Prompts longer than the context of other lost their beginning: ARC-Challenge 100% of them."
    for text in ((tmp_path / "out" / "report.md").read_text(), capsys.readouterr().out):
        assert f"{100 * difference:+.1f} [" in text and note in text


def test_finished_tasks_are_not_computed_again(evaluate, evaluated, models, tmp_path, monkeypatch):
    """Another process resumes the run under the same absolute names, without loading a model."""
    monkeypatch.setattr("attnres.commands.eval._load_model", lambda *_: pytest.fail("a model was loaded"))
    (evaluated / ".results.json.partial").write_text('{"resul')  # a killed process leaves such a file
    before = (evaluated / "model" / "gsm8k_cot.json").stat().st_mtime_ns
    report = (evaluated / "report.md").read_text()
    evaluate(str(models / "retrofit"), evaluated, "cmath,gsm8k,arc_challenge", baseline=str(models / "source"))
    assert (evaluated / "model" / "gsm8k_cot.json").stat().st_mtime_ns == before
    assert (evaluated / "report.md").read_text() == report


def test_a_run_that_would_remove_results_from_a_report_is_refused(evaluate, evaluated, models, tmp_path):
    model, source = str(models / "retrofit"), str(models / "source")
    check_run(EvalOptions(model, evaluated, pick(f"{BENCHMARKS},mmlu"), source))
    lost = (
        r"report\.md also shows arc_challenge, cmath, which a new report would lose\. Give --tasks gsm8k,arc_challenge,"
    )
    with pytest.raises(FileExistsError, match=lost):
        check_run(EvalOptions(model, evaluated, pick("gsm8k"), source))
    with pytest.raises(FileExistsError, match=f"report.md compares with {source}, .* Give --baseline {source}"):
        check_run(EvalOptions(model, evaluated, pick(BENCHMARKS)))
    shutil.copytree(evaluated, tmp_path / "out")
    before = {path: path.read_bytes() for path in (tmp_path / "out").glob("*.*")}
    with pytest.raises(FileExistsError, match=r"report\.md shows gsm8k, and would lose that"):
        evaluate(model, tmp_path / "out", "arc_challenge,cmath", baseline=source)  # the data of cmath is not there
    assert {path: path.read_bytes() for path in before} == before
    (tmp_path / "out" / "results.json").write_text('{"results": 3}')
    with pytest.raises(KeyError) as error:
        check_run(EvalOptions(model, tmp_path / "out", pick(BENCHMARKS), source))
    assert describe(error.value)[0].endswith("results.json). Remove it: it is written again.")


def test_missing_data_is_reported_before_a_model_runs_and_other_benchmarks_go_on(evaluate, tmp_path, capsys):
    with pytest.raises(RuntimeError, match="2 of 3 benchmarks have no result"):
        evaluate("source", tmp_path / "out", "arc_challenge,mbpp,ceval")
    first, *_ = output = capsys.readouterr().out.splitlines()
    assert "MBPP runs programs that the model writes; --allow-code-execution allows it." in first
    assert sum("ceval/ceval-exam" in line and "hf download" in line for line in output) == 1
    report = (tmp_path / "out" / "report.md").read_text()
    assert f"| ARC-Challenge | {LIMIT} |" in report
    assert "C-Eval" in report.partition("Without a result:")[2]


@pytest.mark.slow
def test_allowed_programs_run_and_the_report_names_the_restrictions(evaluate, tmp_path, capsys):
    evaluate("source", tmp_path / "out", "mbpp", allow_code_execution=True, limit=2)
    line = f"with: {sandbox.level()}."
    assert f"Generated programs run {line}" in capsys.readouterr().out
    assert f"Generated programs ran {line}" in (tmp_path / "out" / "report.md").read_text()
    (reply,) = answers(tmp_path / "out" / "model", "attnres_mbpp_test")[0][2]
    assert isinstance(reply, str)


def test_results_of_another_model_or_limit_are_not_mixed(evaluate, evaluated, models):
    with pytest.raises(FileExistsError, match=f"setup.json has limit {LIMIT}, not 7"):
        evaluate(str(models / "retrofit"), evaluated, limit=7)
    with pytest.raises(FileExistsError, match="retrofit', not 'source'"):
        evaluate("source", evaluated)


def test_a_folder_with_other_files_is_refused_and_unchanged(models, tmp_path):
    (tmp_path / "thesis.tex").write_text("five years")
    with pytest.raises(FileExistsError, match="holds other files"):
        check_run(EvalOptions(str(models / "source"), tmp_path, pick(BENCHMARKS)))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"baseline": "source"}, ValueError, "MODEL and --baseline are both source"),
        ({"data": Path("nowhere")}, FileNotFoundError, "--data nowhere is not a directory"),
        ({"baseline": "./missing"}, FileNotFoundError, "missing is not a directory"),
    ],
)
def test_bad_input_is_refused_in_one_line_and_writes_nothing(models, monkeypatch, tmp_path, arguments, error, message):
    monkeypatch.chdir(models)
    with pytest.raises(error, match=message) as caught:
        check_run(EvalOptions("source", tmp_path / "out", pick(BENCHMARKS), **arguments))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_the_repeats_of_a_task_are_counted(models, assets, tmp_path):
    """The harness asks an item as often as its task repeats it. All of these prompts are longer than the context."""
    (benchmark,) = pick("gsm8k")
    loaded = {benchmark: load(benchmark, assets / "hub")}
    (task,) = loaded[benchmark]["tasks"].values()
    task.set_config("repeats", 3)
    task.set_config("generation_kwargs", {**task.config.generation_kwargs, "max_gen_toks": 4})
    lm = SharedPrefixLM(str(models / "source"), device="cpu", batch_size=2)
    store = ResultStore(tmp_path / "out", {})
    (job,) = find_unfinished(loaded, store, limit=2, seed=0)
    done = []
    failures = run_jobs(lm, [job], store, limit=2, seed=0, on_work=lambda benchmark, work: done.append(work))
    assert not failures
    assert store.read("gsm8k_cot")["cut"] == 1
    assert done == pytest.approx([job.work * part for part in (0, 1 / 3, 2 / 3, 1, 1)])


@pytest.mark.parametrize(
    ("processes", "error", "message"),
    [("2", RuntimeError, "runs in one process"), ("1", OSError, "nowhere"), ("", OSError, "nowhere")],
)
def test_a_run_in_several_processes_is_refused(processes, error, message, tmp_path, monkeypatch):
    """An empty variable stands for one process. That run goes on, up to the model."""
    monkeypatch.setenv("WORLD_SIZE", processes)
    with pytest.raises(error, match=message):
        run_eval(EvalOptions("./nowhere", tmp_path / "out", pick("gsm8k")))


# The command line


def test_the_task_path_is_printed_for_the_harness():
    assert forks.run("-m", "attnres_cli", "eval", "--print-task-path").stdout == f"{task_path()}\n"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["model", "--out", "out", "--tasks", "mmlu,gsm9k"], "There is no benchmark 'gsm9k'. Did you mean `gsm8k`?"),
        (["model"], "Missing option '--out'"),
        (["--out", "out"], "Missing argument 'MODEL'"),
        (["model", "--out", "out", "--tasks", "mine", "--include-path", "no"], "--include-path no is not a directory"),
        (["model", "--out", "out", "--limit", "0"], "--limit"),
    ],
)
def test_bad_usage_ends_with_status_2(arguments, message, tmp_path):
    done = forks.run("-m", "attnres_cli", "eval", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert not any(tmp_path.iterdir())


def test_without_the_harness_the_message_is_one_line_with_the_command_to_install_it(tmp_path):
    """`sys.modules` holds None for a package that cannot be imported."""
    code = "import sys; sys.modules['lm_eval'] = None; from attnres.commands.main import main; main()"
    done = forks.run("-c", code, "eval", "model", "--out", "out", cwd=tmp_path)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("attnres: attnres eval needs the package lm_eval: pip install ")
    assert "'lm-eval[hf,math]>=" in line


@pytest.mark.slow
def test_a_killed_run_resumes_and_ends_with_the_same_numbers(models, assets, evaluated, tmp_path):
    out = tmp_path / "out"
    baseline = ["--baseline", models / "source", "--tasks", BENCHMARKS, "--data", assets / "hub", "--limit", LIMIT]
    command = ("-m", "attnres_cli", "eval", models / "retrofit", *baseline, "--out", out)
    with forks.start(*command) as process:
        finished = out / "baseline" / "gsm8k_cot.json"
        while not finished.exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.kill()
    written = finished.stat().st_mtime_ns
    assert not (out / "results.json").exists()
    done = forks.run(*command)
    assert done.returncode == 0, done.stderr
    assert finished.stat().st_mtime_ns == written
    for name in ("results.json", "baseline.json"):
        resumed, uninterrupted = (json.loads((folder / name).read_text())["results"] for folder in (out, evaluated))
        assert resumed.keys() == uninterrupted.keys()
        assert resumed == uninterrupted


@pytest.mark.slow
def test_an_interrupted_run_prints_how_to_resume_it(models, assets, tmp_path):
    out = tmp_path / "out"
    options = ("--tasks", "bbh", "--data", assets / "hub", "--out", out, "--limit", LIMIT)
    with forks.start("-m", "attnres_cli", "eval", models / "source", *options) as process:
        while not list(out.glob("model/bbh*.json")):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "The same command goes on from the tasks that are finished." in output
    assert not (out / ".lock").exists()


@pytest.mark.slow
def test_the_harness_alone_gives_the_same_scores(models, assets, evaluated, tmp_path):
    """The harness runs in the folder of the data, where `load_dataset("allenai/ai2_arc")` finds that folder first.

    It refuses to reserve more tokens for an answer than the model's context has, so the test sets 256. `attnres eval`
    reserves half of the context.
    """
    arguments = [
        "--model",
        "hf",
        "--model_args",
        f"pretrained={models / 'source'}",
        "--device",
        "cpu",
        "--limit",
        LIMIT,
    ]
    arguments += ["--include_path", task_path(), "--tasks", "attnres_arc_challenge,attnres_gsm8k,attnres_cmath"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    arguments += ["--output_path", tmp_path / "out", "--batch_size", 8, "--gen_kwargs", "max_gen_toks=256"]
    command = [sys.executable, "-m", "lm_eval", "run", *map(str, arguments)]
    done = subprocess.run(
        command, cwd=assets / "hub", env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = (tmp_path / "out").rglob("results_*.json")
    harness_results = json.loads(path.read_text())["results"]
    our_results = json.loads((evaluated / "baseline.json").read_text())["results"]
    for name in ("attnres_arc_challenge", "attnres_gsm8k", "attnres_cmath"):
        metric = benchmarks()[name.removeprefix("attnres_")].metric
        assert harness_results[name][metric] == our_results[name][metric]
