"""Tables and figures of comparisons: differences within seeds, equal time, and what the paper has beside them."""

import math
from dataclasses import replace

import pytest

from experiments import report
from experiments.figures import block_sizes, gains, plot, plot_beside_paper, plot_block_sizes, plot_gains, smoothed
from experiments.harness import SELECTION_SEED
from experiments.scratch import Comparison
from experiments.tables import lead_table, lost, report_table

from .stored_runs import SMALL, stored, words


def test_the_table_has_differences_within_seeds(tmp_path):
    losses = {"standard": (5.0, 6.0, 7.0), "Full": (4.9, 5.8, 7.3)}
    runs = [(label, 1e-3, 64, seed, loss) for label in losses for seed, loss in enumerate(losses[label])]
    comparison = stored(SMALL, tmp_path / "runs.json", runs[:-1])
    table = report_table(comparison, dict.fromkeys(losses, 1e-3), 64)
    assert "| standard | 0.001 | 3 | 6.0000 ± 1.0000 |  |" in table
    assert "| Full | 0.001 | 2 | 5.3500 ± 0.6364 | -0.1500 ± 0.0707 |" in table


def test_a_run_that_diverged_leaves_the_tables_and_figures_of_the_others(tmp_path):
    runs = [("standard", 1e-3, 64, seed, 5.0) for seed in (0, 1)] + [("Full", 1e-3, 64, 0, 4.0)]
    comparison = stored(SMALL, tmp_path / "runs.json", [*runs, ("Full", 1e-3, 64, 1, math.nan)])
    rates = dict.fromkeys(("standard", "Full"), 1e-3)
    assert "| Full | 0.001 | 2 | nan | +nan |" in report_table(comparison, rates, 64)
    plot(comparison, rates, 64, tmp_path / "figure.svg")
    plot_gains({24: [-0.1, math.nan], 48: [-0.1, -0.2]}, tmp_path / "gains.svg")
    assert {"24", "48"} <= words(tmp_path / "gains.svg")


def test_what_the_paper_has_stands_beside_it(tmp_path):
    runs = [(label, 1e-3, 64, seed, 5.0 - seed) for label in ("standard", "Full") for seed in (0, 1)]
    experiment = replace(SMALL, published={"Full": -0.029})
    comparison = stored(experiment, tmp_path / "runs.json", runs)
    rates = dict.fromkeys(("standard", "Full"), 1e-3)
    assert report_table(comparison, rates, 64).splitlines() == [
        "| model | rate | seeds | held-out loss | minus standard | in the paper |",
        "|---|---:|---:|---:|---:|---:|",
        "| standard | 0.001 | 2 | 4.5000 ± 0.7071 |  |  |",
        "| Full | 0.001 | 2 | 4.5000 ± 0.7071 | +0.0000 ± 0.0000 | -0.029 |",
    ]
    plot_beside_paper(comparison, rates, 64, tmp_path / "figure.svg")
    assert {"Full", "paper, 436M parameters"} <= words(tmp_path / "figure.svg")
    assert experiment.setting() == SMALL.setting(), "what is published is no part of a run"


def test_a_model_that_did_not_train_stands_at_the_edge_with_its_number(tmp_path):
    """The others would be drawn on one line."""
    runs = [("standard", 1e-3, 64, 0, 4.0), ("Full", 1e-3, 64, 0, 6.15)]
    comparison = stored(SMALL, tmp_path / "runs.json", runs)
    plot_beside_paper(comparison, dict.fromkeys(("standard", "Full"), 1e-3), 64, tmp_path / "figure.svg")
    drawn = words(tmp_path / "figure.svg")
    assert {"Full", "+2.15"} <= drawn and not {"1.0", "2.0"} & drawn


def test_at_equal_time_a_slower_connection_has_fewer_tokens(tmp_path):
    """Losses on a line in log tokens, 0.5 for each doubling: a step that takes twice as long costs one doubling."""
    runs = [("Full", 1e-3, tokens, 0, 9 - 0.5 * math.log2(tokens)) for tokens in (16, 64, 128)]
    runs += [("Full", 2e-3, 100, 0, 0.0), ("standard", 1e-3, 100, 0, 0.0), ("Full", 1e-3, 256, 0, 0.0)]  # not meant
    runs += [("standard", 1e-3, 128, 0, 6.0)]
    comparison, rates = stored(SMALL, tmp_path / "runs.json", runs), {"standard": 2e-3, "Full": 1e-3}
    assert lost(comparison, "Full", rates, 128, 2.0) == pytest.approx(0.5)
    assert lost(comparison, "Full", rates, 128, 0.5) == pytest.approx(-0.5)
    assert lost(comparison, "Full", rates, 16, 2.0) is None
    costs = {"eager": {"standard": 1.0, "Full": 2.0}, "compiled": {"standard": 1.0, "Full": 0.5}}
    table = report_table(comparison, {"standard": 1e-3, "Full": 1e-3}, 128, costs)
    at_equal_time = "minus standard, at equal time"
    heads = f"| minus standard | time of a step, eager | {at_equal_time} | time of a step, compiled | {at_equal_time} |"
    assert table.splitlines()[0].endswith(heads)
    assert table.splitlines()[2:] == [
        "| standard | 0.001 | 1 | 6.0000 |  | 1.00 |  | 1.00 |  |",
        "| Full | 0.001 | 1 | 5.5000 | -0.5000 | 2.00 | +0.00 | 0.50 | -1.00 |",
    ]
    assert report_table(comparison, {"standard": 1e-3}, 128, {"eager": {"Full": 2.0}}).endswith("| 6.0000 |  |  |  |")


def test_what_a_slower_step_costs_is_read_within_seeds_or_from_standard_or_from_the_sweep(tmp_path):
    runs = [("Full", 1e-3, 128, seed, 5.0 + seed) for seed in (0, 1)] + [("Full", 1e-3, 32, SELECTION_SEED, 7.5)]
    runs += [("standard", 2e-3, 128, 0, 6.0)]
    comparison, rates = stored(SMALL, tmp_path / "runs.json", runs), {"standard": 2e-3, "Full": 1e-3}
    assert lost(comparison, "Full", rates, 128, 2.0) == pytest.approx((7.5 - 5.5) / 2)
    more = stored(SMALL, tmp_path / "more.json", [("standard", 2e-3, 64, 0, 6.3), ("Full", 1e-3, 64, 1, 6.2)])
    of_standard, own = more.store.content["runs"]
    comparison.store.add(of_standard)
    assert lost(comparison, "Full", rates, 128, 2.0) == pytest.approx(0.3)
    comparison.store.add(own)
    assert lost(comparison, "Full", rates, 128, 2.0) == pytest.approx(0.2)
    swept = [("Full", 2e-3, 128, 0, 5.0), ("standard", 2e-3, 128, 0, 6.0), ("standard", 2e-3, 32, SELECTION_SEED, 7.0)]
    alone = stored(SMALL, tmp_path / "alone.json", swept)
    assert lost(alone, "Full", {"standard": 2e-3, "Full": 2e-3}, 128, 2.0) == pytest.approx((7.0 - 6.0) / 2)


def test_the_lead_is_of_the_seeds_that_both_have(tmp_path):
    comparison = stored(SMALL, tmp_path / "runs.json", [])
    for label, seed, behind in (("standard", 0, 0.0), ("standard", 1, 0.0), ("Full", 1, 0.25), ("Full", 2, 9.0)):
        recipe = {"connection": SMALL.connections[label], "rate": 1e-3, "tokens": 64}
        curve = [[step, 10.0 / step + seed + behind / step] for step in range(1, 51)]
        comparison.store.add({"recipe": recipe, "seed": seed, "after": seed + behind, "curve": curve})
    rates = comparison.reported(64)
    assert rates == {"standard": 1e-3, "Full": 1e-3}
    assert lead_table(comparison, rates, 64).splitlines() == [
        "| step | 5 | 10 | 15 | 20 | 25 | 30 | 40 | 50 |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
        "| Full | +0.050 | +0.025 | +0.017 | +0.012 | +0.010 | +0.008 | +0.006 | +0.005 |",
    ]
    assert comparison.differences("Full", rates, 64) == [0.25]
    plot(comparison, rates, 64, tmp_path / "curves.svg")
    assert {"standard (seeds: 2)", "Full (seeds: 2)", "(thin: a seed)"} <= words(tmp_path / "curves.svg")


def test_a_mean_of_points_stands_in_their_middle():
    assert smoothed([(10 * n, float(n)) for n in range(1, 9)]) == [(20, 2.0), (60, 6.0)]
    assert smoothed([(10, 1.0), (20, 2.0)]) == [(15, 1.5)]


def test_what_is_reported_has_the_rate_of_the_sweep(tmp_path):
    """Or of the last run where there was none; what shares no seed with the baseline is left out."""
    runs = [("standard", 1e-3, 64, 0, 5.0), ("standard", 2e-3, 64, 0, 4.0)]
    runs += [("standard", rate, 128, SELECTION_SEED, rate) for rate in (1e-3, 2e-3)]
    runs += [("Full", 1e-3, 64, 0, 5.0), ("Full", 4e-3, 64, 0, 4.0), ("Block, S=2", 1e-3, 64, 1, 5.0)]
    comparison = stored(SMALL, tmp_path / "runs.json", runs)
    assert comparison.reported(64) == {"standard": 1e-3, "Full": 4e-3}
    report.write(comparison, 64, tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert "<!-- tiny: result -->" in page and "| standard | 0.001 | 1 | 5.0000 |  |" in page
    assert "| Full | 0.004 | 1 | 4.0000 | -1.0000 |" in page
    assert "Block" not in page
    report.write(comparison, 64, tmp_path / "page.md", {"standard": 2e-3, "Full": 4e-3, "Block, S=2": 1e-3})
    page = (tmp_path / "page.md").read_text()
    assert "| standard | 0.002 | 1 | 4.0000 |  |" in page and "| Full | 0.004 | 1 | 4.0000 | +0.0000 |" in page
    assert "Block" not in page
    assert (tmp_path / "runs.png").exists()
    assert stored(SMALL, tmp_path / "none.json", runs[-1:]).reported(64) == {}
    one_rate = Comparison(replace(SMALL, rate=2e-3), comparison.store)
    assert one_rate.reported(64)["standard"] == 2e-3, "whatever the best of a sweep"
    assert "tiny: rates" in report.tables(one_rate, 64, one_rate.reported(64)), "there was a sweep"
    alone = Comparison(one_rate.experiment, stored(SMALL, tmp_path / "alone.json", runs[:2]).store)
    assert "tiny: rates" not in report.tables(alone, 64, alone.reported(64))


def test_a_row_is_of_the_seeds_that_it_shares_with_the_baseline(tmp_path):
    runs = [("standard", 1e-3, 64, seed, 5.0) for seed in (0, 1)]
    runs += [("Full", 1e-3, 64, seed, loss) for seed, loss in ((0, 4.9), (1, 4.7), (3, 1.0))]
    comparison = stored(SMALL, tmp_path / "runs.json", runs)
    table = report_table(comparison, dict.fromkeys(("standard", "Full"), 1e-3), 64)
    assert "| Full | 0.001 | 2 | 4.8000 ± 0.1414 | -0.2000 ± 0.1414 |" in table
    assert lead_table(comparison, {"standard": 1e-3}, 64) == "No other connection has runs."


def test_the_gain_stands_against_the_depth(tmp_path):
    comparisons = []
    for layers, losses in ((8, (4.8, 5.8)), (4, (4.9,)), (16, ())):
        experiment = replace(SMALL, model=SMALL.model | {"num_hidden_layers": layers}, tokens=64)
        label = list(experiment.connections)[1]
        runs = [("standard", 1e-3, 64, seed, 5.0 + seed) for seed in (0, 1)]
        runs += [(label, 1e-3, 64, seed, loss) for seed, loss in enumerate(losses)]
        comparisons.append(stored(experiment, tmp_path / f"{layers}.json", runs))
    found = gains(comparisons)
    assert list(found) == [8, 16]
    assert found[8] == pytest.approx([-0.1]) and found[16] == pytest.approx([-0.2, -0.2])
    plot_gains(found, tmp_path / "gains.svg")
    assert {"sublayers", "8", "16", "a seed"} <= words(tmp_path / "gains.svg")


def test_block_sizes_are_drawn_beside_the_papers(tmp_path):
    """In their order, whatever that of the declaration; connections that change more than the size are left out."""
    connections = {"standard": {"residual_connection": "standard"}}
    connections |= {f"S={size}": {"attn_res_block_size": size} for size in (4, 1, 2)}
    connections["S=4, two heads"] = {"attn_res_block_size": 4, "attn_res_heads": 2}
    runs = [(label, 1e-3, 64, 0, 5.0 - place) for place, label in enumerate(connections)]
    experiment = replace(SMALL, connections=connections, published={"S=1": -0.029})
    comparison = stored(experiment, tmp_path / "runs.json", runs)
    assert block_sizes(comparison, connections) == {1: "S=1", 2: "S=2", 4: "S=4"}
    report.write(comparison, 64, tmp_path / "page.md")
    assert (tmp_path / "runs-block-sizes.png").exists() and (tmp_path / "runs.png").exists()
    plot_block_sizes(comparison, dict.fromkeys(connections, 1e-3), 64, tmp_path / "sizes.svg")
    assert {"1", "2", "4", "sublayers in a block", "paper, 436M parameters"} <= words(tmp_path / "sizes.svg")
