"""Tasks of lm_eval and of your own folder run and are reported like the paper's benchmarks."""

import json
from pathlib import Path

import pytest

from attnres.commands.eval import run_eval
from attnres.eval.benchmarks import benchmarks, compile_templates_once, load, pick
from attnres.eval.failures import DataMissing
from attnres.eval.start import EvalOptions

TASK_FILE = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
output_type: {kind}
doc_to_text: question
doc_to_target: answer
doc_to_choice: choices
metric_list:
  - metric: {metric}
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    """Return a folder with the task `sums`, its data, and the group `pairs`, which holds that task."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = [{"question": f"{n} + 1 =", "choices": ["1", "7"], "answer": n % 2} for n in range(6)]
    (folder / "data.json").write_text("\n".join(json.dumps(row) for row in rows))
    (folder / "sums.yaml").write_text(task())
    (folder / "group.yaml").write_text(
        "group: pairs\ngroup_alias: My | pairs\ntask: [sums]\nnum_fewshot: 1\naggregate_metric_list: [{metric: acc}]\n"
    )
    for path in folder.glob("*.yaml"):
        path.write_text(path.read_text().replace("DATA", str(folder / "data.json")))
    return folder


def task(name: str = "sums", kind: str = "multiple_choice", metric: str = "acc") -> str:
    return TASK_FILE.format(name=name, kind=kind, metric=metric, data="DATA")


@pytest.mark.slow
def test_a_users_task_is_described_and_loaded(folder):
    (sums,) = pick("sums", folder)
    assert (sums.name, sums.title, sums.metric, sums.dataset, sums.baseline) == ("sums", "sums", "acc,none", None, None)
    assert len(load(sums, None)["tasks"]["sums"].eval_docs) == 6
    (pairs,) = pick("pairs", folder)
    assert (pairs.title, pairs.metric) == ("My | pairs", "acc,none")


@pytest.mark.slow
def test_tasks_of_lm_eval_come_after_the_papers_benchmarks():
    picked = pick("minerva_math_algebra,gsm8k,gsm8k_cot,mmlu")
    assert [benchmark.name for benchmark in picked] == ["mmlu", "gsm8k", "minerva_math_algebra", "gsm8k_cot"]
    assert picked[:2] == [benchmarks()["mmlu"], benchmarks()["gsm8k"]]
    assert picked[3].metric == "exact_match,strict-match"
    assert picked[3].second == "exact_match,flexible-extract" and picked[2].second is None
    assert picked[2].dataset == "EleutherAI/hendrycks_math"


@pytest.mark.slow
def test_a_task_in_a_folder_that_the_paper_does_not_use_is_found():
    (piqa,) = pick("piqa")
    assert (piqa.metric, piqa.dataset) == ("acc,none", "baber/piqa")


@pytest.mark.slow
def test_other_tasks_read_the_data_folder_too(hub):
    (challenge,) = pick("attnres_arc_challenge")
    (loaded,) = load(challenge, hub)["tasks"].values()
    assert str(hub / "allenai/ai2_arc") == loaded.DATASET_PATH


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tasks", "file", "message"),
    [
        ("summs", task(), "There is no benchmark 'summs'. Did you mean `sums`?"),
        ("mmlu", task("mmlu"), "mmlu is a benchmark of the paper. Give the task in .*new.yaml another name"),
        ("other", "task: [unclosed", r"no benchmark 'other'.* Not readable: .*new.yaml \("),
        ("likely", task("likely", "loglikelihood", "perplexity"), "likely has no metric that is a mean .*perplexity"),
        ("bare", "group: bare\ntask: [sums]", "bare has no score for all of its tasks together. Name them: sums"),
        ("code", task("code") + "unsafe_code: true", "code runs generated programs outside the sandbox"),
        ("python", "task: python\nclass: !function a.B", "python is a task with its own Python class"),
    ],
)
def test_a_task_that_cannot_be_run_is_refused_in_one_line(tasks, file, message, folder):
    (folder / "new.yaml").write_text(file)
    with pytest.raises(ValueError, match=message) as error:
        pick(tasks, folder)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_template_may_be_as_large_as_its_author_likes(folder, model, tmp_path):
    """A loop over 200,000 numbers, a text of 14 million characters on the way, and a long template."""
    template = "{% for n in range(200000) %}{% if n == answer %}{{ n }}{% endif %}{% endfor %}"
    template += "{% set long = question * 2000000 %}{{ long | length }} {{ 2 ** 100001 % 7 }} "
    template += "{{ question }} " * 200
    text = task().replace("DATA", str(folder / "data.json"))
    (folder / "sums.yaml").write_text(text.replace("doc_to_text: question", f"doc_to_text: {json.dumps(template)}"))
    (sums,) = pick("sums", folder)
    loaded = load(sums)["tasks"]["sums"]
    doc = loaded.eval_docs[1]
    assert loaded.doc_to_text(doc) == "114000000 4 " + "1 + 1 = " * 200
    run_eval(EvalOptions(model, tmp_path / "out", benchmarks=[sums], limit=2))
    assert "| sums | 2 |" in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.slow
def test_a_template_that_fails_fails_its_benchmark_alone(folder, model, tmp_path, capsys):
    """The template of `at_once` fails while the task is loaded, that of `later` while a later prompt is made."""
    for name, template in {"at_once": "{{ 1 / 0 }}", "later": "x{{ 1 / (answer - 1) }}"}.items():
        text = task(name).replace("DATA", str(folder / "data.json"))
        text = text.replace("doc_to_text: question", f"doc_to_text: {json.dumps(template)}")
        (folder / f"{name}.yaml").write_text(text)
    with pytest.raises(RuntimeError, match="2 of 3 benchmarks"):
        run_eval(EvalOptions(model, tmp_path / "out", benchmarks=pick("sums,at_once,later", folder), limit=4))
    output = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("Left out: ") and "division by zero" in line for line in output) == 2
    assert "| sums | 4 |" in (tmp_path / "out" / "report.md").read_text()


def test_a_template_that_cannot_be_read_is_named_and_no_download_proposed(folder):
    path = folder / "sums.yaml"
    path.write_text(path.read_text().replace("doc_to_text: question", 'doc_to_text: "{{question}"'))
    with pytest.raises(DataMissing, match=r"a template of its task file .*unexpected '}', in '{{question}'\.$"):
        load(*pick("sums", folder))


def test_a_template_is_compiled_once_while_tasks_are_read(monkeypatch):
    from lm_eval import utils

    compiled = []
    compile_template = type(utils.env).from_string
    monkeypatch.setattr(
        utils.env, "from_string", lambda source: compiled.append(source) or compile_template(utils.env, source)
    )
    before = utils.env.from_string
    with compile_templates_once():
        assert [utils.apply_template("{{ a }}", {"a": n}) for n in range(3)] == ["0", "1", "2"]
    assert compiled == ["{{ a }}"] and utils.env.from_string is before


def test_the_message_names_a_missing_folder_of_tasks(tmp_path):
    with pytest.raises(ValueError, match=f"--include-path {tmp_path}/no is not a directory"):
        pick("mmlu", tmp_path / "no")


def test_programs_of_a_users_task_run_in_the_sandbox(folder):
    scored = "unsafe_code: true\nprocess_results: !function attnres.eval.code.mbpp\n"
    (folder / "new.yaml").write_text(task("mine") + scored)
    assert pick("mine", folder)[0].runs_code


SCORERS = """
def nan(doc, results):
    return {"acc": float("nan")}

def pair(doc, results):
    return {"acc": [1, 0]}

def missing(doc, results):
    return {"other": 1}

def broken(doc, results):
    return {"acc": 1 / doc["answer"]}

def level(doc, results):
    return {"acc": 37.5 + doc["answer"]}

def no_memory(doc, results):
    raise MemoryError("full")
"""


def scored_by(folder: Path, scorer: str) -> None:
    """Write the task `scorer`, whose generated answers the function of that name in `SCORERS` scores."""
    (folder / "scorers.py").write_text(SCORERS)
    text = task(scorer, "generate_until").replace("DATA", str(folder / "data.json"))
    text = text.replace("doc_to_choice: choices\n", "generation_kwargs: {max_gen_toks: 2}\n")
    text += f"    aggregation: mean\n    higher_is_better: true\nprocess_results: !function scorers.{scorer}\n"
    (folder / f"{scorer}.yaml").write_text(text)


@pytest.mark.slow
def test_a_scorer_that_fails_or_returns_no_number_fails_its_task_alone(folder, model, tmp_path, capsys):
    expected = {
        "nan": "item 0 has the acc nan: a score must be a finite number.",
        "missing": "item 0 has the acc None: a score must be a finite number.",
        "pair": "TypeError at line ",
        "broken": "ZeroDivisionError at line 12 of scorers.py: division by zero",
    }
    for name in expected:
        scored_by(folder, name)
    out = tmp_path / "out"
    with pytest.raises(RuntimeError, match="4 of 5 benchmarks"):
        run_eval(EvalOptions(model, out, benchmarks=pick(",".join([*expected, "sums"]), folder), limit=2))
    lines = capsys.readouterr().out.splitlines()
    for name, message in expected.items():
        assert sum(line.startswith(f"Left out: {name}: {message}") for line in lines) == 1, (name, lines)
        assert not (out / "model" / f"{name}.json").exists()
    report = (out / "report.md").read_text()
    assert "| sums | 2 |" in report and str(folder) not in report


@pytest.mark.slow
def test_a_score_above_1_is_shown_in_its_own_unit(folder, model, tmp_path):
    scored_by(folder, "level")
    run_eval(EvalOptions(model, tmp_path / "out", benchmarks=pick("level,sums", folder), limit=2))
    report = (tmp_path / "out" / "report.md").read_text()
    assert "| level | 2 | 0 | 38.0 ± 0.5 |" in report and "| sums | 2 | 0 | 50.0 ± 50.0 |" in report
    assert "Not percent, but in the unit of the metric: level (acc)." in report


@pytest.mark.slow
def test_a_lack_of_memory_on_the_machine_ends_the_run(folder, model, tmp_path):
    scored_by(folder, "no_memory")
    with pytest.raises(MemoryError):
        run_eval(EvalOptions(model, tmp_path / "out", benchmarks=pick("no_memory,sums", folder), limit=2))
    assert not (tmp_path / "out" / "model" / "sums.json").exists()


SCORE = """
from own_helpers import is_right

def score(doc, results):
    return {"acc": float(is_right(doc, results))}
"""


@pytest.mark.slow
def test_a_stored_result_is_refused_when_the_code_that_scored_it_changed(folder, model, tmp_path, monkeypatch):
    """The function of the task file changes, or a file beside it that the function uses."""
    monkeypatch.syspath_prepend(folder)
    helpers, out = folder / "own_helpers.py", tmp_path / "out"
    helpers.write_text("def is_right(doc, results):\n    return True\n")
    (folder / "scores.py").write_text(SCORE)
    text = (
        task("scored", "generate_until")
        .replace("DATA", str(folder / "data.json"))
        .replace("doc_to_choice: choices", "")
    )
    generation = "generation_kwargs: {max_gen_toks: 2}\nprocess_results: !function scores.score\n"
    text += "    aggregation: mean\n    higher_is_better: true\n" + generation
    (folder / "scored.yaml").write_text(text)
    run_eval(EvalOptions(model, out, benchmarks=pick("scored", folder), limit=2))
    run_eval(EvalOptions(model, out, benchmarks=pick("scored", folder), limit=2))
    for path in (helpers, folder / "scores.py"):
        before = path.read_text()
        path.write_text(before.replace("True", "False").replace("float(", "1 - float("))
        with pytest.raises(ValueError, match=r"scored\.json was scored by other code than the task scored has"):
            run_eval(EvalOptions(model, out, benchmarks=pick("scored", folder), limit=2))
        path.write_text(before)


@pytest.fixture
def model(assets) -> str:
    return str(assets / "checkpoints" / "stories260K-hf")


@pytest.mark.slow
def test_a_users_task_is_reported_beside_the_papers_benchmarks(folder, model, hub, tmp_path, monkeypatch):
    out = tmp_path / "out"
    arguments = {"data": hub, "limit": 4}
    run_eval(EvalOptions(model, out, benchmarks=pick("arc_challenge,pairs", folder), **arguments))
    report = (out / "report.md").read_text()
    (line,) = [line for line in report.splitlines() if r"My \| pairs" in line and line.startswith("|")]
    assert line.endswith("| - | - |") and "| 4 | 1 |" in line
    assert str(folder) not in (out / "results.json").read_text()
    monkeypatch.setattr("attnres.commands.eval._load_model", lambda *_: pytest.fail("a model was loaded"))
    run_eval(EvalOptions(model, out, benchmarks=pick("pairs,arc_challenge", folder), **arguments))
    (out / "results.json").unlink()
    with pytest.raises(ValueError, match=r"sums\.json was computed with another num_fewshot of the task sums"):
        run_eval(EvalOptions(model, out, benchmarks=pick("sums", folder), **arguments))
    with pytest.raises(ValueError, match="pairs and sums both hold the task sums"):
        run_eval(EvalOptions(model, tmp_path / "other", benchmarks=pick("pairs,sums", folder), **arguments))
