"""The rows of a report: one headline number for each benchmark, its uncertainty, and its pair with a baseline."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lm_eval.tasks.manager import TaskDict

from .answer_length import answer_tokens
from .paired import Paired, compare_pairs
from .paper import Benchmark
from .stored_results import ResultStore, differing_parts, items_of

ItemScores = dict[tuple[str, int], float]  # (task, number of the item) -> score


@dataclass(frozen=True)
class Score:
    """A headline number.

    Attributes:
        value: The number, in percent or, if `ReportRow.is_percent` is false, in the metric's own unit.
        stderr: The standard error in the same unit; `None` for a single item.
    """

    value: float
    stderr: float | None

    def __str__(self) -> str:
        return f"{self.value:.1f}" if self.stderr is None else f"{self.value:.1f} ± {self.stderr:.1f}"


@dataclass(frozen=True)
class Shortened:
    """The parts of prompts and answers that did not fit into a model's context.

    Attributes:
        cut: The share of prompts, from 0 to 1, that lost their beginning.
        answer_tokens: The number of tokens that the model could answer in, where it is less than the task's number;
            `None` otherwise. If tasks of a benchmark differ, the smallest.
        task_answer_tokens: The task's number.
    """

    cut: float = 0.0
    answer_tokens: int | None = None
    task_answer_tokens: int | None = None

    @property
    def cut_percent(self) -> str:
        """`cut` as whole percent. It is 0% or 100% only if no prompt or every prompt was cut."""
        if 0 < self.cut < 0.005:
            return "under 1%"
        return "over 99%" if 0.995 <= self.cut < 1 else f"{self.cut:.0%}"


@dataclass(frozen=True)
class ReportRow:
    """One benchmark of a report.

    Attributes:
        benchmark: The benchmark.
        items: The number of items that were asked.
        shots: The number of examples in the prompt.
        score: The model's number.
        shortened: What the model's context was too short for.
        baseline: The second model's number, if there is a second model.
        pair: The comparison item by item, if there is a second model, all scores are 0 or 1, and the number is the mean
            over items.
        whole: The number of items of the whole benchmark.
        output_type: The harness's name for the kind of request, such as `generate_until`.
        date: When the last task was evaluated (ISO 8601); `None` if unknown.
        revision: The commit of the data set on the Hub; `None` if unknown.
        baseline_revision: The commit that the second model's evaluation read; `None` if unknown.
        baseline_shortened: What the second model's context was too short for.
        is_percent: Whether the numbers are percent, which they are if all scores of items are from 0 to 1. Numbers of
            other metrics, such as a score from 0 to 100 or a length, stand in their own unit.
        second: The row of the benchmark's second filter, titled `BENCHMARK (FILTER)`. It scores the same texts. The
            paper does not report it.
    """

    benchmark: Benchmark
    items: int
    shots: int
    score: Score
    shortened: Shortened = Shortened()
    baseline: Score | None = None
    pair: Paired | None = None
    whole: int = 0
    output_type: str = ""
    date: str | None = None
    revision: str | None = None
    baseline_revision: str | None = None
    baseline_shortened: Shortened = Shortened()
    is_percent: bool = True
    second: "ReportRow | None" = None


def make_row(
    benchmark: Benchmark,
    tasks: TaskDict,
    results: Mapping[str, Any],
    store: ResultStore,
    baseline: tuple[Mapping[str, Any], ResultStore] | None = None,
) -> ReportRow:
    """Return the row of a benchmark.

    Args:
        benchmark: The benchmark.
        tasks: Its tasks, as [`attnres.eval.benchmarks.load`] returns them.
        results: The model's combined results, from [`attnres.eval.suite.collect`].
        store: The model's results by task, which hold the items.
        baseline: Results and store of the second model.

    Raises:
        RuntimeError: The two models were not asked the same items, or not scored by the same gold answers.
    """
    if benchmark.second:
        filter_name = benchmark.second.split(",")[1]
        title = f"{benchmark.title} ({filter_name})"
        # The paper reports no numbers for the second filter.
        second = replace(benchmark, title=title, metric=benchmark.second, second=None, baseline=None, attn_res=None)
        row = make_row(replace(benchmark, second=None), tasks, results, store, baseline)
        return replace(row, benchmark=benchmark, second=make_row(second, tasks, results, store, baseline))
    stored = {name: store.read(name) for name in tasks["tasks"]}
    item_scores = _item_scores(benchmark, stored)
    is_percent = _are_shares(item_scores)
    row = ReportRow(
        benchmark,
        items=len(item_scores),
        shots=max(results["n-shot"][name] for name in stored),
        score=_score(benchmark, results, is_percent),
        shortened=_shortened(stored),
        whole=sum(results["n-samples"][name]["original"] for name in stored),
        output_type=next(iter(tasks["tasks"].values())).OUTPUT_TYPE or "",
        date=max((result["date"] for result in stored.values() if "date" in result), default=None),
        revision=_revision(stored),
        is_percent=is_percent,
    )
    if baseline is None:
        return row
    baseline_results, baseline_store = baseline
    stored_baseline = {name: baseline_store.read(name) for name in stored}
    for name in stored:
        items, baseline_items = (items_of(by_task[name]["samples"]) for by_task in (stored, stored_baseline))
        if parts := differing_parts(items, baseline_items):
            raise RuntimeError(
                f"{benchmark.title}: the two models were not scored on the same {parts} of the task {name}. Remove "
                f"{baseline_store.path(name)} or {store.path(name)}, whichever is older, and the same command computes "
                "it again."
            )
    baseline_item_scores = _item_scores(benchmark, stored_baseline)
    # Both models' numbers stand in one unit.
    is_percent = is_percent and _are_shares(baseline_item_scores)
    score, baseline_score = (_score(benchmark, each, is_percent) for each in (results, baseline_results))
    unit = 100 if is_percent else 1
    paired = [*item_scores.values()], [baseline_item_scores[item] for item in item_scores]
    # A group may weigh all of its tasks alike, whatever their number of items. Then its number is not the mean over
    # items, and a comparison of items would not be about that number.
    are_means = all(
        math.isclose(unit * sum(scores) / len(scores), number.value, abs_tol=1e-6)
        for scores, number in zip(paired, (score, baseline_score))
    )
    pair = compare_pairs(*paired) if are_means and {*paired[0], *paired[1]} <= {0, 1} else None
    return replace(
        row,
        score=score,
        baseline=baseline_score,
        pair=pair,
        baseline_revision=_revision(stored_baseline),
        baseline_shortened=_shortened(stored_baseline),
        is_percent=is_percent,
    )


def _shortened(stored: Mapping[str, Any]) -> Shortened:
    """Return what a model's context was too short for, from its stored results by task."""
    sizes = {name: result["n-samples"][name]["effective"] for name, result in stored.items()}
    cut = sum(stored[name]["cut"] * size for name, size in sizes.items()) / sum(sizes.values())
    limits = []
    for name, result in stored.items():
        if (of_task := result.get("answer_tokens")) is not None:
            of_model = answer_tokens(result["configs"][name].get("generation_kwargs"))
            limits += [(of_model, of_task)] if of_model < of_task else []
    return Shortened(cut, *min(limits, default=(None, None)))


def _are_shares(item_scores: ItemScores) -> bool:
    """Return whether all scores are from 0 to 1, so that their mean can be shown as percent."""
    return all(0 <= score <= 1 for score in item_scores.values())


def _revision(stored: Mapping[str, Any]) -> str | None:
    """Return the commit of the data set, if all tasks read the same one."""
    revisions = {result.get("dataset_revision") for result in stored.values()}
    return revisions.pop() if len(revisions) == 1 else None


def _score(benchmark: Benchmark, results: Mapping[str, Any], is_percent: bool) -> Score:
    """Return a benchmark's headline number, in percent or as it is."""
    unit = 100 if is_percent else 1
    numbers = results["results"][benchmark.group]
    metric, filter_name = benchmark.metric.split(",")
    stderr = numbers.get(f"{metric}_stderr,{filter_name}", "N/A")
    return Score(unit * numbers[benchmark.metric], None if stderr == "N/A" else unit * stderr)


def _item_scores(benchmark: Benchmark, stored: Mapping[str, Any]) -> ItemScores:
    """Return the score of each item by the benchmark's metric and filter."""
    metric, filter_name = benchmark.metric.split(",")
    return {
        (task, sample["doc_id"]): float(sample[metric])
        for task, result in stored.items()
        for sample in result["samples"]
        if sample["filter"] == filter_name
    }


__all__ = ["ReportRow", "Score", "Shortened", "make_row"]
