"""The report shows names as they are, whatever characters they contain, and no empty sections."""

import dataclasses

import pytest
from PIL import Image
from rich.markdown import Markdown

from attnres.eval import report
from attnres.eval.benchmarks import benchmarks
from attnres.eval.paired import compare_pairs
from attnres.eval.report import SECOND_NOTE, make_notes, plot, to_markdown, to_table
from attnres.eval.rows import ReportRow, Score, Shortened

RESULTS = {
    "config": {"limit": None, "model_num_parameters": 10, "model_dtype": "torch.float32", "random_seed": 0},
    "software": {"torch": "2.13"},
}
WILD = "a|b `c` <img src=x>\n# d_e _f_ *g* [h](i) $j$ \\k ~l~ &lt; $m$"


def row(title: str = "MMLU", **changes) -> ReportRow:
    benchmark = dataclasses.replace(benchmarks()["mmlu"], title=title, **changes)
    pair = compare_pairs([1, 1, 0, 0], [1, 0, 0, 0])
    return ReportRow(benchmark, 4, 5, Score(50, 25), baseline=Score(25, 20), pair=pair)


def shown(text: str) -> list[str]:
    """Return the rendered text of a Markdown document: one string for each heading, paragraph, item and cell."""
    tokens = Markdown(text).parsed
    kinds = {kind.type for token in tokens for kind in token.children or ()} - {"text", "softbreak", "text_special"}
    assert not kinds, kinds  # no code, HTML, link, emphasis
    return ["".join(child.content for child in token.children) for token in tokens if token.type == "inline"]


def test_the_report_shows_names_unchanged():
    title, model, baseline, failure = (f"{place} {WILD}" for place in ("Title", "Model", "Baseline", "Failure"))
    parts = shown(to_markdown([row(title)], [failure], model, baseline, RESULTS))
    for name in (title, model, baseline, failure):
        expected = " ".join(name.split())
        assert any(expected in part for part in parts), (expected, parts)
    table = [line for line in to_markdown([row(title)], [], model, baseline, RESULTS).splitlines() if line[:1] == "|"]
    assert len({line.replace(r"\|", "").count("|") for line in table}) == 1
    assert len(table) == 3


@pytest.mark.parametrize("name", [WILD, "_hidden", "$", "$a$ b$", r"$\frac$", "[red]"])
def test_names_of_any_kind_are_drawn_and_printed(name, tmp_path):
    plot([row(name)], tmp_path / "scores.png", name, f"{name}2")
    assert Image.open(tmp_path / "scores.png").size[0] > 100
    assert to_table([row(name)], name, f"{name}2").row_count == 1


def test_the_second_filter_has_a_separate_line_below(tmp_path):
    first = row("GSM8K")
    second = dataclasses.replace(row("GSM8K (flexible-extract)", baseline=None, attn_res=None), score=Score(75, 20))
    rows = [dataclasses.replace(first, second=second), row("Last")]
    text = to_markdown(rows, [], "m", "b", RESULTS)
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert [line[0] for line in lines[1:]] == ["| GSM8K", "| GSM8K (flexible-extract)", "| Last"]
    assert lines[2][3] == "75.0 ± 20.0" and lines[2][-2:] == ["-", "- |"]
    # The second line scores the same texts, so its test is not counted.
    assert "Of 2 tests at 5%, at most 0.1 are expected" in text and "on the paper's benchmarks" in text
    assert SECOND_NOTE in text and SECOND_NOTE not in to_markdown([first], [], "m", "b", RESULTS)
    assert to_table(rows, "m", "b").row_count == 3
    plot(rows, tmp_path / "scores.png", "m", "b")


def test_numbers_that_the_paper_does_not_report_are_dashes():
    other = row("Mine", baseline=None, attn_res=None)
    both = to_markdown([row(), other], [], "m", None, RESULTS)
    assert "| 74.6 |" in both and "| - | - |" in both and "# m on benchmarks\n" in both
    alone = to_markdown([other], [], "m", None, RESULTS)
    assert "paper" not in alone


CUT, SHORT = Shortened(cut=0.5), Shortened(answer_tokens=256, task_answer_tokens=512)


@pytest.mark.parametrize(
    ("shortened", "expected"),
    [
        ({}, []),
        ({"shortened": CUT}, ["Prompts longer than the context of m lost their beginning: MMLU 50% of them."]),
        ({"baseline_shortened": CUT}, ["Prompts longer than the context of b lost their beginning: MMLU 50% of them."]),
        ({"shortened": SHORT}, ["Answers of m had at most half of its context: MMLU 256 instead of 512 tokens."]),
        (
            {"baseline_shortened": SHORT},
            ["Answers of b had at most half of its context: MMLU 256 instead of 512 tokens."],
        ),
    ],
)
def test_notes_say_what_either_models_context_was_too_short_for(shortened, expected):
    rows = [dataclasses.replace(row(), **shortened)]
    assert make_notes(rows, "m", "b", RESULTS, RESULTS) == expected
    parts = shown(to_markdown(rows, [], "m", "b", RESULTS, RESULTS))
    assert {*expected} <= {*parts}
    is_cut = CUT in shortened.values()
    assert any("answer the same prompts. " in part for part in parts) != is_cut
    assert any("answer the same items, in prompts that were cut as said below. " in part for part in parts) == is_cut


def test_cut_prompts_are_never_none_or_all_by_rounding():
    for cut, text in ((0.001, "under 1%"), (0.999, "over 99%"), (1, "100%")):
        (note,) = make_notes([dataclasses.replace(row(), shortened=Shortened(cut))], "m", None, RESULTS)
        assert f"MMLU {text} of them" in note


def test_settings_of_generation_that_did_not_count_are_named():
    config = RESULTS["config"] | {"ignored_settings": {"repetition_penalty": 1.3}}
    (note,) = make_notes([row()], "m", "b", RESULTS, RESULTS | {"config": config})
    assert note == "For answers, the generation_config.json of b did not count: repetition_penalty 1.3."


def test_numbers_that_are_not_percent_are_named(tmp_path):
    rows = [row(), dataclasses.replace(row("Mine"), is_percent=False, score=Score(-37.5, 2), pair=None)]
    text = to_markdown(rows, [], "m", "b", RESULTS)
    assert "| -37.5 ± 2.0 |" in text and "Not percent, but in the unit of the metric: Mine (acc)." in text
    assert "Percent, or the unit of the metric (see the note), ± one standard error." in text
    plot(rows, tmp_path / "scores.png", "m", "b")


def test_scores_other_than_right_and_wrong_are_compared_without_a_test():
    text = to_markdown([dataclasses.replace(row(), pair=None)], [], "m", "b", RESULTS)
    assert "| +25.0 | - |" in text
    assert "McNemar" not in text


@pytest.mark.parametrize("number", [1, 15])
def test_the_chart_has_room_for_long_names_of_one_benchmark_and_of_all(number, tmp_path, monkeypatch):
    """No text is cut off, and the legend stands below the axes, where it covers no bar."""
    drawn = []
    monkeypatch.setattr(report, "finish", lambda figure, path: drawn.append(figure))
    names = [f"/a/very/long/path/of/a/model/that/goes/on/and/on/{'x' * 60}-{end}" for end in ("seed-0", "seed-1")]
    plot([row(f"benchmark {'y' * 40} {i}") for i in range(number)], tmp_path / "scores.png", *names)
    (figure,) = drawn
    figure.draw_without_rendering()
    (legend,), (axes,) = figure.legends, figure.axes
    assert legend.get_window_extent().y1 <= axes.get_tightbbox().y0
    assert [text.get_text()[-6:] for text in legend.get_texts()] == ["seed-1", "seed-0"]
    for text in [*legend.get_texts(), *axes.get_xticklabels(), axes.yaxis.label]:
        box = text.get_window_extent()
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 and box.y0 >= figure.bbox.y0
