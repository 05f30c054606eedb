"""Answers have the length that a task says, limited by the context of their own model, and are greedy."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from attnres.commands.eval import run_eval
from attnres.eval.answer_length import answer_tokens, limited_answers, with_answer_tokens
from attnres.eval.benchmarks import pick
from attnres.eval.start import EvalOptions

TASK = """
task: long_answers
dataset_path: json
dataset_kwargs: {{data_files: {data}}}
test_split: train
output_type: generate_until
doc_to_text: question
doc_to_target: answer
generation_kwargs: {{until: ["."], {name}: 600}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
CONTEXTS = {"short": 40, "long": 1024}


@pytest.fixture(scope="module")
def models(assets, tmp_path_factory) -> Path:
    """Return a folder with a real model as `short` and `long`, which declare contexts of these lengths."""
    folder = tmp_path_factory.mktemp("models")
    for name, length in CONTEXTS.items():
        shutil.copytree(assets / "checkpoints" / "stories260K-hf", folder / name)
        for file, key in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
            content = json.loads((folder / name / file).read_text())
            (folder / name / file).write_text(json.dumps(content | {key: length}))
    return folder


@pytest.fixture
def evaluate(models, tmp_path) -> Callable:
    """Return `evaluate(model, baseline, name)`, which runs a task that reserves 600 tokens by this name."""

    def run(model: str, baseline: str | None = None, name: str = "max_gen_toks", until: str = ".") -> Path:
        tasks, out = tmp_path / "tasks", tmp_path / "out"
        tasks.mkdir(exist_ok=True)
        rows = [{"question": question, "answer": "a"} for question in ("Once", "Once upon a time there was a dog " * 4)]
        (tasks / "data.json").write_text("\n".join(map(json.dumps, rows)))
        text = TASK.format(data=tasks / "data.json", name=name).replace('"."', f'"{until}"')
        (tasks / "task.yaml").write_text(text)
        names = {"model": str(models / model), "baseline": str(models / baseline) if baseline else None}
        run_eval(EvalOptions(out=out, benchmarks=pick("long_answers", tasks), **names))
        return out

    return run


@pytest.mark.parametrize("name", ["max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"])
def test_every_name_of_the_harness_gives_the_number(name):
    assert answer_tokens({"until": [], name: 600}) == 600
    assert with_answer_tokens({"until": [], name: 600}, 20) == {"until": [], "max_gen_toks": 20}
    assert answer_tokens({"until": []}) == answer_tokens(None) == 256


def test_a_limit_ends_with_its_block(loaded):
    (task,) = loaded("gsm8k")["tasks"].values()
    with limited_answers(task, 512):
        assert task.config.generation_kwargs["max_gen_toks"] == 256
    assert task.config.generation_kwargs["max_gen_toks"] == 512


@pytest.mark.slow
@pytest.mark.parametrize("name", ["max_gen_toks", "max_new_tokens"])
def test_a_short_baseline_does_not_limit_the_answers_of_the_model(name, evaluate, models, monkeypatch, capsys):
    out = evaluate("long", "short", name)
    budgets = {}
    for role in ("model", "baseline"):
        stored = json.loads((out / role / "long_answers.json").read_text())
        assert stored["answer_tokens"] == 600
        budgets[role] = answer_tokens(stored["configs"]["long_answers"]["generation_kwargs"])
    assert budgets == {"model": 512, "baseline": 20}
    report = (out / "report.md").read_text()
    for text in (report, capsys.readouterr().out):
        for role, budget in budgets.items():
            model = models / {"model": "long", "baseline": "short"}[role]
            note = f"Answers of {model} had at most half of its context: long_answers {budget} instead of 600 tokens."
            assert note in text.replace("\\_", "_")
        assert f"longer than the context of {models / 'short'} lost their beginning: long_answers 50%" in text
    assert "Both models answer the same items" in report
    monkeypatch.setattr("attnres.commands.eval._load_model", lambda *_: pytest.fail("a model was loaded"))
    evaluate("long", "short", name)
    with pytest.raises(ValueError, match="computed with another generation_kwargs of the task long_answers"):
        evaluate("long", "short", name, until="!")


@pytest.mark.slow
def test_a_run_names_the_settings_of_generation_that_did_not_count(evaluate, models, capsys):
    path = models / "short" / "generation_config.json"
    settings = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(settings | {"repetition_penalty": 1.3, "temperature": 0.6}))
    out = evaluate("long", "short")
    note = f"For answers, the generation_config.json of {models / 'short'} did not count: repetition_penalty 1.3."
    assert note in (out / "report.md").read_text().replace("\\_", "_") and note in capsys.readouterr().out
