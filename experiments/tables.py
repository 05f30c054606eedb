"""The tables of a comparison, from the stored runs."""

import math
from collections.abc import Mapping
from statistics import mean

from .harness import markdown, spread
from .scratch import Comparison
from .scratch_declared import BASELINE

SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)  # of the steps: where the training loss is shown


def report_table(
    comparison: Comparison,
    rates: Mapping[str, float],
    tokens: int,
    costs: Mapping[str, Mapping[str, float]] | None = None,
) -> str:
    """Held-out loss, mean and standard deviation over the seeds, and the difference from `standard` within seeds.

    Args:
        costs: a way to run (eager, compiled) -> label -> time of a training step, as a ratio to `standard`: for each
            way there are two more columns, it and the difference at equal time.

    Where the declaration names what the paper has, that stands in the last column.
    """
    published = comparison.experiment.published
    head = ["model", "rate", "seeds", "held-out loss", "minus standard"]
    for way in costs or ():
        head += [f"time of a step, {way}", "minus standard, at equal time"]
    head += ["in the paper"] if published else []
    rows = [head]
    for label, rate in rates.items():
        losses = [run["after"] for run, _ in comparison.pairs(label, rates, tokens)]
        differences = comparison.differences(label, rates, tokens)
        is_baseline = label == BASELINE
        cells = [label, f"{rate:g}", str(len(losses)), spread(losses), "" if is_baseline else spread(differences, "+")]
        for of_way in (costs or {}).values():
            cost = of_way.get(label)
            cells.append(f"{cost:.2f}" if cost else "")
            difference = None if is_baseline else at_equal_time(comparison, label, rates, tokens, cost)
            cells.append("" if difference is None else f"{difference:+z.2f}")
        if published:
            cells.append(f"{published[label]:+.3f}" if label in published else "")
        rows.append(cells)
    return markdown(rows)


def at_equal_time(
    comparison: Comparison, label: str, rates: Mapping[str, float], tokens: int, cost: float | None
) -> float | None:
    """The mean difference from `standard`, had both trained equally long by the clock; None: that is not known."""
    given_up = lost(comparison, label, rates, tokens, cost) if cost else None
    return None if given_up is None else mean(comparison.differences(label, rates, tokens)) + given_up


def lost(comparison: Comparison, label: str, rates: Mapping[str, float], tokens: int, cost: float) -> float | None:
    """What a connection's loss would be higher by, had it trained as long as `standard` by the clock.

        slope * ln(cost),   slope = (loss(short) - loss(tokens)) / ln(tokens / short)

    with the longest shorter run of a seed that is reported; without any, with those of `standard`, whose losses fall
    alike; or else with the sweep's run, on another text, or that of `standard`. The loss flattens with more tokens, and
    a chord is steeper than the curve at its end: this is too much rather than too little. None: there is no shorter
    run at that rate.
    """
    for name, is_sweep in ((label, False), (BASELINE, False), (label, True), (BASELINE, True)):
        slope = _slope(comparison, name, rates[name], tokens, is_sweep)
        if slope is not None:
            return slope * math.log(cost)
    return None


def _slope(comparison: Comparison, label: str, rate: float, tokens: int, is_sweep: bool) -> float | None:
    after = comparison.runs(label, rate, tokens)
    runs = comparison.by_length(label, rate, selecting=is_sweep)
    lengths = [length for length in runs if length < tokens and (is_sweep or runs[length].keys() & after.keys())]
    if not lengths:
        return None
    before = runs[max(lengths)]
    if not is_sweep:  # within seeds
        before, after = ({seed: of[seed] for seed in before.keys() & after.keys()} for of in (before, after))
    starts, ends = (mean(run["after"] for run in of.values()) for of in (before, after))
    return (starts - ends) / math.log(tokens / max(lengths))


def lead_table(comparison: Comparison, rates: Mapping[str, float], tokens: int) -> str:
    """Training loss minus that of `standard` at some steps, mean over the seeds that both have."""
    if set(rates) == {BASELINE}:
        return "No other connection has runs."
    rows = []
    for label in rates:
        if label == BASELINE:
            continue
        leads = comparison.leads(label, rates, tokens)
        steps = [step for step, _ in leads[0]]
        chosen = [max(0, round(share * len(steps)) - 1) for share in SHARES]
        rows = rows or [["step", *(f"{steps[place]:,}" for place in chosen)]]
        rows.append([label, *(f"{mean(points[place][1] for points in leads):+z.3f}" for place in chosen)])
    return markdown(rows)


def sweep_table(comparison: Comparison) -> str:
    """The loss on the selection text by rate, of the connections that have a sweep."""
    losses = {label: comparison.swept(label) for label in comparison.experiment.connections}
    rates = sorted({rate for of_label in losses.values() for rate in of_label})
    if not rates:
        return "The sweep was not made."
    rows = [["model", *(f"{rate:g}" for rate in rates)]]
    for label, found in losses.items():
        if found:
            rows.append([label, *(f"{found[rate]:.4f}" if rate in found else "" for rate in rates)])
    return markdown(rows)
