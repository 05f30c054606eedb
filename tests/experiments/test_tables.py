"""Tables of a comparison: differences within seeds, at equal time, and beside the numbers of the paper."""

import math
from dataclasses import replace

import pytest

from experiments.declared import SELECTION_SEED
from experiments.scratch import DeclaredComparison
from experiments.tables import (
    at_equal_time,
    lead_table,
    pair_table,
    rate_pair_table,
    rate_table,
    result_table,
    scratch_tables,
    verdicts,
)

from .stored_runs import SMALL, add, stored

RATES = dict.fromkeys(("standard", "Full"), 1e-3)


def result(comparison: DeclaredComparison, rates: dict[str, float], tokens: int, costs: dict | None = None) -> str:
    return result_table(comparison.shown(tokens, rates), costs or {})


def test_the_table_has_differences_within_seeds(tmp_path):
    losses = {"standard": (5.0, 6.0, 7.0), "Full": (4.9, 5.8, 7.3)}
    runs = [(label, 1e-3, 64, seed, loss) for label in losses for seed, loss in enumerate(losses[label])]
    table = result(stored(SMALL, tmp_path / "runs.json", runs[:-1]), RATES, 64)
    assert "| standard | 0.001 | 3 | 6.0000 |  |" in table
    # Differences of -0.1 and -0.2: half of the interval is 12.706 * 0.0707 / sqrt(2).
    assert "| Full | 0.001 | 2 | 5.3500 | -0.1500 [-0.7853, +0.4853], tie |" in table


def test_tables_show_a_run_that_diverged_as_nan(tmp_path):
    runs = [("standard", 1e-3, 64, seed, 5.0) for seed in (0, 1)] + [("Full", 1e-3, 64, 0, 4.0)]
    comparison = stored(SMALL, tmp_path / "runs.json", [*runs, ("Full", 1e-3, 64, 1, math.nan)])
    assert "| Full | 0.001 | 2 | nan | +nan, diverged |" in result(comparison, RATES, 64)
    assert "| Full | +nan |" in lead_table(comparison.shown(64, RATES))


def test_a_difference_that_the_paper_reports_stands_beside_it(tmp_path):
    runs = [(label, 1e-3, 64, seed, 5.0 - seed) for label in ("standard", "Full") for seed in (0, 1)]
    experiment = replace(SMALL, published={"Full": -0.029})
    comparison = stored(experiment, tmp_path / "runs.json", runs)
    assert result(comparison, RATES, 64).splitlines() == [
        "| model | rate | seeds | held-out loss | minus standard [95% interval] | in the paper |",
        "|---|---:|---:|---:|---:|---:|",
        "| standard | 0.001 | 2 | 4.5000 |  |  |",
        "| Full | 0.001 | 2 | 4.5000 | +0.0000 [+0.0000, +0.0000], tie | -0.029 |",
    ]
    assert experiment.setting() == SMALL.setting()


def test_parameters_stand_beside_the_memory_of_a_step(tmp_path):
    runs = [(label, 1e-3, 64, 0, 5.0) for label in ("standard", "Full")]
    comparison = stored(SMALL, tmp_path / "runs.json", runs)
    head, _, first, second = result_table(comparison.shown(64, RATES), {}, {"standard": 1.0}).splitlines()
    assert head.endswith("| memory of a step | parameters |")
    assert first.endswith("| 1.00 | 41,248 |")
    assert second.endswith(
        f"|  | {41_248 + (8 + 1) * (32 + 32):,} |"
    )  # a query and a norm for each sublayer and the output


def test_at_equal_time_a_slower_connection_has_fewer_tokens(tmp_path):
    """Losses on a line in log tokens, 0.5 for each doubling: a step that takes twice as long costs one doubling."""
    runs = [("Full", 1e-3, tokens, 0, 9 - 0.5 * math.log2(tokens)) for tokens in (16, 64, 128)]
    runs += [("Full", 2e-3, 100, 0, 0.0), ("standard", 1e-3, 100, 0, 0.0), ("Full", 1e-3, 256, 0, 0.0)]  # not meant
    runs += [("standard", 2e-3, tokens, 0, 6.0) for tokens in (16, 128)] + [("standard", 1e-3, 128, 0, 6.0)]
    comparison = stored(SMALL, tmp_path / "runs.json", runs)
    shown, short = (comparison.shown(tokens, {"standard": 2e-3, "Full": 1e-3}) for tokens in (128, 16))
    assert at_equal_time(shown, "Full", "eager", 2.0).mean == pytest.approx(-0.5 + 0.5)
    assert at_equal_time(shown, "Full", "compiled", 0.5).mean == pytest.approx(-0.5 - 0.5)
    assert at_equal_time(short, "Full", "eager", 2.0) is None and at_equal_time(shown, "Full", "eager", None) is None
    costs = {"eager": {"standard": 1.0, "Full": 2.0}, "compiled": {"standard": 1.0, "Full": 0.5}}
    table = result(comparison, RATES, 128, costs)
    head = table.splitlines()[0]
    assert "| time of a step, not compiled (k: with kernels) | at equal time, not compiled |" in head
    assert head.endswith("| time of a step, compiled | at equal time, compiled |")
    assert table.splitlines()[2:] == [
        "| standard | 0.001 | 1 | 6.0000 |  | 1.00 |  | 1.00 |  |",
        "| Full | 0.001 | 1 | 5.5000 | -0.5000, one seed | 2.00 k | +0.00, one seed | 0.50 | -1.00, one seed |",
    ]
    assert result(comparison, {"standard": 1e-3}, 128, {"eager": {"Full": 2.0}}).endswith("| 6.0000 |  |  |  |")


def test_the_slope_comes_from_its_seeds_or_from_the_standard_model_or_from_the_sweep(tmp_path):
    """Losses differ by 1 at equal tokens. A step that takes twice as long adds the slope between two lengths."""
    rates = {"standard": 2e-3, "Full": 1e-3}
    runs = [("Full", 1e-3, 128, seed, 5.0 + seed) for seed in (0, 1)] + [("Full", 1e-3, 32, SELECTION_SEED, 7.5)]
    comparison = stored(SMALL, tmp_path / "runs.json", [*runs, ("standard", 2e-3, 128, 0, 6.0)])

    def penalty() -> float:
        return at_equal_time(comparison.shown(128, rates), "Full", "eager", 2.0).mean + 1

    assert penalty() == pytest.approx((7.5 - 5.5) / 2)
    more = stored(SMALL, tmp_path / "more.json", [("standard", 2e-3, 64, 0, 6.3), ("Full", 1e-3, 64, 1, 6.2)])
    of_standard, of_full = more.store.runs
    add(comparison.store, of_standard)
    assert penalty() == pytest.approx(0.3)
    add(comparison.store, of_full)
    assert penalty() == pytest.approx(0.2)
    swept = [("Full", 2e-3, 128, 0, 5.0), ("standard", 2e-3, 128, 0, 6.0), ("standard", 2e-3, 32, SELECTION_SEED, 7.0)]
    comparison, rates = stored(SMALL, tmp_path / "alone.json", swept), dict.fromkeys(rates, 2e-3)
    assert penalty() == pytest.approx((7.0 - 6.0) / 2)


def test_the_lead_is_a_mean_over_the_seeds_that_both_have(tmp_path):
    comparison = stored(SMALL, tmp_path / "runs.json", [])
    for label, seed, behind in (("standard", 0, 0.0), ("standard", 1, 0.0), ("Full", 1, 0.25), ("Full", 2, 9.0)):
        recipe = {"connection": SMALL.connections[label], "rate": 1e-3, "tokens": 64}
        curve = [[step, 10.0 / step + seed + behind / step] for step in range(1, 51)]
        add(comparison.store, {"recipe": recipe, "seed": seed, "after": seed + behind, "curve": curve})
    shown = comparison.shown(64, RATES)
    assert lead_table(shown).splitlines() == [
        "| step | 5 | 10 | 15 | 20 | 25 | 30 | 40 | 50 |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
        "| Full | +0.050 | +0.025 | +0.017 | +0.012 | +0.010 | +0.008 | +0.006 | +0.005 |",
    ]
    assert shown.differences("Full") == [0.25]


def test_tables_show_the_declared_rate_or_the_best_of_the_sweep(tmp_path):
    """A connection that shares no seed with the baseline is left out, and one whose rate is not known."""
    runs = [("standard", 1e-3, 64, 0, 5.0), ("standard", 2e-3, 64, 0, 4.0)]
    runs += [(label, rate, 128, SELECTION_SEED, rate) for label in ("standard", "Block, S=2") for rate in (1e-3, 2e-3)]
    runs += [("Full", 1e-3, 64, 0, 5.0), ("Block, S=2", 1e-3, 64, 1, 5.0)]
    comparison = stored(SMALL, tmp_path / "runs.json", runs)
    assert comparison.shown(64).rates == {"standard": 1e-3}
    assert "| standard | 0.0010 | 0.0020 |" in rate_table(comparison)
    declared = DeclaredComparison(replace(SMALL, rate=2e-3), comparison.store)
    assert declared.shown(64).rates == {"standard": 2e-3}
    tables = {"runs: result", "runs: verdicts", "runs: lead", "runs: rates"}
    assert set(scratch_tables(declared.shown(64), {})) == tables
    alone = stored(replace(SMALL, rate=1e-3), tmp_path / "alone.json", runs[:2])
    assert set(scratch_tables(alone.shown(64), {})) == {"alone: result", "alone: verdicts", "alone: lead"}


def test_a_row_has_the_seeds_that_it_shares_with_the_baseline(tmp_path):
    runs = [("standard", 1e-3, 64, seed, 5.0) for seed in (0, 1)]
    runs += [("Full", 1e-3, 64, seed, loss) for seed, loss in ((0, 4.9), (1, 4.7), (3, 1.0))]
    comparison = stored(SMALL, tmp_path / "runs.json", runs)
    assert "| Full | 0.001 | 2 | 4.8000 | -0.2000 [-1.4706, +1.0706], tie |" in result(comparison, RATES, 64)
    assert lead_table(comparison.shown(64, {"standard": 1e-3})) == "No other connection has runs."


def test_a_connection_without_kernels_is_compared_at_equal_time_where_both_are_compiled(tmp_path):
    connections = SMALL.connections | {"Identity HC": {"residual_connection": "identity_hc"}}
    connections["Static"] = {"attn_res_block_size": 1, "attn_res_query": "none"}
    experiment = replace(SMALL, connections=connections)
    assert [experiment.has_kernels(label) for label in ("Full", "Static", "Identity HC")] == [True, False, False]
    runs = [(label, 1e-3, tokens, 0, 5.0) for label in connections for tokens in (64, 128)]
    comparison = stored(experiment, tmp_path / "runs.json", runs)
    costs = {"eager": dict.fromkeys(connections, 1.8), "compiled": dict.fromkeys(connections, 1.2)}
    rows = result(comparison, dict.fromkeys(connections, 1e-3), 128, costs).splitlines()
    equal = "+0.00, one seed"
    assert any(row.endswith(f"| 1.80 k | {equal} | 1.20 | {equal} |") for row in rows if row.startswith("| Full"))
    for label in ("Static", "Identity HC"):
        (row,) = [row for row in rows if row.startswith(f"| {label} ")]
        assert row.endswith(f"| 1.80 | not compared | 1.20 | {equal} |")


def test_other_pairs_and_other_rates_have_intervals_too(tmp_path):
    pairs = [["Full", "Block, S=2"], ["Full", "standard"]]
    rate_pairs = [{"standard": 2e-3, "Full": 1e-3}, {"standard": 9.0, "Full": 9.0}]
    experiment = replace(SMALL, pairs=pairs, rate_pairs=rate_pairs)
    losses = {"standard": (5.0, 6.0, 7.0), "Full": (4.9, 5.7, 6.8), "Block, S=2": (4.8, 5.7)}
    runs = [(label, 1e-3, 64, seed, loss) for label in losses for seed, loss in enumerate(losses[label])]
    comparison = stored(experiment, tmp_path / "runs.json", [*runs, ("standard", 2e-3, 64, 1, 5.0)])
    shown = comparison.shown(64, dict.fromkeys(losses, 1e-3))
    assert pair_table(shown).splitlines()[2:] == [
        "| Full | Block, S=2 | 2 | +0.0500 [-0.5853, +0.6853], tie |",
        "| Full | standard | 3 | -0.2000 [-0.4484, +0.0484], tie |",
    ]
    assert rate_pair_table(shown).splitlines()[2:] == ["| 0.002 | 0.001 | 1 | +0.7000, one seed |"]
    assert verdicts(shown).endswith("Lower: none. Tie: *Full*; *Block, S=2*. Higher: none.")
    assert pair_table(stored(SMALL, tmp_path / "none.json", runs).shown(64)) == ""
