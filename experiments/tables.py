"""Markdown tables of the stored runs, from scratch and of healing."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import mean
from types import MappingProxyType

import numpy as np

from attnres.analysis.tables import markdown as markdown_table
from attnres.configuration import count_parameters
from attnres.utils.intervals import TIE, Interval

from .costs import TITLES
from .declared import BASELINE, HEALING_SEEDS, SELECTION_SEED, HealingExperiment
from .scratch import DeclaredComparison, ShownRuns
from .store import RunStore

NOT_MEASURED: Mapping[str, float] = MappingProxyType({})
MINUS = "minus standard [95% interval]"
NOT_COMPARED = "not compared"  # a connection without kernels, by its eager time
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)  # the training loss is shown after these shares of the steps


def markdown(rows: Sequence[Sequence[str]], texts: int = 1) -> str:
    """Format a table.

    Args:
        rows: The cells, the head first.
        texts: How many of the first columns hold text. The others hold numbers.
    """
    return markdown_table(rows[0], rows[1:], texts=texts)


def distance_of_means(rows: Iterable[Sequence[float]]) -> float:
    """Return the mean of `1/2 sum_i |a_i - 1/n|` over the sublayers that read several sources.

    Args:
        rows: For each sublayer the weights of its n sources, means over tokens.
    """
    return mean(sum(abs(weight - 1 / len(row)) for weight in row) / 2 for row in rows if len(row) > 1)


# From scratch


def scratch_tables(
    shown: ShownRuns, costs: Mapping[str, Mapping[str, float]], memory: Mapping[str, float] = NOT_MEASURED
) -> dict[str, str]:
    """Return all tables of a comparison by their names on a page.

    Args:
        shown: The runs.
        costs: Way -> label -> time of a step as a ratio to the standard model.
        memory: Label -> peak memory of a step as a ratio to the standard model; may be empty.
    """
    tables = {"result": result_table(shown, costs, memory), "verdicts": verdicts(shown), "lead": lead_table(shown)}
    if rates := rate_table(shown.comparison):
        tables["rates"] = rates
    if pairs := pair_table(shown):
        tables["pairs"] = pairs
    if chosen := rate_pair_table(shown):
        tables["rate pairs"] = chosen
    return {f"{shown.comparison.store.path.stem}: {name}": table for name, table in tables.items()}


def result_table(
    shown: ShownRuns, costs: Mapping[str, Mapping[str, float]], memory: Mapping[str, float] = NOT_MEASURED
) -> str:
    """Tabulate held-out losses, and their differences from the standard model within seeds with their intervals.

    A connection without kernels is compared at equal time only where both models are compiled.

    Args:
        shown: The runs.
        costs: As in [`scratch_tables`]. Each way adds two columns: the ratio, and the difference at equal time.
        memory: As in [`scratch_tables`]. It adds two columns: the ratio, and the parameters without the embeddings.
    """
    experiment = shown.comparison.experiment
    published = experiment.published
    head = ["model", "rate", "seeds", "held-out loss", MINUS]
    for way in costs:
        mark = " (k: with kernels)" if way == "eager" else ""
        head += [f"time of a step, {TITLES[way]}{mark}", f"at equal time, {TITLES[way]}"]
    if memory:
        head += ["memory of a step", "parameters"]
    rows = [head + (["in the paper"] if published else [])]
    for label, rate in shown.rates.items():
        losses = [run["after"] for run, _ in shown.pairs[label]]
        is_baseline, has_kernels = label == BASELINE, experiment.has_kernels(label)
        difference = "" if is_baseline else Interval.of(shown.differences(label)).describe()
        cells = [label, f"{rate:g}", str(len(losses)), f"{mean(losses):.4f}", difference]
        for way, ratios in costs.items():
            cost = ratios.get(label)
            mark = " k" if way == "eager" and has_kernels else ""
            estimate = None if is_baseline else at_equal_time(shown, label, way, cost)
            without = cost and not is_baseline and way == "eager" and not has_kernels
            cells += [f"{cost:.2f}{mark}" if cost else "", estimate.describe(2) if estimate else ""]
            cells[-1] = NOT_COMPARED if without else cells[-1]
        if memory:
            parameters = count_parameters(experiment.config(experiment.connections[label])).non_embedding
            cells += [f"{memory[label]:.2f}" if label in memory else "", f"{parameters:,}"]
        if published:
            cells.append(f"{published[label]:+.3f}" if label in published else "")
        rows.append(cells)
    return markdown(rows)


def verdicts(shown: ShownRuns) -> str:
    """Name the connections that are lower than the standard model, tie with it, or are higher, by their intervals."""
    by_verdict: dict[str, list[str]] = {"lower": [], TIE: [], "higher": [], "one seed": [], "diverged": []}
    for label in shown.rates:
        if label != BASELINE:
            by_verdict[Interval.of(shown.differences(label)).verdict].append(f"*{label}*")
    always = by_verdict.keys() - {"one seed", "diverged"}
    named = {word: "; ".join(labels) for word, labels in by_verdict.items() if labels or word in always}
    return "Against standard, at equal tokens. " + " ".join(
        f"{word.capitalize()}: {labels or 'none'}." for word, labels in named.items()
    )


def at_equal_time(shown: ShownRuns, label: str, way: str, cost: float | None) -> Interval | None:
    """Estimate the difference from the standard model, had both trained equally long by the clock.

        difference + slope * ln(cost),   slope = (loss(short) - loss(tokens)) / ln(tokens / short)

    The shorter run is the longest one of a reported seed. If there is none, the slope is that of the standard model. If
    that has none either, the run of the sweep is the shorter one, though on another text. The loss flattens with more
    tokens, and a chord is steeper than the curve at its end: the estimate is too high rather than too low.

    Args:
        shown: The runs.
        label: The label of the connection.
        way: `eager` or `compiled`.
        cost: The time of a step as a ratio to the standard model; `None` if it was not measured.

    Returns:
        The difference (nats/token), with the interval over seeds as it is at equal tokens: the errors of the slope and
        of the cost are not in it. `None` if there is no cost, or no shorter run at that rate, or if the connection has
        no kernels and is not compiled: its time would be that of PyTorch's calls rather than its own.
    """
    if not cost or (way == "eager" and not shown.comparison.experiment.has_kernels(label)):
        return None
    for name, is_sweep in ((label, False), (BASELINE, False), (label, True), (BASELINE, True)):
        slope = _slope(shown, name, is_sweep)
        if slope is not None:
            return Interval.of(shown.differences(label)).shifted(slope * math.log(cost))
    return None


def _slope(shown: ShownRuns, label: str, is_sweep: bool) -> float | None:
    rate, tokens, comparison = shown.rates[label], shown.tokens, shown.comparison
    ends = {run["seed"]: run["after"] for run in comparison.runs(label, rate, tokens)}
    starts: dict[int, dict[int, float]] = {}  # tokens -> seed -> loss
    for run in comparison.runs(label, rate, selecting=is_sweep):
        if run["recipe"]["tokens"] < tokens and (is_sweep or run["seed"] in ends):
            starts.setdefault(run["recipe"]["tokens"], {})[run["seed"]] = run["after"]
    if not starts:
        return None
    short = max(starts)
    if not is_sweep:  # within seeds
        ends = {seed: ends[seed] for seed in starts[short]}
    return (mean(starts[short].values()) - mean(ends.values())) / math.log(tokens / short)


def lead_table(shown: ShownRuns) -> str:
    """Tabulate the training loss minus that of the standard model at some steps, as a mean over seeds."""
    rows = []
    for label in shown.rates:
        if label == BASELINE:
            continue
        # [seeds, points, (step, loss)]
        curves, standard = (np.array([run["curve"] for run in runs]) for runs in zip(*shown.pairs[label]))
        places = [max(0, round(share * len(curves[0])) - 1) for share in SHARES]
        leads = (curves - standard)[:, places, 1].mean(axis=0)
        rows = rows or [["step", *(f"{step:,.0f}" for step in curves[0, places, 0])]]
        rows.append([label, *(f"{lead:+z.3f}" for lead in leads)])
    return markdown(rows) if rows else "No other connection has runs."


def pair_table(shown: ShownRuns) -> str:
    """Tabulate the declared pairs of connections, within seeds; an empty string if none is declared or has runs."""
    rows = [["first", "second", "seeds", "first minus second [95% interval]"]]
    for first, second in shown.comparison.experiment.pairs:
        losses = [{run["seed"]: run["after"] for run, _ in shown.pairs.get(label, [])} for label in (first, second)]
        if seeds := sorted(losses[0].keys() & losses[1]):
            interval = Interval.of([losses[0][seed] - losses[1][seed] for seed in seeds])
            rows.append([first, second, str(interval.count), interval.describe()])
    return markdown(rows, texts=2) if len(rows) > 1 else ""


def rate_pair_table(shown: ShownRuns) -> str:
    """Tabulate the difference from the standard model at the declared pairs of rates; as [`pair_table`]."""
    rows: list[list[str]] = []
    for rates in shown.comparison.experiment.rate_pairs:
        at_these = shown.comparison.shown(shown.tokens, rates)
        label = next(name for name in rates if name != BASELINE)
        rows = rows or [[f"rate of {BASELINE}", f"rate of {label}", "seeds", f"{label} {MINUS}"]]
        if label in at_these.rates:
            interval = Interval.of(at_these.differences(label))
            numbers = (f"{rates[name]:g}" for name in (BASELINE, label))
            rows.append([*numbers, str(interval.count), interval.describe()])
    return markdown(rows, texts=0) if len(rows) > 1 else ""


def rate_table(comparison: DeclaredComparison) -> str:
    """Tabulate the loss on the selection text by learning rate. Return an empty string if there was no sweep."""
    losses = {label: swept for label in comparison.experiment.connections if (swept := comparison.swept(label))}
    rates = sorted({rate for swept in losses.values() for rate in swept})
    rows = [["model", *(f"{rate:g}" for rate in rates)]]
    for label, swept in losses.items():
        rows.append([label, *(f"{swept[rate]:.4f}" if rate in swept else "" for rate in rates)])
    return markdown(rows) if losses else ""


# Healing


def healing_tables(experiment: HealingExperiment, store: RunStore) -> dict[str, str]:
    """Return all tables of an experiment of healing by their names on a page. A sweep without a run has none."""
    tables = {}
    if store.select(selecting=False):
        tables = {"report": _healed(experiment, store), "depth attention": _distances(experiment, store)}
    tables |= {title: _sweep(experiment, store, title) for title in experiment.sweeps}
    return {f"{store.path.stem}: {name}": table for name, table in tables.items() if table}


def _healed(experiment: HealingExperiment, store: RunStore) -> str:
    """Tabulate the held-out loss of the reported recipes, and its differences from the standard model within seeds."""
    rows = [["model", "trained", "tokens", "seeds", "held-out loss", MINUS, "minus start [95% interval]"]]
    for label, recipe in experiment.report.items():
        baseline = experiment.baseline(recipe)
        pairs = [[store.find(asdict(of), seed) for of in (recipe, baseline)] for seed in HEALING_SEEDS]
        pairs = [(run, standard) for run, standard in pairs if run and standard]
        if not pairs:
            continue
        differences = [run["after"] - standard["after"] for run, standard in pairs]
        gains = [run["after"] - standard["before"] for run, standard in pairs]
        cells = [label, recipe.trained, f"{pairs[0][0]['tokens']:,}", str(len(pairs))]
        difference = "" if recipe == baseline else Interval.of(differences).describe()
        losses = mean(run["after"] for run, _ in pairs)
        rows.append([*cells, f"{losses:.4f}", difference, Interval.of(gains).describe()])
    return markdown(rows, texts=2)


def _sweep(experiment: HealingExperiment, store: RunStore, title: str) -> str:
    """Tabulate the recipes of one sweep, against the best standard model of the same length.

    Return an empty string if none was run.
    """
    rows = [[title, "loss at step 0", "loss", "minus best standard"]]
    standard = [recipe for sweep in experiment.sweeps.values() for recipe in sweep.values() if recipe.is_baseline]
    for label, recipe in experiment.sweeps[title].items():
        if not (run := store.find(asdict(recipe), SELECTION_SEED)):
            continue
        rivals = [store.find(asdict(other), SELECTION_SEED) for other in standard if other.steps == recipe.steps]
        losses = [rival["after"] for rival in rivals if rival and math.isfinite(rival["after"])]
        difference = f"{run['after'] - min(losses):+z.4f}" if losses else ""
        rows.append([label, f"{run['before']:.4f}", f"{run['after']:.4f}", difference])
    return markdown(rows) if len(rows) > 1 else ""


def _distances(experiment: HealingExperiment, store: RunStore) -> str:
    """Tabulate how far the depth attention moved from uniform: for single tokens, and for its mean over tokens."""
    rows = [["model", "distance from uniform, mean over tokens", "distance of the mean weights"]]
    for label, recipe in experiment.report.items():
        runs = [run for seed in HEALING_SEEDS if (run := store.find(asdict(recipe), seed))]
        # The standard model has no distance, and a run that diverged has none that is a number.
        runs = [run for run in runs if math.isfinite(run.get("distance_from_uniform", math.nan))]
        if runs:
            distances = mean(run["distance_from_uniform"] for run in runs)
            of_means = mean(distance_of_means(run["depth_attention"]) for run in runs)
            rows.append([label, f"{distances:.4f}", f"{of_means:.4f}"])
    return markdown(rows)
