"""What a run says: one headline number for each benchmark, beside the paper's, and pairs with a baseline.

As a table on the screen, in Markdown, and as a bar chart.
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from lm_eval.tasks.manager import TaskDict
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from .items import changed, items_of
from .paired import Paired, compare_pairs
from .paper import Benchmark
from .store import ResultStore

SECOND = (
    "A benchmark with a filter in parentheses is the line above it again: the same answers, taken from the text in "
    "another way. flexible-extract takes the last number or the last answer that is announced, however it is marked."
)
TITLE_CHARACTERS, MODEL_CHARACTERS = 24, 48
ItemScores = dict[tuple[str, int], float]  # (task, number of the item) -> 0 or 1


@dataclass(frozen=True)
class Score:
    """A headline number in percent, with its standard error (None for a single item)."""

    value: float
    stderr: float | None

    def __str__(self) -> str:
        return f"{self.value:.1f}" if self.stderr is None else f"{self.value:.1f} ± {self.stderr:.1f}"


@dataclass(frozen=True)
class ReportRow:
    """One benchmark of a report; `baseline` where there is a second model, `pair` if also all its items are 0 or 1.

    `date` is when the last of its tasks was evaluated (ISO 8601), `revision` the commit of its data set on the Hub, and
    `second` is the same answers by another filter, under `BENCHMARK (FILTER)`, which no paper reports.
    `baseline_revision` that of the second model's evaluation; each None if unknown.
    """

    benchmark: Benchmark
    items: int
    shots: int
    score: Score
    cut: float  # share of the prompts that lost their beginning, being longer than the model's context
    baseline: Score | None = None
    pair: Paired | None = None
    whole: int = 0  # items of the whole benchmark
    output_type: str = ""  # the harness's name for how it asks
    date: str | None = None
    revision: str | None = None
    baseline_revision: str | None = None
    second: "ReportRow | None" = None


def make_row(
    benchmark: Benchmark,
    tasks: TaskDict,
    results: Mapping[str, Any],
    store: ResultStore,
    baseline: tuple[Mapping[str, Any], ResultStore] | None = None,
) -> ReportRow:
    """The row of a benchmark from [`attnres.eval.suite.collect`]'s results and the stores of the items.

    Raises:
        RuntimeError: the two models were not asked the same items, or not scored by the same gold answers.
    """
    if benchmark.second:
        scoring = benchmark.second.split(",")[1]
        title = f"{benchmark.title} ({scoring})"
        other = replace(benchmark, title=title, metric=benchmark.second, second=None, baseline=None, attn_res=None)
        row = make_row(replace(benchmark, second=None), tasks, results, store, baseline)
        return replace(row, benchmark=benchmark, second=make_row(other, tasks, results, store, baseline))
    stored = {name: store.read(name) for name in tasks["tasks"]}
    items = _item_scores(benchmark, stored)
    shots = max(results["n-shot"][name] for name in stored)
    sizes = {name: results["n-samples"][name]["effective"] for name in stored}
    cut = sum(stored[name]["cut"] * size for name, size in sizes.items()) / sum(sizes.values())
    score = _score(benchmark, results)
    row = ReportRow(
        benchmark,
        len(items),
        shots,
        score,
        cut,
        whole=sum(results["n-samples"][name]["original"] for name in stored),
        output_type=next(iter(tasks["tasks"].values())).OUTPUT_TYPE,
        date=max((result["date"] for result in stored.values() if "date" in result), default=None),
        revision=_revision(stored),
    )
    if baseline is None:
        return row
    stored_baseline = {name: baseline[1].read(name) for name in stored}
    for name in stored:
        some, its = (items_of(results[name]["samples"]) for results in (stored, stored_baseline))
        if parts := changed(some, its):
            raise RuntimeError(
                f"{benchmark.title}: the two models were not scored on the same {parts} of the task {name}. Remove "
                f"{baseline[1].path(name)} or {store.path(name)}, whichever is older, and the same command computes it "
                "again."
            )
    other = _item_scores(benchmark, stored_baseline)
    both = score, _score(benchmark, baseline[0])
    scores = list(items.values()), [other[item] for item in items]
    # A group may weigh its tasks alike instead of their items; then items do not tell of its number.
    means = [math.isclose(100 * sum(some) / len(some), its.value, abs_tol=1e-6) for some, its in zip(scores, both)]
    pair = compare_pairs(*scores) if {*scores[0], *scores[1]} <= {0, 1} and all(means) else None
    theirs = _revision(stored_baseline)
    return replace(row, baseline=both[1], pair=pair, baseline_revision=theirs)


def _revision(stored: Mapping[str, Any]) -> str | None:
    revisions = {result.get("dataset_revision") for result in stored.values()}
    return revisions.pop() if len(revisions) == 1 else None


def _score(benchmark: Benchmark, results: Mapping[str, Any]) -> Score:
    metrics = results["results"][benchmark.group]
    metric, scoring = benchmark.metric.split(",")
    stderr = metrics.get(f"{metric}_stderr,{scoring}", "N/A")
    return Score(100 * metrics[benchmark.metric], None if stderr == "N/A" else 100 * stderr)


def _item_scores(benchmark: Benchmark, stored: Mapping[str, Any]) -> ItemScores:
    metric, scoring = benchmark.metric.split(",")
    return {
        (task, sample["doc_id"]): float(sample[metric])
        for task, result in stored.items()
        for sample in result["samples"]
        if sample["filter"] == scoring
    }


def markdown(
    rows: Sequence[ReportRow], failures: Sequence[str], model: str, baseline: str | None, results: Mapping[str, Any]
) -> str:
    """The report as Markdown. Numbers are percent; names stand as they are, whatever characters they have."""
    name, model, baseline = model, _text(model), baseline and _text(baseline)
    papers = [row for row in rows if row.benchmark.baseline is not None]
    shown = _with_second(rows)
    columns = [*_columns(model, baseline), *(["paper: baseline", "paper: AttnRes"] if papers else [])]
    subject = "the paper's benchmarks" if len(papers) == len(rows) else "benchmarks"
    lines = [f"# {model} on {subject}", "", _line(columns), "|---|" + "---:|" * (len(columns) - 1)]
    for row in shown:
        title, *numbers = _cells(row)
        paper = ("-" if value is None else f"{value:.1f}" for value in (row.benchmark.baseline, row.benchmark.attn_res))
        lines.append(_line([_text(title), *numbers, *(paper if papers else ())]))
    note = " The paper's columns are its 48B-A3B models (Table 3)." if papers else ""
    lines += ["", f"Percent, ± one standard error.{note}"]
    if baseline and (pairs := sum(row.pair is not None for row in shown)):
        lines += [
            "",
            "Both models answer the same prompts. The difference is paired, item by item: its interval that of Agresti "
            f"and Min, p that of McNemar's exact test. Of {pairs} tests at 5%, {0.05 * pairs:.1f} would come "
            "out significant if the models were equal.",
        ]
    if len(shown) > len(rows):
        lines += ["", _text(SECOND)]
    if cut := tell_cut(rows, name):
        lines += ["", _text(cut)]
    if revisions := tell_revisions(rows):
        lines += ["", _text(revisions)]
    if failures:
        lines += ["", "Without a result:", "", *(f"- {_text(failure)}" for failure in failures)]
    config = results["config"]
    if "code_execution" in config:
        lines += ["", f"Generated programs ran with: {config['code_execution']}."]
    limit = f"the first {config['limit']} items of each task" if config["limit"] else "all items"
    software = ", ".join(f"{name} {version}" for name, version in results["software"].items())
    parameters = f"{config['model_num_parameters']:,} parameters, {config['model_dtype'].removeprefix('torch.')}"
    lines += ["", f"{model}: {parameters}; {limit}; seed {config['random_seed']}; {software}.", ""]
    return "\n".join(lines)


def tell_cut(rows: Sequence[ReportRow], model: str) -> str | None:
    """Of which benchmarks the model did not see whole prompts."""
    cut = ", ".join(f"{row.benchmark.title} {row.cut:.0%}" for row in rows if row.cut)
    return f"Prompts longer than the context of {model} lost their beginning: {cut} of them." if cut else None


def tell_revisions(rows: Sequence[ReportRow]) -> str | None:
    """Return of which benchmarks the two models read the data at different commits."""
    both = [
        f"{row.benchmark.title} ({row.revision[:7]}, baseline {row.baseline_revision[:7]})"
        for row in rows
        if row.revision and row.baseline_revision and row.revision != row.baseline_revision
    ]
    names = ", ".join(both)
    return (
        f"The two models read the data at different commits, in which all items are the same: {names}."
        if both
        else None
    )


def _with_second(rows: Sequence[ReportRow]) -> list[ReportRow]:
    """Return the rows of a table: below each the one of its second filter."""
    return [line for row in rows for line in (row, row.second) if line]


def _columns(model: str, baseline: str | None) -> list[str]:
    return ["benchmark", "items", "shots", model, *([baseline, "difference [95%]", "p"] if baseline else [])]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _text(text: str) -> str:
    """Text on one line that Markdown shows as it is."""
    return _MARKS.sub(r"\\\g<0>", " ".join(text.split()))


# An underscore within a word is no mark.
_MARKS = re.compile(r"[\\`*\[\]<>|~#&]|(?<![^\W_])_|_(?![^\W_])")


def _cells(row: ReportRow) -> list[str]:
    cells = [row.benchmark.title, f"{row.items:,}", str(row.shots), str(row.score)]
    if pair := row.pair:
        interval = f"{100 * pair.difference:+.1f} [{100 * pair.low:+.1f}, {100 * pair.high:+.1f}]"
        cells += [str(row.baseline), interval, f"{pair.p_value:.2g}"]
    elif row.baseline:
        cells += [str(row.baseline), f"{row.score.value - row.baseline.value:+.1f}", "-"]
    return cells


def screen(rows: Sequence[ReportRow], model: str, baseline: str | None) -> Table:
    """The report as a table for the terminal, narrower: without the shots."""
    table = Table(title="Percent, ± one standard error", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    shots = _columns(model, baseline).index("shots")
    for i, column in enumerate(_columns(model, baseline)):
        if i != shots:
            table.add_column(escape(column), justify="left" if i == 0 else "right")
    for row in _with_second(rows):
        table.add_row(*(escape(cell) for i, cell in enumerate(_cells(row)) if i != shots))
    return table


def plot(rows: Sequence[ReportRow], path: str | os.PathLike, model: str, baseline: str | None) -> None:
    """Draw the scores as bars with their standard errors, a group for each benchmark, to a PNG file.

    Long names are shortened in the middle; those of the models stand below, where they cover no bar.
    """
    series = {model: [row.score for row in rows]}
    if baseline:
        series = {baseline: [row.baseline for row in rows], **series}
    width = 0.8 / len(series)
    figure, axes = plt.subplots(figsize=(max(5.0, 2 + 0.75 * len(rows)), 4.5), layout="constrained")
    for i, (label, scores) in enumerate(series.items()):
        places = [row + (i - (len(series) - 1) / 2) * width for row in range(len(rows))]
        errors = [score.stderr or 0 for score in scores]
        color = "tab:gray" if len(series) > 1 and i == 0 else "tab:blue"
        axes.bar(
            places,
            [score.value for score in scores],
            width,
            yerr=errors,
            capsize=2,
            label=_label(label, MODEL_CHARACTERS),
            color=color,
        )
    titles = [_label(row.benchmark.title, TITLE_CHARACTERS) for row in rows]
    turned = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"} if len(rows) > 1 else {}
    axes.set_xticks(range(len(rows)), titles, **turned)
    axes.set_xlim(-max(0.6, 1.6 - 0.4 * len(rows)), len(rows) - 1 + max(0.6, 1.6 - 0.4 * len(rows)))
    axes.set_ylabel("score (%), ± one standard error")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=1, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _label(text: str, characters: int) -> str:
    """A name as matplotlib shows it: `$` begins a formula, and a first underscore hides a line of the legend.

    One of more than so many characters loses its middle: names of models differ at their ends.
    """
    text = " ".join(text.split())
    if len(text) > characters:
        text = f"{text[: characters // 3]} ... {text[len(text) - characters + characters // 3 + 5 :]}"
    return re.sub("^_", " _", text.replace("$", r"\$"))
