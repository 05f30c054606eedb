"""The README: its table is that of the stored runs, and it tells no other number that was measured."""

import json
import re
import tomllib
from pathlib import Path
from statistics import mean

import pytest
from scipy import stats

from attnres.utils.intervals import CONFIDENCE
from experiments import first_screen, report, summary

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def rows() -> list[list[str]]:
    """Return the cells of the table of the README."""
    table = README.partition("<!-- first screen -->\n")[2].partition("\n<!-- end -->")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_the_table_of_the_readme_is_made_of_the_stored_runs():
    here = summary.leads_of(report.first_runs(report.stored_comparisons()))
    assert first_screen.table(here, summary.published()) in README, "run `python -m experiments report`"
    shown = dict(zip(rows()[0], next(row for row in rows() if row[0].startswith("28.3M"))))
    content = json.loads((ROOT / "experiments" / "results" / "claim-gpu.json").read_text())
    losses: dict[str, dict[int, float]] = {"standard": {}, "attn_res": {}}
    for run in content["runs"]:
        if run["recipe"]["tokens"] == 16_777_216:
            losses[run["recipe"]["connection"]["residual_connection"]][run["seed"]] = run["after"]
    standard, block = ([of[seed] for seed in sorted(of)] for of in losses.values())
    low, high = stats.ttest_rel(block, standard).confidence_interval(0.95)
    lead = mean(block) - mean(standard)
    assert shown["loss at equal tokens"] == f"{lead:+.3f} [{low:+.3f}, {high:+.3f}], n = {len(block)}"
    assert float(shown["step, eager"]) == pytest.approx(
        content["costs"]["ratios"]["eager"]["Block, S=4"]["median"], abs=0.005
    )
    # Runs of the longest experiment were made on two processors.
    content = json.loads((ROOT / "experiments" / "results" / "claim-children-long.json").read_text())
    processors = {run["made_by"]["device"] for run in content["runs"] if run["recipe"]["tokens"] == 8_388_608}
    shown = dict(zip(rows()[0], next(row for row in rows() if row[0].startswith("809k"))))
    assert len(processors) == len(shown["measured on"].split(" and ")) == 2


def test_the_table_says_what_the_paper_reports_and_what_was_not_measured():
    assert {len(row) for row in rows()} == {len(first_screen.HEAD)}
    paper = rows()[2]
    assert paper[0].startswith("**paper**") and paper[2] == "-0.020 to -0.026, no interval"
    for row in rows()[3:]:
        for cell in row[2:7]:
            assert re.fullmatch(r"[-+]\d.*|[\d.]+( to [\d.]+)?|not measured", cell), cell
        # An interval that contains zero is called a tie, and no other.
        for low, high, word in re.findall(r"\[(\S+), (\S+)\](, tie)?", " ".join(row)):
            assert (float(low) <= 0 <= float(high)) == bool(word), row


def test_the_text_of_the_readme_tells_no_number_of_its_own():
    """Measured numbers stand in tables that are made. Numbers in words, such as "eight blocks", are settings."""
    text = re.sub(r"<!-- ([\w :]+?)(: made by .*)? -->.*?<!-- (end|/\w+) -->", "", README, flags=re.DOTALL)
    text = re.sub(r"```.*?```|`[^`\n]*`|\]\([^)]*\)|<img[^>]*>", "", text, flags=re.DOTALL)
    numbers = set(re.findall(r"(?<![\w.-])\d[\d.,]*%?", text))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    python = project["requires-python"].removeprefix(">=")
    assert numbers == {f"{CONFIDENCE:.0%}", python}
