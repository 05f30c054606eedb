"""Results are stored task by task, with the settings that they were computed under."""

from importlib import import_module
from types import SimpleNamespace

import pytest

from attnres.commands.errors import describe
from attnres.eval.stored_results import ResultStore, scoring_digest

SETUP = {
    "model": "a",
    "limit": 100,
    "files": {"model.safetensors": [1, 2], "config.json": [3, 4], "tokenizer.json": [5]},
}


def test_a_store_with_the_same_setup_reads_earlier_results(tmp_path):
    ResultStore(tmp_path / "model", SETUP).write("gsm8k", {"results": {"exact_match": 0.5}, "answer": "四"})
    again = ResultStore(tmp_path / "model", SETUP)
    assert "gsm8k" in again
    assert "mmlu" not in again
    assert again.read("gsm8k") == {"results": {"exact_match": 0.5}, "answer": "四"}
    assert again.setup == SETUP


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model": "b"}, "holds results whose setup.json has model 'a', not 'b'. Choose another --out"),
        ({"limit": None}, "holds results whose setup.json has limit 100, not None"),
        ({"files": {"model.safetensors": [1, 3]}}, "holds results whose setup.json has other 'files'"),
    ],
)
def test_results_of_other_settings_are_refused_and_kept(tmp_path, change, message):
    ResultStore(tmp_path, SETUP).write("gsm8k", {})
    with pytest.raises(FileExistsError, match=message):
        ResultStore(tmp_path, SETUP | change)
    assert "gsm8k" in ResultStore(tmp_path, SETUP)


def test_a_partially_written_result_does_not_count(tmp_path):
    """A killed process may leave a partial file, but under another name."""
    store = ResultStore(tmp_path, SETUP)
    (tmp_path / ".gsm8k.json.partial").write_text('{"results": ')
    assert "gsm8k" not in store
    store.write("gsm8k", {"results": 1})
    assert store.read("gsm8k") == {"results": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gsm8k.json", "setup.json"]


RESULT = {"results": {"gsm8k": {"exact_match,none": 0.5}}, "samples": [{"doc_id": 0, "score": 1.0}], 1: float("inf")}


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("0.5", "0.9"),
        lambda text: text.replace("1.0", "true"),
        lambda text: text.replace("sha256", "hash"),
        lambda text: text[:-9],
        lambda text: "[]",
        lambda text: "\ud800",
    ],
    ids=["score", "sample", "hash", "cut off", "list", "text"],
)
def test_an_edited_or_damaged_result_is_refused_with_the_file_and_the_remedy(tmp_path, change):
    store = ResultStore(tmp_path, SETUP)
    store.write("gsm8k", RESULT)
    assert store.read("gsm8k")["samples"] == RESULT["samples"]
    path = tmp_path / "gsm8k.json"
    path.write_bytes(change(path.read_text()).encode("utf-8", "surrogatepass"))
    with pytest.raises((AttributeError, TypeError, ValueError)) as error:
        store.read("gsm8k")
    line, is_foreseen = describe(error.value)
    assert str(path) in line and line.endswith("Remove it, and the same command computes it again.")
    assert is_foreseen


@pytest.mark.parametrize("content", ["{", "3", ""])
def test_a_damaged_setup_is_refused_with_the_remedy(tmp_path, content):
    ResultStore(tmp_path, SETUP)
    (tmp_path / "setup.json").write_text(content)
    with pytest.raises((TypeError, ValueError)) as error:
        ResultStore(tmp_path, SETUP)
    line, is_foreseen = describe(error.value)
    assert "setup.json" in line and "Choose another --out, or remove the folder" in line
    assert is_foreseen


@pytest.mark.parametrize("task", ["setup", "group::task", "../../outside", "a/b", "..", "名前 1"])
def test_every_task_name_gives_a_separate_file_in_the_folder(tmp_path, task):
    store = ResultStore(tmp_path / "out" / "model", SETUP)
    store.write(task, RESULT)
    assert store.read(task)["samples"] == RESULT["samples"]
    assert store.setup == SETUP
    assert len([*(tmp_path / "out" / "model").iterdir()]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_store_without_results_accepts_another_setup(tmp_path):
    """This happens when a run found no data, and the next one reads it from another folder."""
    ResultStore(tmp_path, SETUP)
    store = ResultStore(tmp_path, SETUP | {"limit": 7})
    assert store.setup == SETUP | {"limit": 7}
    store.write("gsm8k", {})
    with pytest.raises(FileExistsError, match=r"holds results whose setup\.json has limit 7"):
        ResultStore(tmp_path, SETUP)


def test_a_function_that_makes_choices_counts_with_those_that_it_calls(tmp_path, monkeypatch):
    """The configuration of a task holds the source of this function alone."""
    monkeypatch.syspath_prepend(tmp_path)
    code, digests = "def doc_to_choice(doc):\n    return named(doc)\ndef named(doc):\n    return ['a', 'b']\n", set()
    for text in (code, code.replace("'b'", "'c'")):
        (tmp_path / "choices_of_a_task.py").write_text(text)
        function = import_module("choices_of_a_task").doc_to_choice
        fields = {"filter_list": None, "metric_list": None, "process_results": None, "doc_to_choice": function}
        digests.add(scoring_digest(SimpleNamespace(config=SimpleNamespace(**fields))))
    assert len(digests) == 2
