"""A small experiment, comparisons with made-up runs, and the words of a figure."""

import re
from dataclasses import replace
from pathlib import Path

from experiments.declared import Corpus, ScratchExperiment
from experiments.runs import PlannedRun
from experiments.scratch import DeclaredComparison
from experiments.store import RunStore

SMALL = replace(
    ScratchExperiment.load("claim-tiny"),
    text=Corpus("words", 300, 60_000),
    length=32,
    batch_size=2,
    held_out=4,
    tokens=256,
    sweep_tokens=128,
    rates=[1e-3, 2e-3],
)
CURVE = {"curve": [[1, 2.0]]}


def planned(connection: dict, rate: float, tokens: int, seed: int) -> PlannedRun:
    """Return a run of `SMALL`."""
    recipe = {"connection": connection, "rate": rate, "tokens": tokens}
    return PlannedRun("a run", recipe, seed, SMALL.steps(tokens))


def add(store: RunStore, *runs: dict) -> None:
    """Store runs."""
    with store.update():
        store.runs += runs


def stored(
    experiment: ScratchExperiment, path: Path, runs: list[tuple[str, float, int, int, float]]
) -> DeclaredComparison:
    """Return a comparison with runs of (label, rate, tokens, seed, loss)."""
    store = RunStore(experiment, path)
    for label, rate, tokens, seed, loss in runs:
        run = planned(experiment.connections[label], rate, tokens, seed)
        add(store, {"recipe": run.recipe, "seed": seed, "after": loss, "curve": [[1, loss]]})
    return DeclaredComparison(experiment, store)


def words(figure: Path) -> set[str]:
    """Return the texts of an SVG, which stand in it as comments beside their glyphs."""
    return {text.strip() for text in re.findall(r"<!-- (.*?) -->", figure.read_text())}
