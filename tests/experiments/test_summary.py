"""The leads on the page of results: those of the stored runs from scratch, and what others report."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from attnres import CONNECTIONS
from experiments import report, summary
from experiments.declared import SELECTION_SEED
from experiments.scratch import DeclaredComparison

from .stored_runs import CURVE, SMALL, add, stored, words

BLOCK = "Block, S=2"
ONE_RATE = replace(SMALL, rate=1e-3)


@pytest.fixture
def comparison(tmp_path) -> DeclaredComparison:
    """Return runs of two seeds whose losses fall by 0.5 with each doubling of tokens. Block ends 0.25 lower."""
    runs = [("standard", 1e-3, SMALL.tokens, seed, 5.0 + seed) for seed in (0, 1)]
    runs += [(BLOCK, 1e-3, SMALL.tokens, 0, 4.5), (BLOCK, 1e-3, SMALL.tokens, 1, 6.0)]
    runs += [(BLOCK, 1e-3, SMALL.tokens // 2, SELECTION_SEED, 5.75)]
    return stored(ONE_RATE, tmp_path / "claim-tiny.json", runs)


def test_the_lead_is_that_of_the_first_block_without_switches(comparison):
    heads = {"Block, two heads": {"attn_res_block_size": 2, "attn_res_heads": 2}}
    others = {"standard": SMALL.connections["standard"], "Full": SMALL.connections["Full"]} | heads
    experiment = replace(ONE_RATE, connections=others | {BLOCK: SMALL.connections[BLOCK]})
    first = DeclaredComparison(experiment, comparison.store)
    for label in ("Full", "Block, two heads"):
        run = {"recipe": {"connection": experiment.connections[label], "rate": 1e-3, "tokens": SMALL.tokens}}
        add(comparison.store, run | {"seed": 0, "after": 1.0, **CURVE})
    lead = summary.lead_of(first)
    assert lead.values == [-0.5, 0.0] and lead.seeds == 2
    assert lead.deviation == pytest.approx(math.sqrt(0.125))
    assert (lead.sublayers, lead.width, lead.tokens) == (8, 32, SMALL.tokens)
    layer = 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32
    # Eight sublayers and the output have a pseudo-query and a key norm each.
    assert lead.parameters == 4 * layer + 32 + 9 * 2 * 32


def test_a_comparison_without_runs_has_no_lead(tmp_path):
    assert summary.lead_of(stored(ONE_RATE, tmp_path / "none.json", [])) is None
    alone = [("standard", 1e-3, SMALL.tokens, 0, 5.0), ("Full", 1e-3, SMALL.tokens, 0, 4.0)]
    assert summary.lead_of(stored(ONE_RATE, tmp_path / "full.json", alone)) is None


def test_at_equal_time_a_step_that_takes_twice_as_long_has_half_the_tokens(comparison):
    ratio = {"median": 2.0, "low": 2.0, "high": 2.0}
    with comparison.store.update():
        comparison.store.costs = {"ratios": {"eager": {BLOCK: ratio}}}
    lead = summary.lead_of(comparison)
    assert lead.equal_time == {"eager": pytest.approx(-0.25 + 0.5)}
    assert summary.table([lead], 3).splitlines()[2].endswith("| 2 | -0.2500 ± 0.3536 | +0.25 |  |")
    assert (
        summary.table([lead], 3)
        .splitlines()[2]
        .startswith("| 3 | [claim-tiny](results/claim-tiny.json), Block, S=2 | 8 |")
    )


def test_each_lead_of_others_names_its_source():
    leads = summary.published()
    assert all(lead.source.startswith("paper") or "](https://github.com/" in lead.source for lead in leads)
    table = summary.table(leads, 1).splitlines()
    assert "| 1 | paper, Table 2 | 24 | 896 | 194M | 38.7B |  | -0.022 |" in table
    assert any(row.endswith("| 32 | 512 | 54M | 123M | 3 | -0.026 ± 0.006 |") for row in table)


@pytest.mark.slow
def test_the_figure_numbers_its_leads_like_the_rows(comparison, tmp_path):
    here, others = summary.leads_of([comparison]), summary.published()
    summary.plot(here, [], tmp_path / "alone.svg")
    summary.plot(here, [others[-1], *others[:5]], tmp_path / "reordered.svg")
    assert {"2", "3 to 7"} <= words(tmp_path / "reordered.svg")
    summary.plot(here, others, tmp_path / "figure.svg")
    assert {"the paper (mixtures of experts)", "others", "2 to 6", "7"} <= words(tmp_path / "figure.svg")


def test_the_pages_count_the_stored_pairs_of_runs():
    root = Path(__file__).parents[2]
    leads = summary.leads_of(report.first_runs(report.stored_comparisons()))
    dense = [value for lead in leads if "moe" not in lead.source for value in lead.values]
    lower = sum(value < -0.01 for value in dense)
    assert all(abs(value) < 0.01 for value in dense if value >= -0.01), "the others are ties"
    for page in ("README.md", "docs/results.md"):
        assert f"in {lower} of {len(dense)} pairs of runs" in (root / page).read_text(), page


def test_the_list_of_connections_counts_the_experiments_that_each_wins():
    """The column `lower` of `attnres list connections`, from the stored runs of each connection's first form."""
    wins: dict[str, dict[tuple[float, ...], bool]] = {}
    for comparison in report.stored_comparisons():
        if comparison.store.path.stem != comparison.experiment.name:
            continue  # a repetition
        shown, compared = comparison.shown(), set()
        for label in shown.rates:
            form = dict(comparison.experiment.connections[label])
            name = form.pop("residual_connection", "attn_res")
            is_full = form.pop("attn_res_block_size", None) == 1
            form.pop("muddformer_way", None)
            if form or is_full or name in compared or label == "standard":
                continue
            compared.add(name)
            # Two experiments share the runs of some connections, which count once.
            differences = tuple(shown.differences(label))
            wins.setdefault(name, {})[differences] = all(difference < 0 for difference in differences)
    counted = {name: f"{sum(of.values())} of {len(of)}" for name, of in wins.items()}
    assert {name: c.measured["lower"] for name, c in CONNECTIONS.items() if "lower" in c.measured} == counted
