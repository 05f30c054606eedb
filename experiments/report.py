"""Pages and figures of the experiments, made from the stored runs without training.

`results/TABLES.md` shows every table. The other pages show the tables and figures that their text has a place for.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from attnres.analysis.loss_figures import plot_paired_runs
from attnres.analysis.tables import update_tables
from attnres.utils.files import atomic_write

from . import demo, evidence, first_screen, store, summary
from .costs import costs_of, memory_of
from .declared import BASELINE, FROM_SCRATCH, HealingExperiment, ScratchExperiment, names
from .scratch import DeclaredComparison
from .store import RunStore
from .tables import healing_tables, scratch_tables

# Pages with marks for tables, beside the page of all tables.
PAGES = (
    "README.md",
    "docs/results.md",
    "docs/tour.md",
    "docs/guides/connections.md",
    "experiments/RESULTS.md",
    "experiments/HEALING.md",
)


def pages() -> list[Path]:
    """Return the pages that show some of the tables."""
    return [store.ROOT / page for page in PAGES]


def tables_page() -> Path:
    """Return the page of all tables."""
    return store.results_file("any").with_name("TABLES.md")


def write(experiment: ScratchExperiment | HealingExperiment, path: Path, tables: dict[str, str]) -> None:
    """Write the pages that show an experiment, after some of its runs were made.

    Args:
        experiment: The declaration.
        path: The file of the runs. If it is not the one in the repository, the page beside it is written.
        tables: The tables of the runs by their names on a page.
    """
    if path == store.results_file(experiment.name):
        write_all()
    else:
        update_tables(path.with_suffix(".md"), tables)


def first_runs(comparisons: Iterable[DeclaredComparison]) -> list[DeclaredComparison]:
    """Leave out repetitions, and of experiments that share runs all but the one with the most seeds."""
    first: dict[str, DeclaredComparison] = {}
    for comparison in comparisons:
        if comparison.store.path.stem == comparison.experiment.name:
            name = comparison.experiment.runs_of or comparison.experiment.name
            first[name] = max(first.get(name, comparison), comparison, key=_seeds)
    return [*first.values()]


def _seeds(comparison: DeclaredComparison) -> int:
    """Return the largest number of seeds with which a connection of a comparison was run."""
    return max(map(len, comparison.shown().pairs.values()), default=0)


def write_all() -> None:
    """Write all pages and figures of the repository anew, and what `attnres list connections` tells of the runs."""
    comparisons, tables = stored_comparisons(), {}
    for comparison in comparisons:
        if (shown := comparison.shown()).rates:
            tables |= scratch_tables(shown, costs_of(comparison), memory_of(comparison))
    for experiment, runs in stored_healing():
        tables |= healing_tables(experiment, runs)
    head, *_ = tables_page().read_text(encoding="utf-8").split("\n## ")
    atomic_write(tables_page(), "\n".join([head, *(f"## {name}\n\n{table}\n" for name, table in tables.items())]))
    here, others = summary.leads_of(first_runs(comparisons)), summary.published()
    tables |= {"summary: here": summary.table(here), "summary: others": summary.table(others)}
    found = evidence.of(comparisons)
    tables |= {"summary: verdicts": summary.verdicts(here), "evidence here": evidence.table(found)}
    tables |= {"first screen": first_screen.table(here, others), "demo": demo.table()}
    texts = {page: page.read_text(encoding="utf-8") for page in pages()}
    for page, text in texts.items():
        update_tables(page, {name: table for name, table in tables.items() if f"<!-- {name} -->" in text})
    for comparison in comparisons:
        figure, shown = comparison.store.path.with_suffix(".png"), comparison.shown()
        if any(f"results/{figure.name})" in text for text in texts.values()):
            # A figure has room for two models: the first connection, and the standard model as its rival.
            first = next(label for label in shown.rates if label != BASELINE)
            curves = ([run["curve"] for run in runs] for runs in zip(*shown.pairs[first]))
            plot_paired_runs(dict(zip((first.replace("Block", "Block AttnRes"), BASELINE), curves)), figure)
    summary.plot(here, others, store.results_file("summary").with_suffix(".png"))
    atomic_write(store.ROOT / evidence.FILE, f"{json.dumps(found, indent=2)}\n")
    print(f"Written from the stored runs: {', '.join(PAGES)}, {tables_page()}, their figures, and {evidence.FILE}.")


def stored_comparisons() -> list[DeclaredComparison]:
    """Return the comparisons from scratch whose runs are stored in the repository, repetitions included."""
    declared = [name for experiment in FROM_SCRATCH for name in names(experiment)]
    return [DeclaredComparison(*pair) for pair in _stored(ScratchExperiment.load, declared)]


def stored_healing() -> list[tuple[HealingExperiment, RunStore]]:
    """Return the experiments of healing with the runs that are stored in the repository, repetitions included."""
    return _stored(HealingExperiment.load, names("healing"))


def _stored(load: Callable[[str], Any], declared: Sequence[str]) -> list[tuple[Any, RunStore]]:
    """Return each declared experiment with its file, and with repetitions such as `depth-12-again.json`."""
    stored = []
    for path in sorted(store.results_file("any").parent.glob("*.json")):
        fitting = [name for name in declared if f"{path.stem}-".startswith(f"{name}-")]
        if fitting and not path.stem.endswith("-trial"):
            experiment = load(max(fitting, key=len))
            stored.append((experiment, RunStore(experiment, path)))
    return stored
