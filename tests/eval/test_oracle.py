"""A model with the right answers scores 1. A model that always takes the first choice scores near chance."""

from itertools import islice

import pytest

from attnres.eval.benchmarks import benchmarks

from .models import GOLD_CHOICE, FirstChoice, Oracle, evaluate

pytestmark = pytest.mark.slow
# Benchmark -> the number of items of each of its tasks that are tested, where the gold answers are letters or numbers
# of choices, or programs, each of which takes a process. Where they are read from text, all of the data is tested.
MOST = {"mmlu": 10, "mmlu_pro": 50, "hellaswag": 500, "mbpp": 100}


@pytest.mark.parametrize("name", benchmarks())
def test_gold_answers_score_one(name, loaded):
    benchmark = benchmarks()[name]
    results = evaluate(Oracle(benchmark), benchmark, loaded(name), MOST.get(name))
    metric = benchmark.metric.split(",")[0]
    samples = [(task, sample) for task, samples in results["samples"].items() for sample in samples]
    wrong = [(task, sample["doc_id"], sample["filtered_resps"]) for task, sample in samples if sample[metric] != 1]
    assert results["headline"] == 1.0, f"{len(wrong)} of {len(samples)} are wrong, first {wrong[:5]}"
    if benchmark.second:
        assert results["results"][benchmark.group][benchmark.second] == 1.0
    tasks = loaded(name)["tasks"].values()
    items = sum(min(len(task.eval_docs), MOST.get(name, len(task.eval_docs))) for task in tasks)
    assert len(samples) == (2 if benchmark.second else 1) * items


@pytest.mark.parametrize("name", [*GOLD_CHOICE, "mmlu_pro"])
def test_the_first_choice_scores_near_chance(name, loaded):
    benchmark, tasks = benchmarks()[name], loaded(name)["tasks"].values()
    docs = [doc for task in tasks for doc in islice(task.eval_docs, MOST.get(name))]
    counts = [len(doc["options"]) for doc in docs] if name == "mmlu_pro" else [choices(name, doc) for doc in docs]
    golds = [doc["answer_index"] if name == "mmlu_pro" else GOLD_CHOICE[name](doc) for doc in docs]
    score = evaluate(FirstChoice(benchmark), benchmark, loaded(name), MOST.get(name))["headline"]
    assert score == pytest.approx(golds.count(0) / len(golds), abs=1e-12)
    chance = sum(1 / count for count in counts) / len(counts)
    error = (chance * (1 - chance) / len(docs)) ** 0.5
    # The labels of MMLU are not uniform: its first choice is right in 22.9% of 14,042 items.
    assert abs(score - chance) < max(4 * error, 0.03)


def choices(name: str, doc: dict) -> int:
    return len(doc["choices"]["text"]) if name == "arc_challenge" else 4
