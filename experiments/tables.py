"""What is written of a comparison: the table of the result, that of the sweep, and the curves."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from attnres.analysis.loss_figures import plot_loss_curves

from .harness import spread
from .scratch import BASELINE, Comparison


def report_table(comparison: Comparison, rates: dict[str, float], tokens: int, seeds: Sequence[int]) -> str:
    """Held-out loss, mean and standard deviation over the seeds, and the difference from `standard` within seeds."""
    rows = ["| model | rate | seeds | held-out loss | minus standard |", "|---|---:|---:|---:|---:|"]
    for label, rate in rates.items():
        runs = [
            (comparison.find(label, rate, tokens, seed), comparison.find(BASELINE, rates[BASELINE], tokens, seed))
            for seed in seeds
        ]
        runs = [(run["after"], standard["after"]) for run, standard in runs if run and standard]
        if runs:
            difference = "" if label == BASELINE else spread([run - standard for run, standard in runs], sign="+")
            losses = spread([run for run, _ in runs])
            rows.append(f"| {label} | {rate:g} | {len(runs)} | {losses} | {difference} |")
    return "\n".join(rows)


def sweep_table(comparison: Comparison, labels: Sequence[str]) -> str:
    """The loss on the selection text by rate."""
    losses = {label: comparison.swept(label) for label in labels}
    rates = sorted({rate for of_label in losses.values() for rate in of_label})
    if not rates:
        return "The sweep was not made."
    rows = [f"| model | {' | '.join(f'{rate:g}' for rate in rates)} |", "|---|" + "---:|" * len(rates)]
    for label, found in losses.items():
        rows.append(f"| {label} | {' | '.join(f'{found[rate]:.4f}' if rate in found else '' for rate in rates)} |")
    return "\n".join(rows)


def plot(comparison: Comparison, rates: dict[str, float], tokens: int, seeds: Sequence[int], path: Path) -> bool:
    """Draw the training loss, mean over the seeds that all connections have; whether there are any."""
    runs = {label: [comparison.find(label, rate, tokens, seed) for seed in seeds] for label, rate in rates.items()}
    done = [i for i in range(len(seeds)) if all(found[i] for found in runs.values())]
    if not done or len(runs) < 2:
        return False
    curves = {
        label: [(points[0][0], mean(loss for _, loss in points)) for points in zip(*(found[i]["curve"] for i in done))]
        for label, found in runs.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    plot_loss_curves(curves, path, compare=(list(rates)[1], BASELINE))
    return True
