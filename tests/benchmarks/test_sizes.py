"""Tests that the tables of the guide on sizes hold what their command computes."""

import json

import pytest
from transformers import AutoTokenizer

from attnres.eval.benchmarks import benchmarks, load
from benchmarks import sizes


def rows_of_the_page(name: str) -> list[list[str]]:
    """Return the cells of a table of the guide, row by row, without its head."""
    table = sizes.PAGE.read_text(encoding="utf-8").partition(f"<!-- {name} -->\n")[2].partition("\n<!-- end -->")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def without_spaces(rows) -> list[list[str]]:
    return [[cell.strip() for cell in row] for row in rows]


def test_the_counts_of_an_evaluation_are_the_stored_ones():
    stored = json.loads(sizes.COUNTS.read_text(encoding="utf-8"))
    assert rows_of_the_page("evaluation") == without_spaces(sizes.evaluation_rows(stored))
    # Prompts that begin alike are read once, so sharing never adds tokens; a request is a choice or an answer.
    for count in stored["benchmarks"].values():
        assert count["shared"] < count["prompt"] and count["items"] <= count["requests"]


def test_the_tasks_of_a_benchmark_are_counted_on_their_first_items(assets, monkeypatch):
    monkeypatch.setattr(sizes, "COUNTED", 2)
    tokenizer = AutoTokenizer.from_pretrained(assets / "checkpoints" / "stories260K-hf")
    for name, choices, answer in (("arc_challenge", 4, 0), ("gsm8k", 1, 512)):
        (task,) = load(benchmarks()[name], assets / "hub")["tasks"].values()
        items = len(task.task_docs)
        count = sizes.count_task(task, tokenizer, items)
        assert (count.items, count.requests, count.generated) == (items, choices * items, answer * items)
        assert 0 < count.shared < count.prompt / 2


@pytest.mark.slow
def test_the_parameters_are_those_of_the_models():
    assert rows_of_the_page("parameters") == without_spaces(sizes.parameter_rows())


@pytest.mark.slow
def test_the_memory_and_time_of_the_smallest_model_are_those_of_its_plan(monkeypatch):
    title = next(iter(sizes.MODELS))
    monkeypatch.setattr(sizes, "MODELS", {title: sizes.MODELS[title]})
    for name, rows in (("inference", sizes.inference_rows()), ("training", sizes.training_rows())):
        assert rows_of_the_page(name)[0] == without_spaces(rows)[0]
