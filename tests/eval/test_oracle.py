"""A model with the right answers scores 1. A model that always takes the first choice scores near chance."""

import pytest

from attnres.eval.benchmarks import benchmarks

from .models import GOLD_CHOICE, FirstChoice, Oracle, evaluate

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", benchmarks())
def test_gold_answers_score_one_on_all_of_the_data(name, loaded):
    benchmark = benchmarks()[name]
    results = evaluate(Oracle(benchmark), benchmark, loaded(name))
    metric = benchmark.metric.split(",")[0]
    samples = [(task, sample) for task, samples in results["samples"].items() for sample in samples]
    wrong = [(task, sample["doc_id"], sample["filtered_resps"]) for task, sample in samples if sample[metric] != 1]
    assert results["headline"] == 1.0, f"{len(wrong)} of {len(samples)} are wrong, first {wrong[:5]}"
    if benchmark.second:
        assert results["results"][benchmark.group][benchmark.second] == 1.0
    items = sum(len(task.eval_docs) for task in loaded(name)["tasks"].values())
    assert len(samples) == (2 if benchmark.second else 1) * items


@pytest.mark.parametrize("name", [*GOLD_CHOICE, "mmlu_pro"])
def test_the_first_choice_scores_near_chance(name, loaded):
    benchmark, tasks = benchmarks()[name], loaded(name)["tasks"].values()
    docs = [doc for task in tasks for doc in task.eval_docs]
    counts = [len(doc["options"]) for doc in docs] if name == "mmlu_pro" else [choices(name, doc) for doc in docs]
    golds = [doc["answer_index"] if name == "mmlu_pro" else GOLD_CHOICE[name](doc) for doc in docs]
    score = evaluate(FirstChoice(benchmark), benchmark, loaded(name))["headline"]
    assert score == pytest.approx(golds.count(0) / len(golds), abs=1e-12)
    chance = sum(1 / count for count in counts) / len(counts)
    error = (chance * (1 - chance) / len(docs)) ** 0.5
    # The labels of MMLU are not uniform: its first choice is right in 22.9% of 14,042 items.
    assert abs(score - chance) < max(4 * error, 0.03)


def choices(name: str, doc: dict) -> int:
    return len(doc["choices"]["text"]) if name == "arc_challenge" else 4
