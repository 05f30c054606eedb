"""Hold the verdicts of `attnres list connections` to the stored runs, counted anew by scipy's paired t-test."""

import json
from collections import Counter
from pathlib import Path

from scipy import stats

from experiments import evidence, report
from experiments.declared import ScratchExperiment

from .stored_runs import SMALL, stored

ROOT = Path(__file__).parents[2]


def test_the_first_form_of_a_connection_counts_and_full_never_does(tmp_path):
    heads = {"Full": SMALL.connections["Full"], "Block, heads": {"attn_res_block_size": 2, "attn_res_heads": 2}}
    later = {"Block, S=4": {"attn_res_block_size": 4}, "HC": {"residual_connection": "identity_hc"}}
    connections = {"standard": SMALL.connections["standard"]} | heads
    connections |= {"Block, S=2": SMALL.connections["Block, S=2"]} | later
    experiment = ScratchExperiment(**vars(SMALL) | {"connections": connections, "rate": 1e-3})
    losses = {"standard": 5.0, "Full": 1.0, "Block, heads": 1.0, "Block, S=2": 4.9, "Block, S=4": 1.0, "HC": 5.5}
    runs = [(label, 1e-3, SMALL.tokens, seed, loss + 0.01 * seed) for label, loss in losses.items() for seed in (0, 1)]
    found = evidence.of([stored(experiment, tmp_path / "claim-tiny.json", runs)])
    assert found == {
        "attn_res": {"experiments": 1, "lower": 1, "tie": 0, "higher": 0},
        "identity_hc": {"experiments": 1, "lower": 0, "tie": 0, "higher": 1},
    }
    assert evidence.table(found).splitlines()[-1] == "| `identity_hc` | 1 | 0 | 0 | 1 | not compared there |"
    assert evidence.of([stored(experiment, tmp_path / "claim-tiny-again.json", runs)]) == {}, "a repetition"


def test_the_page_says_which_connections_differ_after_a_correction_for_their_number():
    (comparison,) = [c for c in report.stored_comparisons() if c.store.path.stem == evidence.COMPARED]
    values = {
        label: stats.ttest_rel(*([run["after"] for run in runs] for runs in zip(*pairs))).pvalue
        for label, pairs in comparison.shown().pairs.items()
        if label != "standard"
    }
    ordered = sorted(values, key=values.__getitem__)
    # Holm: the smallest value counts once for each comparison, the next one once less, until one is too large.
    is_small = [values[label] * (len(ordered) - place) < 0.05 for place, label in enumerate(ordered)]
    assert ordered[: is_small.index(False)] == ["Hyper-Connections"]
    page = " ".join((ROOT / "experiments" / "RESULTS.md").read_text().split())
    assert len(values) == 8 and "After Holm's correction for eight comparisons" in page
    assert ordered[1] == "DenseFormer" and "Hyper-Connections still do, and DenseFormer does not" in page


def test_the_file_counts_the_stored_runs_of_attention_residuals():
    verdicts = []
    for comparison in report.first_runs(report.stored_comparisons()):
        shown = comparison.shown()
        label = next(label for label in shown.rates if label.startswith("Block"))
        losses = [[run["after"] for run in runs] for runs in zip(*shown.pairs[label])]
        test = stats.ttest_rel(*losses)
        verdicts.append("tie" if test.pvalue >= 0.05 else "lower" if test.statistic < 0 else "higher")
    stored_counts = json.loads((ROOT / evidence.FILE).read_text())["attn_res"]
    counts = Counter(verdicts)
    assert stored_counts["experiments"] == len(verdicts)
    assert {word: stored_counts[word] for word in ("lower", "tie", "higher")} == {
        word: counts[word] for word in ("lower", "tie", "higher")
    }
