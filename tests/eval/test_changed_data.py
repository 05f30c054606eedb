"""A stored number is reported or compared only if its prompts and gold answers are still the same."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from attnres.commands.eval import run_eval
from attnres.eval.benchmarks import load, pick
from attnres.eval.report import revision_note, to_markdown
from attnres.eval.rows import make_row
from attnres.eval.start import EvalOptions, check_run
from attnres.eval.stored_results import ResultStore
from attnres.eval.suite import collect

from .synthetic import write_data_set

ARC = "allenai/ai2_arc"
STORED = "model/arc_challenge.json"


@pytest.fixture(scope="module")
def data(hub, tmp_path_factory) -> Path:
    """Return a data folder with six items of ARC-Challenge."""
    folder = tmp_path_factory.mktemp("data") / "hub"
    splits = {path.stem: pd.read_parquet(path) for path in (hub / ARC / "ARC-Challenge").glob("*.parquet")}
    write_data_set(folder / ARC, {"ARC-Challenge": {**splits, "test": splits["test"][:6]}})
    return folder


@pytest.fixture(scope="module")
def models(assets, tmp_path_factory) -> tuple[str, str]:
    """Return the names of two copies of one model."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("one", "two"):
        shutil.copytree(assets / "checkpoints" / "stories260K-hf", folder / name)
    return str(folder / "one"), str(folder / "two")


@pytest.fixture(scope="module")
def evaluated(models, data, tmp_path_factory) -> Path:
    """Return the results of a run of one model alone, on data in the folder `hub` of the working directory."""
    out = tmp_path_factory.mktemp("evaluated") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(data.parent)
        run_eval(EvalOptions(models[0], out, benchmarks=pick("arc_challenge"), data=Path("hub")))
    return out


def other_gold(test: pd.DataFrame) -> None:
    test["answerKey"] = ["B" if key == "A" else "A" for key in test["answerKey"]]


def other_question(test: pd.DataFrame) -> None:
    test.loc[3, "question"] += " Or is it?"


def without_ids(test: pd.DataFrame) -> None:
    del test["id"]


@pytest.mark.parametrize(
    ("change", "parts", "with_baseline"),
    [
        (other_gold, "documents and gold answers", False),
        (other_question, "documents and prompts", True),
        (without_ids, "documents", False),
    ],
)
def test_a_stored_result_is_refused_when_its_data_changed_and_no_file_changes(
    change, parts, with_baseline, models, data, evaluated, tmp_path, monkeypatch
):
    """The run ends before a model is loaded and before a file of the report is written."""
    monkeypatch.setattr("attnres.commands.eval._load_model", lambda *_: pytest.fail("a model was loaded"))
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    shutil.copytree(evaluated, out)
    shutil.copytree(data, "hub")
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    path = Path("hub", ARC, "ARC-Challenge", "test.parquet")
    test = pd.read_parquet(path)
    change(test)
    test.to_parquet(path)
    arguments = {"benchmarks": pick("arc_challenge"), "data": Path("hub")}
    with pytest.raises(ValueError, match=f"^{out / STORED} was computed on other {parts} than the task arc_challenge"):
        run_eval(EvalOptions(models[0], out, baseline=models[1] if with_baseline else None, **arguments))
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == before
    shutil.rmtree("hub")
    shutil.copytree(data, "hub")
    check_run(EvalOptions(models[0], out, pick("arc_challenge"), data=Path("hub")))
    run_eval(EvalOptions(models[0], out, **arguments))


@pytest.fixture
def pair(models, data, evaluated, tmp_path) -> Callable:
    """Return `pair(change)`: the row that compares the model with a copy whose stored result was changed."""
    (benchmark,) = pick("arc_challenge")
    tasks = load(benchmark, data)
    store = ResultStore(evaluated / "model", json.loads((evaluated / "model" / "setup.json").read_text()))

    def row(change: Callable[[dict], None]):
        other = ResultStore(tmp_path / "baseline", store.setup)
        result = store.read("arc_challenge")
        change(result)
        other.write("arc_challenge", result)
        results = [collect({benchmark: tasks}, each_store) for each_store in (store, other)]
        return make_row(benchmark, tasks, results[0], store, (results[1], other)), results[0]

    return row


@pytest.mark.parametrize(
    ("name", "part"), [("doc_hash", "documents"), ("prompt_hash", "prompts"), ("target_hash", "gold answers")]
)
def test_two_models_are_compared_only_on_the_same_items(name, part, pair, tmp_path):
    def change(result: dict) -> None:
        result["samples"][2][name] = "other"

    with pytest.raises(
        RuntimeError, match=f"not scored on the same {part} of the task arc_challenge. Remove {tmp_path}"
    ):
        pair(change)


def test_the_report_names_different_data_commits_of_the_two_models(pair):
    row, results = pair(lambda result: result.update(dataset_revision="b" * 40))
    assert row.pair.difference == 0 and revision_note([row]) is None  # the first model's commit is unknown here
    row = dataclasses.replace(row, revision="a" * 40)
    line = "at different commits, in which all items are the same: ARC-Challenge (aaaaaaa, baseline bbbbbbb)."
    assert line in revision_note([row])
    assert line in to_markdown([row], [], "one", "two", results)
