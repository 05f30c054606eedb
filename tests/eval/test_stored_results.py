"""The evaluation stored in `eval/results`: its pages show the numbers of the harness's files."""

import csv
import json
import lzma
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import binomtest, norm

from attnres.eval.benchmarks import Benchmark, benchmarks

FOLDER = Path(__file__).parents[2] / "eval" / "results"
ARCHIVE = FOLDER / "results.json.xz"
MODELS = {"stories260K": "retrofit/baseline", "retrofit": "retrofit/results", "healed": "healed/results"}


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    """Return the harness's files by the names that they had in the run, such as `healed/results`."""
    return json.loads(lzma.decompress(ARCHIVE.read_bytes()))


def leaves(results: dict[str, Any], group: str) -> Iterator[str]:
    for task in results["group_subtasks"].get(group, ()):
        yield from leaves(results, task) if results["group_subtasks"].get(task) else (task,)


def percent(results: dict[str, Any], benchmark: Benchmark) -> float:
    return 100 * results["results"][benchmark.group][benchmark.metric]


def score(results: dict[str, Any], benchmark: Benchmark) -> str:
    metric, scoring = benchmark.metric.split(",")
    error = 100 * results["results"][benchmark.group][f"{metric}_stderr,{scoring}"]
    return f"{percent(results, benchmark):.1f} ± {error:.1f}"


def difference(items: int, wins: int, losses: int) -> list[str]:
    """Return the cells of a paired comparison: the interval of Agresti and Min, and McNemar's exact test."""
    centre = (wins - losses) / (items + 2)
    margin = norm.ppf(0.975) * math.sqrt(wins + losses + 1 - (items + 2) * centre**2) / (items + 2)
    p_value = binomtest(wins, wins + losses).pvalue if wins + losses else 1.0
    interval = f"[{100 * (centre - margin):+.1f}, {100 * (centre + margin):+.1f}]"
    return [f"{100 * (wins - losses) / items:+.1f} {interval}", f"{p_value:.2g}"]


def test_the_archive_is_small():
    assert ARCHIVE.stat().st_size < 200_000


@pytest.mark.parametrize("name", ["retrofit", "healed"])
def test_every_number_of_a_report_comes_from_the_stored_results(name, stored):
    results, baseline = stored[f"{name}/results"], stored[f"{name}/baseline"]
    lines = (FOLDER / name / "report.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")][1:]
    by_title = {benchmark.title: benchmark for benchmark in benchmarks().values()}
    assert len(rows) == 11
    for title, items, shots, score_cell, baseline_cell, *paired in rows:
        benchmark = by_title[title]
        tasks = list(leaves(results, benchmark.group))
        count = sum(results["n-samples"][task]["effective"] for task in tasks)
        assert items == f"{count:,}" and shots == str(max(results["n-shot"][task] for task in tasks))
        assert (score_cell, baseline_cell) == (score(results, benchmark), score(baseline, benchmark))
        # Items are not stored, so the numbers of wins and losses are unknown. Some pair of them must give the cells.
        more = round(count * (percent(results, benchmark) - percent(baseline, benchmark)) / 100)
        losses = range(max(0, -more), count - max(0, more))
        assert any(difference(count, lost + more, lost) == paired[:2] for lost in losses), title
        assert paired[2:] == [f"{benchmark.baseline:.1f}", f"{benchmark.attn_res:.1f}"]


def test_the_table_of_tasks_shows_the_stored_results(stored):
    """The columns are task, items, shots, metric, and the score of each model in percent."""
    results = stored["healed/results"]
    rows = [["task", "items", "shots", "metric", *MODELS]]
    for benchmark in benchmarks().values():
        for task in leaves(results, benchmark.group):
            scores = [f"{100 * stored[place]['results'][task][benchmark.metric]:g}" for place in MODELS.values()]
            numbers = results["n-samples"][task]["effective"], results["n-shot"][task]
            rows.append([task, *map(str, numbers), benchmark.metric.replace(",", " "), *scores])
    with open(FOLDER / "scores.csv", newline="", encoding="utf-8") as file:
        assert list(csv.reader(file)) == rows
    assert len(rows) == 124
