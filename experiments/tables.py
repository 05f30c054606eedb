"""What is written of a comparison: the table of the result, that of the sweep, and a figure."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from attnres.analysis.drawing import blank, finish
from attnres.analysis.loss_figures import plot_loss_curves

from .harness import spread
from .scratch import BASELINE, Comparison


def report_table(comparison: Comparison, rates: dict[str, float], tokens: int, seeds: Sequence[int]) -> str:
    """Held-out loss, mean and standard deviation over the seeds, and the difference from `standard` within seeds.

    Where the declaration names what the paper has, that stands in a column beside it.
    """
    published = comparison.experiment.published
    rows = ["| model | rate | seeds | held-out loss | minus standard |", "|---|---:|---:|---:|---:|"]
    if published:
        rows = [f"{row}{cell}" for row, cell in zip(rows, (" in the paper |", "---:|"))]
    for label, rate in rates.items():
        runs = _pairs(comparison, label, rates, tokens, seeds)
        if runs:
            difference = "" if label == BASELINE else spread([run - standard for run, standard in runs], sign="+")
            cells = [label, f"{rate:g}", str(len(runs)), spread([run for run, _ in runs]), difference]
            if published:
                cells.append(f"{published[label]:+.3f}" if label in published else "")
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _pairs(
    comparison: Comparison, label: str, rates: dict[str, float], tokens: int, seeds: Sequence[int]
) -> list[tuple[float, float]]:
    """Held-out loss of a connection and of `standard`, for each seed that both have."""
    runs = [
        (comparison.find(label, rates[label], tokens, seed), comparison.find(BASELINE, rates[BASELINE], tokens, seed))
        for seed in seeds
    ]
    return [(run["after"], standard["after"]) for run, standard in runs if run and standard]


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


def plot_beside_paper(
    comparison: Comparison, rates: dict[str, float], tokens: int, seeds: Sequence[int], path: Path
) -> None:
    """Draw each connection's loss minus that of `standard`: each seed, their mean, and what the paper has."""
    published = comparison.experiment.published
    pairs = {label: _pairs(comparison, label, rates, tokens, seeds) for label in rates if label != BASELINE}
    found = {label: [run - standard for run, standard in of_label] for label, of_label in pairs.items() if of_label}
    if not found:
        return
    figure = blank(7, 1.2 + 0.28 * len(found))
    axes = figure.subplots()
    for row, (label, differences) in enumerate(found.items()):
        axes.plot(differences, [row] * len(differences), "|", color="tab:blue", markersize=9)
        axes.plot(mean(differences), row, "o", color="tab:blue", label=None if row else "here: mean, and each seed")
        if label in published:
            axes.plot(published[label], row, "D", color="tab:orange", fillstyle="none")
    axes.plot([], [], "D", color="tab:orange", fillstyle="none", label="paper, 436M parameters")
    axes.axvline(0, color="gray", linewidth=0.8)
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    axes.set_xlabel("loss minus that of the standard model (nats/token)")
    axes.grid(alpha=0.3, axis="x")
    axes.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    finish(figure, path)
