"""Show the rows of a report beside the paper's numbers: as a table on the screen, in Markdown, and as a bar chart."""

import os
import re
from collections.abc import Mapping, Sequence
from textwrap import shorten
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from attnres.utils.drawing import Drawing, blank, finish, styled

from .rows import ReportRow, Shortened

# The note that explains the rows of second filters.
SECOND_NOTE = (
    "A line with a filter in parentheses scores the same generated texts as the line above it, but takes the answers "
    "from them in another way. In benchmarks of the paper, flexible-extract takes the last number or announced answer, "
    "however it is marked."
)
# The greatest lengths of labels in the chart: titles of benchmarks, and names of models.
TITLE_CHARACTERS, MODEL_CHARACTERS = 24, 48

# Characters that Markdown reads as markup. An underscore within a word is plain text.
_MARKS = re.compile(r"[\\`*\[\]<>|~#&]|(?<![^\W_])_|_(?![^\W_])")


def to_markdown(
    rows: Sequence[ReportRow],
    failures: Sequence[str],
    model: str,
    baseline: str | None,
    results: Mapping[str, Any],
    baseline_results: Mapping[str, Any] | None = None,
) -> str:
    """Return the report as Markdown.

    Numbers are percent, except where a note says otherwise. Names appear as they are, whatever characters they contain.

    Args:
        rows: The benchmarks that have a result.
        failures: One line for each failure.
        model: The name of the model.
        baseline: The name of the second model, if there is one.
        results: The model's results, from [`attnres.eval.suite.collect`].
        baseline_results: The second model's results.
    """
    model_text, baseline_text = _as_markdown(model), baseline and _as_markdown(baseline)
    paper_rows = [row for row in rows if row.benchmark.baseline is not None]
    all_rows = _with_second(rows)
    columns = _columns(model_text, baseline_text) + (["paper: baseline", "paper: AttnRes"] if paper_rows else [])
    subject = "the paper's benchmarks" if len(paper_rows) == len(rows) else "benchmarks"
    lines = [f"# {model_text} on {subject}", "", _table_line(columns), "|---|" + "---:|" * (len(columns) - 1)]
    for row in all_rows:
        title, *numbers = _cells(row)
        paper_numbers = [row.benchmark.baseline, row.benchmark.attn_res] if paper_rows else []
        paper_cells = ["-" if number is None else f"{number:.1f}" for number in paper_numbers]
        lines.append(_table_line([_as_markdown(title), *numbers, *paper_cells]))

    note = " The paper's columns are its 48B-A3B models (Table 3)." if paper_rows else ""
    lines += ["", f"{_unit(rows)}, ± one standard error.{note}"]
    # Second filters score the same texts, so their tests are no further ones.
    if baseline and (pairs := sum(row.pair is not None for row in rows)):
        is_cut = any(row.shortened.cut or row.baseline_shortened.cut for row in rows)
        same = "items, in prompts that were cut as said below" if is_cut else "prompts"
        lines += [
            "",
            f"Both models answer the same {same}. The difference is paired item by item, with the interval of Agresti "
            f"and Min, and p is that of McNemar's exact test. Of {pairs} tests at 5%, at most "
            f"{0.05 * pairs:.1f} are expected to come out significant if the models are equal.",
        ]
    notes = [SECOND_NOTE] if len(all_rows) > len(rows) else []
    notes += make_notes(rows, model, baseline, results, baseline_results)
    for note in notes:
        lines += ["", _as_markdown(note)]
    if failures:
        lines += ["", "Without a result:", "", *(f"- {_as_markdown(failure)}" for failure in failures)]

    config = results["config"]
    if "code_execution" in config:
        lines += ["", f"Generated programs ran with: {config['code_execution']}."]
    limit = f"the first {config['limit']} items of each task" if config["limit"] else "all items"
    software = ", ".join(f"{name} {version}" for name, version in results["software"].items())
    parameters = f"{config['model_num_parameters']:,} parameters, {config['model_dtype'].removeprefix('torch.')}"
    lines += ["", f"{model_text}: {parameters}; {limit}; seed {config['random_seed']}; {software}.", ""]
    return "\n".join(lines)


def make_notes(
    rows: Sequence[ReportRow],
    model: str,
    baseline: str | None,
    results: Mapping[str, Any],
    baseline_results: Mapping[str, Any] | None = None,
) -> list[str]:
    """Return the sentences that a reader of the table needs, for the terminal and the report.

    They name prompts that were cut, answers that had fewer tokens, settings of generation that were ignored, data read
    at different commits, and numbers that are not percent.

    Args:
        rows: The report's rows.
        model: The name of the model.
        baseline: The name of the second model, if there is one.
        results: The model's results, from [`attnres.eval.suite.collect`].
        baseline_results: The second model's results.
    """
    models = [(model, results, [(row, row.shortened) for row in rows])]
    if baseline:
        models.append((baseline, baseline_results or {"config": {}}, [(row, row.baseline_shortened) for row in rows]))
    notes = [_cut_note(shortened, name) for name, _, shortened in models]
    notes += [_answer_note(shortened, name) for name, _, shortened in models]
    notes += [_settings_note(of_model, name) for name, of_model, _ in models]
    notes += [revision_note(rows), _unit_note(rows)]
    return [note for note in notes if note]


def _cut_note(shortened: Sequence[tuple[ReportRow, Shortened]], model: str) -> str | None:
    """Return a sentence on the benchmarks whose prompts were longer than a model's context."""
    cut = ", ".join(f"{row.benchmark.title} {lost.cut_percent}" for row, lost in shortened if lost.cut)
    return f"Prompts longer than the context of {model} lost their beginning: {cut} of them." if cut else None


def _answer_note(shortened: Sequence[tuple[ReportRow, Shortened]], model: str) -> str | None:
    """Return a sentence on the benchmarks that reserve more tokens for an answer than half of a model's context."""
    limits = ", ".join(
        f"{row.benchmark.title} {lost.answer_tokens} instead of {lost.task_answer_tokens} tokens"
        for row, lost in shortened
        if lost.answer_tokens is not None
    )
    return f"Answers of {model} had at most half of its context: {limits}." if limits else None


def _settings_note(results: Mapping[str, Any], model: str) -> str | None:
    """Return a sentence on the settings beside a model that would have changed its answers."""
    settings = results["config"].get("ignored_settings") or {}
    values = ", ".join(f"{name} {shorten(str(value), 40)}" for name, value in settings.items())
    return f"For answers, the generation_config.json of {model} did not count: {values}." if values else None


def _unit_note(rows: Sequence[ReportRow]) -> str | None:
    """Return a sentence on the benchmarks whose numbers are not percent."""
    names = ", ".join(
        f"{row.benchmark.title} ({row.benchmark.metric.split(',')[0]})" for row in rows if not row.is_percent
    )
    return f"Not percent, but in the unit of the metric: {names}." if names else None


def revision_note(rows: Sequence[ReportRow]) -> str | None:
    """Return a sentence on the benchmarks whose data the models read at different commits; `None` if there are none."""
    differing = ", ".join(
        f"{row.benchmark.title} ({row.revision[:7]}, baseline {row.baseline_revision[:7]})"
        for row in rows
        if row.revision and row.baseline_revision and row.revision != row.baseline_revision
    )
    if not differing:
        return None
    return f"The two models read the data at different commits, in which all items are the same: {differing}."


def to_table(rows: Sequence[ReportRow], model: str, baseline: str | None) -> Table:
    """Return the report as a table for the terminal. To be narrower, it leaves out the shots.

    Args:
        rows: The benchmarks that have a result.
        model: The name of the model.
        baseline: The name of the second model, if there is one.
    """
    table = Table(title=f"{_unit(rows)}, ± one standard error", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    columns = _columns(model, baseline)
    shots = columns.index("shots")
    for i, column in enumerate(columns):
        if i != shots:
            table.add_column(escape(column), justify="left" if i == 0 else "right")
    for row in _with_second(rows):
        table.add_row(*(escape(cell) for i, cell in enumerate(_cells(row)) if i != shots))
    return table


def plot(rows: Sequence[ReportRow], path: str | os.PathLike, model: str, baseline: str | None) -> None:
    """Draw the scores as bars with their standard errors, grouped by benchmark, and write them to a PNG file.

    Long names are shortened in the middle. The models' names stand below the axes, where they cover no bar.

    Args:
        rows: The benchmarks that have a result.
        path: The file to write.
        model: The name of the model.
        baseline: The name of the second model, if there is one.
    """
    finish(_draw(rows, model, baseline), path)


@styled
def _draw(rows: Sequence[ReportRow], model: str, baseline: str | None) -> Drawing:
    """Return the figure of `plot`."""
    series = [(model, [row.score for row in rows])]
    if baseline:
        series.insert(0, (baseline, [row.baseline for row in rows if row.baseline is not None]))
    width = 0.8 / len(series)
    figure = blank(max(4.0, 1.6 + 0.6 * len(rows)), 3.6)
    axes = figure.subplots()
    for i, (name, scores) in enumerate(series):
        axes.bar(
            [row + (i - (len(series) - 1) / 2) * width for row in range(len(rows))],
            [score.value for score in scores],
            width,
            yerr=[score.stderr or 0 for score in scores],
            capsize=2,
            label=_label(name, MODEL_CHARACTERS),
            color="tab:gray" if len(series) > 1 and i == 0 else "tab:blue",
        )
    titles = [_label(row.benchmark.title, TITLE_CHARACTERS) for row in rows]
    turned: dict[str, Any] = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"} if len(rows) > 1 else {}
    axes.set_xticks(range(len(rows)), titles, **turned)
    # With few benchmarks, wider margins keep the bars from filling the chart.
    margin = max(0.6, 1.6 - 0.4 * len(rows))
    axes.set_xlim(-margin, len(rows) - 1 + margin)
    unit = "%" if all(row.is_percent for row in rows) else "% or the metric's unit"
    axes.set_ylabel(f"score ({unit}), ± one standard error")
    if all(score.value >= 0 for _, scores in series for score in scores):
        axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=1, frameon=False)
    return figure


def _with_second(rows: Sequence[ReportRow]) -> list[ReportRow]:
    """Return the rows, each followed by the row of its second filter."""
    return [line for row in rows for line in (row, row.second) if line]


def _unit(rows: Sequence[ReportRow]) -> str:
    """Return the unit of a table's numbers, for the line that explains them."""
    return "Percent" if all(row.is_percent for row in rows) else "Percent, or the unit of the metric (see the note)"


def _columns(model: str, baseline: str | None) -> list[str]:
    return ["benchmark", "items", "shots", model, *([baseline, "difference [95%]", "p"] if baseline else [])]


def _cells(row: ReportRow) -> list[str]:
    """Return a row's cells, which fit `_columns`."""
    cells = [row.benchmark.title, f"{row.items:,}", str(row.shots), str(row.score)]
    if pair := row.pair:
        interval = f"{100 * pair.difference:+.1f} [{100 * pair.low:+.1f}, {100 * pair.high:+.1f}]"
        cells += [str(row.baseline), interval, f"{pair.p_value:.2g}"]
    elif row.baseline:
        cells += [str(row.baseline), f"{row.score.value - row.baseline.value:+.1f}", "-"]
    return cells


def _table_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _as_markdown(text: str) -> str:
    """Return a text on one line, escaped so that Markdown shows it as it is."""
    return _MARKS.sub(r"\\\g<0>", " ".join(text.split()))


def _label(text: str, characters: int) -> str:
    """Return a name as a label of matplotlib.

    A name longer than `characters` loses its middle, since the names of models differ at their ends.
    """
    text = " ".join(text.split())
    if len(text) > characters:
        text = f"{text[: characters // 3]} ... {text[len(text) - characters + characters // 3 + 5 :]}"
    # For matplotlib, `$` begins a formula, and a first underscore hides a line of the legend.
    return re.sub("^_", " _", text.replace("$", r"\$"))


__all__ = ["make_notes", "plot", "revision_note", "to_markdown", "to_table"]
