"""Writes all tables and figures of `experiments` anew from the stored runs; trains nothing."""

from collections.abc import Mapping
from pathlib import Path

from attnres.analysis.tables import update_tables

from . import healing, summary
from .costs import costs_of
from .figures import block_sizes, gains, plot, plot_beside_paper, plot_block_sizes, plot_gains
from .harness import TINY, Store, page_of, results_file
from .scratch import Comparison, check_run
from .scratch_declared import BASELINE, DECLARED, declared
from .tables import lead_table, report_table, sweep_table


def tables(comparison: Comparison, tokens: int, rates: Mapping[str, float]) -> dict[str, str]:
    """The tables of a comparison, by the names of their places on the page."""
    size = comparison.experiment.name.partition("-")[2]
    found = {"result": report_table(comparison, rates, tokens, costs_of(comparison))}
    found["lead"] = lead_table(comparison, rates, tokens)
    if comparison.experiment.rate is None or any(map(comparison.swept, comparison.experiment.connections)):
        found["rates"] = sweep_table(comparison)
    return {f"{size}: {name}": table for name, table in found.items()}


def write(comparison: Comparison, tokens: int, page: Path, rates: Mapping[str, float] | None = None) -> None:
    """Its tables into a page, and its figures beside the runs.

    Args:
        rates: of the connections that it shows; by default all that have runs, with the rates of the sweeps.
    """
    with comparison.store.held():  # of several processes that add to it the last one to write shows the runs of all
        comparison.store.read()
        _write(comparison, tokens, page, rates)


def _write(comparison: Comparison, tokens: int, page: Path, rates: Mapping[str, float] | None) -> None:
    reported = rates or comparison.reported(tokens)
    if BASELINE not in reported:
        return
    reported = {label: rate for label, rate in reported.items() if comparison.differences(label, reported, tokens)}
    if not reported:
        return
    update_tables(page, tables(comparison, tokens, reported))
    if len(reported) < 2:
        return
    figure = comparison.store.path.with_suffix(".png")
    if not comparison.experiment.published:
        plot(comparison, reported, tokens, figure)
        return
    plot_beside_paper(comparison, reported, tokens, figure)
    if len(block_sizes(comparison, reported)) > 1:
        plot_block_sizes(comparison, reported, tokens, figure.with_stem(f"{figure.stem}-block-sizes"))


def stored(name: str) -> Comparison | None:
    """The comparison of a declaration with its runs in the repository; None: it has none."""
    experiment, path = declared(name), results_file(name)
    return Comparison(experiment, Store(path, experiment.setting(), check_run)) if path.exists() else None


def write_gains() -> None:
    """The figure of `depth`, of as many depths as there are."""
    names = sorted(path.stem for path in DECLARED.glob("depth-*.yaml"))
    if found := gains([comparison for name in names if (comparison := stored(name))]):
        plot_gains(found, results_file("depth").with_suffix(".png"))


def write_all() -> None:
    names = sorted(path.stem for path in DECLARED.glob("*.yaml") if not path.stem.endswith(TINY))
    comparisons = [comparison for name in names if (comparison := stored(name))]
    for comparison in comparisons:
        name = comparison.experiment.name
        write(comparison, comparison.experiment.tokens, page_of(name.partition("-")[0]))
    write_gains()
    summary.write(comparisons)
    healing.write_all()
    pages = f"{page_of('RESULTS')} and of the pages beside it"
    print(
        f"Written from the stored runs of {len(comparisons)} comparisons and of healing: tables and figures of {pages}."
    )
