"""The tables of `healing.md`, from the stored runs."""

import math
from collections.abc import Sequence

from .harness import SELECTION_SEED, Store, distance_of_means, markdown, spread
from .healing_declared import Declaration


def tables(declaration: Declaration, store: Store, seeds: Sequence[int]) -> dict[str, str]:
    """All that have runs, by the names of their places."""
    found = {}
    if any(store.find(recipe, seed) for recipe in declaration.report.values() for seed in seeds):
        found["report"] = report_table(declaration, store, seeds)
        found["depth attention"] = depth_table(declaration, store, seeds)
    found |= {title: sweep_table(declaration, store, title) for title in declaration.sweeps}
    return {f"{declaration.size}: {name}": table for name, table in found.items()}


def report_table(declaration: Declaration, store: Store, seeds: Sequence[int]) -> str:
    """Held-out loss of the reported recipes, mean and standard deviation over the seeds, paired with `standard`."""
    rows = [["model", "trained", "tokens", "seeds", "held-out loss", "minus standard", "minus start"]]
    for label, recipe in declaration.report.items():
        baseline = declaration.baseline(recipe)
        runs = [(store.find(recipe, seed), store.find(baseline, seed)) for seed in seeds]
        runs = [(run, standard) for run, standard in runs if run and standard]
        if not runs:
            continue
        against_standard = [run["after"] - standard["after"] for run, standard in runs]
        against_start = [run["after"] - standard["before"] for run, standard in runs]
        cells = [
            label,
            recipe.trained,
            f"{runs[0][0]['tokens']:,}",
            str(len(runs)),
            spread([run["after"] for run, _ in runs]),
            "" if recipe == baseline else spread(against_standard, sign="+"),
            spread(against_start, sign="+"),
        ]
        rows.append(cells)
    return markdown(rows, texts=2)


def sweep_table(declaration: Declaration, store: Store, title: str) -> str:
    """The recipes of one sweep, each on the selection seed and text, against the best of the standard model."""
    rows = [[title, "loss at step 0", "loss", "minus best standard"]]
    tried = {recipe for sweep in declaration.sweeps.values() for recipe in sweep.values()}
    standard = [recipe for recipe in tried if recipe.is_standard and recipe.trained == "all"]
    for label, recipe in declaration.sweeps[title].items():
        rivals = (other for other in standard if other.steps == recipe.steps)
        found = [run["after"] for other in rivals if (run := store.find(other, SELECTION_SEED))]
        found = [loss for loss in found if math.isfinite(loss)]  # the others diverged
        if run := store.find(recipe, SELECTION_SEED):
            difference = f"{run['after'] - min(found):+z.4f}" if found else ""
            rows.append([label, f"{run['before']:.4f}", f"{run['after']:.4f}", difference])
    return markdown(rows)


def depth_table(declaration: Declaration, store: Store, seeds: Sequence[int]) -> str:
    """How far the depth attention moved from uniform: as seen by each token, and of the weights' mean over tokens."""
    rows = [["model", "distance from uniform, mean over tokens", "distance of the mean weights"]]
    for label, recipe in declaration.report.items():
        runs = [run for seed in seeds if (run := store.find(recipe, seed))]
        runs = [run for run in runs if math.isfinite(run.get("distance_from_uniform", math.nan))]
        if not runs:
            continue
        of_means = [distance_of_means(run["depth_attention"]) for run in runs]
        rows.append([label, spread([run["distance_from_uniform"] for run in runs]), spread(of_means)])
    return markdown(rows)
