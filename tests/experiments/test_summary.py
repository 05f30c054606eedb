"""The leads on the page of results: those of the stored runs from scratch, and what others report."""

import math
from dataclasses import replace

import numpy as np
import pytest

from attnres.utils.intervals import Interval
from experiments import report, store, summary
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
    assert (lead.difference.mean, lead.difference.count, lead.seeds) == (-0.25, 2, 2)
    half = 12.706205 * math.sqrt(0.125) / math.sqrt(2)  # of two seeds
    assert lead.difference.bounds == pytest.approx((-0.25 - half, -0.25 + half), abs=1e-5)
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
    (time,) = lead.equal_time.values()
    assert (time.mean, time.half_width) == (pytest.approx(-0.25 + 0.5), lead.difference.half_width)
    row = summary.table([lead]).splitlines()[2]
    assert row.startswith("| [claim-tiny](results/claim-tiny.json), Block, S=2 | 8 |")
    assert "| 2 | -0.2500 [-3.4266, +2.9266], tie | +0.25 [-2.93, +3.43], tie | not measured | one rate, from" in row
    assert summary.verdicts([lead]).splitlines()[2:] == [
        "| at equal tokens | 1 | 0 | 1 | 0 |",
        "| at equal time, not compiled | 1 | 0 | 1 | 0 |",
    ]


def test_a_row_says_how_its_rates_were_chosen_and_what_a_sweep_would_have_given(tmp_path):
    rates = {"standard": 1e-3, BLOCK: 1e-3}
    experiment = replace(SMALL, rate=rates, rate_seed=0, sweep_tokens=SMALL.tokens // 2)
    runs = [
        (label, 1e-3, SMALL.tokens, seed, loss) for label, loss in (("standard", 5.0), (BLOCK, 4.5)) for seed in (0, 1)
    ]
    runs[-1] = (BLOCK, 1e-3, SMALL.tokens, 1, 4.75)  # seed 1, which chose no rate, has half of the lead of seed 0
    # The sweep prefers another rate of Block, whose whole run ends higher.
    runs += [
        ("standard", 1e-3, SMALL.tokens // 2, SELECTION_SEED, 5.5),
        (BLOCK, 1e-3, SMALL.tokens // 2, SELECTION_SEED, 5.4),
    ]
    runs += [(BLOCK, 2e-3, SMALL.tokens // 2, SELECTION_SEED, 5.3), (BLOCK, 2e-3, SMALL.tokens, 0, 5.75)]
    lead = summary.lead_of(stored(experiment, tmp_path / "claim-tiny.json", runs))
    assert lead.limits == (
        "rates from whole runs of seed 0; the others give -0.250, one seed; "
        "rates from sweeps of half a run give +0.75, one seed"
    )
    swept = summary.lead_of(stored(replace(experiment, rate=None), tmp_path / "other.json", runs))
    assert swept.limits == "rates from sweeps of half a run" and swept.difference.mean == 0.75


def test_a_lead_that_shrinks_to_the_end_is_called_so(tmp_path):
    comparison = stored(ONE_RATE, tmp_path / "claim-tiny.json", [])
    for label, leads in (("standard", [0.0] * 10), (BLOCK, [-0.5] * 8 + [-0.4, -0.3])):
        recipe = {"connection": SMALL.connections[label], "rate": 1e-3, "tokens": SMALL.tokens}
        curve = [[step, 5.0 + lead] for step, lead in enumerate(leads, 1)]
        add(comparison.store, {"recipe": recipe, "seed": 0, "after": curve[-1][1], "curve": curve})
    assert summary.lead_of(comparison).limits.endswith("; lead still shrinking")


def test_the_page_tells_the_leads_in_training_loss_of_the_stored_curves():
    comparison = next(c for c in report.stored_comparisons() if c.store.path.stem == "claim-gpu")
    # [seeds, points, (step, loss)]
    block, standard = (
        np.array([run["curve"] for run in runs]) for runs in zip(*comparison.shown().pairs["Block, S=4"])
    )
    early = block[0, :, 0].tolist().index(300)
    told = [Interval.of((block - standard)[:, point, 1].tolist()).describe(2) for point in (early, -1)]
    page = " ".join((store.ROOT / "experiments" / "RESULTS.md").read_text(encoding="utf-8").split())
    assert f"{told[0]} after 300 of 1,024 steps and {told[1]} at the end (n = {len(block)})" in page


def test_each_lead_of_others_names_its_source():
    leads = summary.published()
    assert all(lead.source.startswith("paper") or "](https://github.com/" in lead.source for lead in leads)
    table = summary.table(leads).splitlines()
    assert "| paper, Table 2 | 24 | 896 | 194M | 38.7B | 200 | not reported | -0.022 |" in table
    # An interval from a deviation of 0.006 over 3 seeds.
    assert any(row.endswith("| 32 | 512 | 54M | 123M | 2.3 | 3 | -0.026 [-0.041, -0.011] |") for row in table)


@pytest.mark.slow
def test_the_figure_names_its_leads(comparison, tmp_path):
    ratio = {BLOCK: {"median": 2.0, "low": 2.0, "high": 2.0}}
    with comparison.store.update():
        comparison.store.costs = {"ratios": {"eager": ratio, "compiled": ratio}}
    (both,) = summary.leads_of([comparison])
    eager = replace(both, equal_time={"eager": both.equal_time["eager"]})
    summary.plot([both, eager], summary.published(), tmp_path / "figure.svg")
    drawn = words(tmp_path / "figure.svg")
    assert {"here, equal tokens", "here, equal time, compiled", "the paper", "others"} <= drawn
    assert "here, equal time, not compiled" in drawn
    summary.plot([both], summary.published(), tmp_path / "compiled.svg")
    assert "here, equal time, not compiled" not in words(tmp_path / "compiled.svg")
    assert {"194M, paper (200)", "13.1M, nanogpt-attnres-repro (80)"} <= drawn
