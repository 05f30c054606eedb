"""Pages and figures of the experiments, made from the stored runs without training.

`results/TABLES.md` shows every table. `RESULTS.md` shows the tables and figures that its text has a place for.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from attnres.analysis.tables import update_tables
from attnres.utils.files import atomic_write

from . import store, summary
from .costs import costs_of
from .declared import TINY, HealingExperiment, ScratchExperiment, names, sizes_of_healing
from .figures import plot
from .scratch import DeclaredComparison
from .store import RunStore
from .tables import healing_tables, scratch_tables

HEAD = """# All tables

Every table that the stored runs give, under the name of its file. `python -m experiments report` makes this page.
[Results](../RESULTS.md) says what the tables mean, and [method](../README.md) how the runs were made.

- *result*, *report*: held-out loss (nats/token), mean ± standard deviation over seeds; differences are within a seed.
- *lead*: training loss minus that of the standard model at some steps, mean over seeds.
- *rates*, and tables of healing that name a rate: what was tried to choose settings, with one seed and on text that is
  not reported.
- *depth attention*: `1/2 sum_i |a_i - 1/n|`, the distance of its weights from uniform, where a retrofit starts.
"""


def results_page() -> Path:
    """Return the page that explains the results."""
    return store.FOLDER / "RESULTS.md"


def tables_page() -> Path:
    """Return the page of all tables."""
    return store.FOLDER / "results" / "TABLES.md"


def is_reported(name: str, path: Path) -> bool:
    """Return whether the pages of the repository show the runs of an experiment that are stored in `path`."""
    return path == store.results_file(name) and not name.endswith(f"-{TINY}")


def write(comparison: DeclaredComparison, tokens: int, rates: Mapping[str, float] | None = None) -> None:
    """Write the pages and figures that show a comparison, after some of its runs were made.

    Args:
        comparison: The runs.
        tokens: The length of the reported runs.
        rates: Label -> learning rate, of the connections that are shown; `None` for all that have runs.
    """
    path = comparison.store.path
    if is_reported(comparison.experiment.name, path):
        return write_all()
    comparison.store.read()  # the last of several processes to write shows the runs of all
    shown = comparison.shown(tokens, rates)
    if shown.rates:
        update_tables(path.with_suffix(".md"), scratch_tables(shown, costs_of(comparison)))
        plot(shown, path.with_suffix(".png"))


def write_healed(experiment: HealingExperiment, runs: RunStore) -> None:
    """Write the page that shows runs of healing."""
    if is_reported(experiment.name, runs.path):
        return write_all()
    update_tables(runs.path.with_suffix(".md"), healing_tables(experiment, runs))


def write_all() -> None:
    """Write all pages and figures of the repository anew."""
    comparisons = stored_comparisons()
    tables = {}
    for comparison in comparisons:
        tables |= scratch_tables(comparison.shown(), costs_of(comparison))
    for experiment, runs in stored_healing():
        tables |= healing_tables(experiment, runs)
    parts = [f"## {name}\n\n{table}\n" for name, table in tables.items()]
    atomic_write(tables_page(), "\n".join([HEAD, *parts]))
    # Repetitions have tables, but are no further experiments.
    first = [c for c in comparisons if c.store.path.stem == c.experiment.name]
    here, others = summary.leads_of(first), summary.published()
    tables |= {"summary: here": summary.table(here, 1), "summary: others": summary.table(others, 1 + len(here))}
    text = results_page().read_text(encoding="utf-8")
    update_tables(results_page(), {name: table for name, table in tables.items() if f"<!-- {name} -->" in text})
    for comparison in comparisons:
        figure = comparison.store.path.with_suffix(".png")
        if f"(results/{figure.name})" in text:
            plot(comparison.shown(), figure)
    summary.plot(here, others, store.results_file("summary").with_suffix(".png"))


def stored_comparisons() -> list[DeclaredComparison]:
    """Return the comparisons from scratch whose runs are stored in the repository, repetitions included."""
    experiments = ((ScratchExperiment.load(name), path) for name, path in _files(names()))
    return [DeclaredComparison(experiment, RunStore(experiment, path)) for experiment, path in experiments]


def stored_healing() -> list[tuple[HealingExperiment, RunStore]]:
    """Return the experiments of healing with the runs that are stored in the repository, repetitions included."""
    files = _files([f"healing-{size}" for size in sizes_of_healing()])
    experiments = ((HealingExperiment.load(name.removeprefix("healing-")), path) for name, path in files)
    return [(experiment, RunStore(experiment, path)) for experiment, path in experiments]


def _files(declared: Sequence[str]) -> list[tuple[str, Path]]:
    """Return each results file with its declaration: `depth-12.json`, and repetitions such as `depth-12-again.json`."""
    files = []
    for path in sorted(store.results_file("any").parent.glob("*.json")):
        fitting = [name for name in declared if f"{path.stem}-".startswith(f"{name}-")]
        if fitting and not {TINY, "trial"} & set(path.stem.split("-")):
            files.append((max(fitting, key=len), path))
    return files
