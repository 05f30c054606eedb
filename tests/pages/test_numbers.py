"""No number is told differently by two pages.

A sentence that links to a page of measurements must have its numbers from there, and a sentence that stands on two
pages must have the same numbers on both.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from .reading import PAGES, ROOT, name_of

# Pages whose numbers are measured, or made from stored measurements.
MEASURED = (
    *("analysis/RESULTS.md", "benchmarks/README.md", "benchmarks/gpu.md", "docs/results.md", "eval/results/README.md"),
    *("experiments/RESULTS.md", "experiments/STARTS.md", "experiments/results/TABLES.md"),
)
# Numbers with decimals, and percentages: names, versions and counts are not measured.
_NUMBER = re.compile(r"(?<![\w.,-])[-+]?\d[\d,]*(?:\.\d+%?|%)(?![\w.]*\w)")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_TABLE = re.compile(r"<!-- table: (?P<page>[^,]+), (?P<name>.+) -->")


def whole_text(page: Path) -> str:
    """Return the text of a page with the tables that it takes from others, and without code."""

    def table(mark: re.Match) -> str:
        other = (page.parent / mark["page"]).read_text(encoding="utf-8")
        return other.partition(f"<!-- {mark['name']} -->\n")[2].partition("<!-- end -->")[0]

    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return _TABLE.sub(table, text)


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page, and each row of its tables."""
    for part in re.split(r"\n\s*\n|\n(?=\s*[-*] |\||#)", text):
        line = " ".join(part.split())
        yield from [line] if line.startswith("|") else re.split(r"(?<=[.!?:;]) (?=[A-Z`\[*(])", line)


def section(text: str, anchor: str) -> str:
    """Return a section of a page with the sections below it; the whole page without an anchor."""
    found, level = [], 0
    for line in text.splitlines() if anchor else ():
        heading = re.match(r"(#+) (.*)", line)
        if heading and level and len(heading[1]) <= level:
            break
        if heading and re.sub(r"[^\w\- ]", "", heading[2].lower()).replace(" ", "-") == anchor:
            level = len(heading[1])
        if level:
            found.append(line)
    return "\n".join(found) if anchor else text


def says(text: str, number: str) -> bool:
    """Return whether a text has a number, or one that rounds to it; signs do not count, as in "0.02 below"."""
    shown = number.lstrip("+-").replace(",", "").removesuffix("%")
    digits = len(shown.partition(".")[2])
    others = (n.replace(",", "") for n in re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?", text))
    return any(len(other.partition(".")[2]) >= digits and f"{float(other):.{digits}f}" == shown for other in others)


def unsupported(page: Path, text: str) -> list[tuple[list[str], str]]:
    """Return the sentences of a page's text that link to measurements, with the numbers that these do not have."""
    found = []
    for sentence in sentences(text):
        sources = []
        for link in _LINK.findall(sentence):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if target != page and target.is_relative_to(ROOT) and name_of(target) in MEASURED:
                sources.append(section(whole_text(target), anchor))
        numbers = _NUMBER.findall(_LINK.sub("]", sentence)) if sources else []
        if missing := [number for number in numbers if not any(says(source, number) for source in sources)]:
            found.append((missing, sentence))
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_sentence_that_links_to_measurements_has_their_numbers(page):
    assert unsupported(page, whole_text(page)) == []


def test_a_sentence_has_the_same_numbers_on_each_page():
    said = defaultdict(dict)
    for page in PAGES:
        # Two reports of one form, of different models.
        for sentence in sentences(whole_text(page)) if page.name != "report.md" else ():
            form = re.sub(r"\d[\d,.]*\d|\d", "#", _LINK.sub("]", sentence))
            if len(re.findall(r"[^\W\d_]{2,}", form)) >= 6 and _NUMBER.search(sentence):
                said[form][name_of(page)] = _NUMBER.findall(sentence)
    differing = {form: pages for form, pages in said.items() if len({*map(tuple, pages.values())}) > 1}
    assert differing == {}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_an_interval_of_losses_is_called_a_tie_if_it_contains_zero_and_only_then(page):
    intervals = re.findall(r"\[([-+])\d+\.\d\d+, ([-+])\d+\.\d\d+\](, tie)?", whole_text(page))
    assert all(((low, high) == ("-", "+")) == bool(tie) for low, high, tie in intervals)


def test_the_papers_losses_have_the_leads_that_figures_show():
    published = yaml.safe_load((ROOT / "experiments/published.yaml").read_text(encoding="utf-8"))["paper, Table 2"]
    page = (ROOT / "docs/concepts/mechanism.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+)M \| ([\d.]+)B \| ([\d.]+) \| ([\d.]+) \|", page, re.MULTILINE)
    told = [
        (int(size), float(tokens), round(float(block) - float(standard), 3)) for size, tokens, standard, block in rows
    ]
    assert told == [(row["parameters"] / 1e6, row["tokens"] / 1e9, row["lead"]) for row in published]


def test_the_rules_find_a_number_that_is_told_differently():
    assert says("| Block | -0.0213 |", "0.02") and not says("| Block | -0.0313 |", "0.02")
    assert says("takes 1,234.5 MB", "1,234.5") and not says("version 2.13", "0.13") and not says("0.2", "0.20")
    assert section("# A\n1.5\n## B c\n2.5\n### D\n3.5\n## E\n4.5", "b-c").splitlines() == [
        "## B c",
        "2.5",
        "### D",
        "3.5",
    ]
    told = "It takes 7.77 times as long ([measured](../benchmarks/README.md#models)). It is 7.77."
    assert [numbers for numbers, _ in unsupported(ROOT / "docs/results.md", told)] == [["7.77"]]
