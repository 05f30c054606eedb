"""Tests that the summary of speed on the page of results agrees with the stored measurements."""

import json
import re

from .reading import ROOT


def test_the_ranges_of_speed_on_a_cpu_are_those_of_the_stored_rows():
    rows = json.loads((ROOT / "benchmarks" / "results" / "models.json").read_text(encoding="utf-8"))["rows"]
    rows = [row for row in rows if "d = 64" not in row["model"]]  # the page is about models of d = 1024
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| ([a-z, ]+?)(?: \(.*\))? \| ([\d. to]+) \| ([\d. to]+) \|$", page, re.MULTILINE)
    assert {workload for workload, *_ in table} == {row["workload"] for row in rows}
    for workload, *cells in table:
        for peer, cell in zip(("ours / standard", "pseudocode / standard"), cells, strict=True):
            ratios = [row["ratios"].get(peer) for row in rows if row["workload"] == workload]
            medians = [ratio["median"] for ratio in ratios if ratio]
            assert cell == " to ".join(sorted({f"{min(medians):.2f}", f"{max(medians):.2f}"})), workload
