"""Block AttnRes against the residual stream in every experiment from scratch, beside what others report.

Leads that were measured here come from the stored runs, leads that others report from `published.yaml`. The figure has
a line for each: the difference of the losses at equal tokens with its interval, and below it the one at equal time,
of compiled steps where those were timed.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from attnres.configuration import count_parameters
from attnres.utils.drawing import SMALL, Drawing, column, finish, styled
from attnres.utils.intervals import TIE, Interval
from attnres.utils.yaml_files import read_yaml

from .costs import TITLES, WAYS, costs_of, memory_of
from .declared import BASELINE
from .scratch import DeclaredComparison
from .tables import MINUS, at_equal_time, markdown

PUBLISHED = Path(__file__).with_name("published.yaml")
PAPER = "paper"
PARTS = {2: "half", 5: "a fifth of", 8: "an eighth of"}  # of a run, the length of a sweep
FALLING = 0.9  # a lead that ends below this share of what it was at 4/5 of the run still shrinks


@dataclass(frozen=True)
class Lead:
    """One comparison of Block AttnRes with the residual stream.

    Attributes:
        source: The name of the comparison, with a link.
        name: The name of the comparison in the figure, with its size.
        sublayers: Sublayers of the model.
        width: The hidden size of the model.
        parameters: Activated parameters, without the embedding and the output projection. For experiments of others, as
            those authors count them.
        tokens: Tokens that a run has seen.
        difference: Loss minus that of the residual stream, with its interval.
        seeds: The number of seeds; `None` if it is not reported.
        limits: How the learning rates were chosen, and whether the lead shrank to the end; empty for those of others.
        equal_time: `eager` or `compiled` -> the difference at equal time instead of equal tokens.
        costs: `eager` or `compiled` -> time of a training step as a ratio to the standard model.
        memory: Peak memory of a training step as a ratio to the standard model; `None` if it was not measured.
        device: The processors of the runs; empty if they were not stored.
        is_moe: Whether the model is a mixture of experts, of those that were measured here.
    """

    source: str
    name: str
    sublayers: int
    width: int
    parameters: float
    tokens: float
    difference: Interval
    seeds: int | None = None
    limits: str = ""
    equal_time: Mapping[str, Interval] = field(default_factory=dict)
    costs: Mapping[str, float] = field(default_factory=dict)
    memory: float | None = None
    device: str = ""
    is_moe: bool = False

    @property
    def is_paper(self) -> bool:
        """Return whether the paper reports this experiment."""
        return self.source.startswith(PAPER)

    @property
    def per_parameter(self) -> str:
        """The training tokens per parameter, such as `0.59` or `210`."""
        return f"{float(f'{self.tokens / self.parameters:.2g}'):g}"


def lead_of(comparison: DeclaredComparison) -> Lead | None:
    """Return the lead of the first Block AttnRes without further switches; `None` if it has no runs."""
    experiment, shown = comparison.experiment, comparison.shown()
    label = next((label for label in shown.rates if _is_block(experiment.connections[label])), None)
    if label is None:
        return None
    config = experiment.config(experiment.connections[label])
    costs = {way: ratios[label] for way, ratios in costs_of(comparison).items() if label in ratios}
    times = {way: at_equal_time(shown, label, way, cost) for way, cost in costs.items()}
    difference = Interval.of(shown.differences(label))
    parameters = count_parameters(config).activated_non_embedding
    return Lead(
        source=f"[{experiment.name}](results/{comparison.store.path.name}), {label}",
        name=f"{short(parameters)}, {experiment.title}",
        sublayers=2 * config.num_hidden_layers,
        width=config.hidden_size,
        parameters=parameters,
        tokens=experiment.tokens,
        difference=difference,
        seeds=difference.count,
        limits=limits(comparison, label),
        equal_time={way: value for way, value in times.items() if value is not None},
        costs=costs,
        memory=memory_of(comparison).get(label),
        device=" and ".join(sorted({_device(run) for pair in shown.pairs[label] for run in pair} - {""})),
        is_moe=getattr(config, "num_local_experts", 0) > 0,
    )


def _device(run: Mapping[str, Any]) -> str:
    """Return the name of the processor of a run as people say it; empty if it was not stored."""
    name = run.get("made_by", {}).get("device", "")
    return name.replace("(R)", "").removesuffix(" Processor")


def limits(comparison: DeclaredComparison, label: str) -> str:
    """Describe how the rates of a connection and of the standard model were chosen, and what else its lead rests on."""
    experiment = comparison.experiment
    parts = round(experiment.tokens / experiment.sweep_tokens)
    sweeps = f"sweeps of {PARTS.get(parts, f'1/{parts} of')} a run"
    if not experiment.rate:
        text = f"rates from {sweeps}"
    elif isinstance(experiment.rate, dict):
        text = "rates from whole runs"
        if experiment.rate_seed is not None:
            others = Interval.of(comparison.shown().differences(label, without=experiment.rate_seed))
            text += f" of seed {experiment.rate_seed}; the others give {others.describe(3)}"
        if swept := swept_difference(comparison, label):
            text += f"; rates from {sweeps} give {swept.describe(2)}"
    else:
        text = f"one rate, from {sweeps}"
    return text + ("; lead still shrinking" if _still_shrinks(comparison, label) else "")


def swept_difference(comparison: DeclaredComparison, label: str) -> Interval | None:
    """Return the difference of whole runs at the rates that the sweeps chose, whatever is declared.

    `None` if there is no sweep, or no whole run at its rates.
    """
    rates = {name: rate for name in (BASELINE, label) if (rate := comparison.best_rate(name))}
    shown = comparison.shown(rates=rates)
    return Interval.of(shown.differences(label)) if label in shown.rates else None


def _still_shrinks(comparison: DeclaredComparison, label: str) -> bool:
    """Return whether the lead in training loss, a mean over seeds, shrank clearly in the last fifth of the run."""
    # [seeds, points, (step, loss)]
    curves, standard = (np.array([run["curve"] for run in runs]) for runs in zip(*comparison.shown().pairs[label]))
    leads = (curves - standard)[:, :, 1].mean(axis=0)
    if len(leads) < 5:
        return False
    *_, before, last = np.array_split(leads, 5)
    return bool(before.mean() < 0 and last.mean() > FALLING * before.mean())


def _is_block(connection: Mapping[str, Any]) -> bool:
    others = connection.keys() - {"attn_res_block_size", "residual_connection"}
    return connection.get("attn_res_block_size", 1) > 1 and not others


def leads_of(comparisons: Iterable[DeclaredComparison]) -> list[Lead]:
    """Return the leads of comparisons that have runs, those with the most tokens per parameter first."""
    leads = [lead for comparison in comparisons if (lead := lead_of(comparison))]
    return sorted(leads, key=lambda lead: (-lead.tokens / lead.parameters, lead.source))


def published() -> list[Lead]:
    """Return what others report, in the order of `published.yaml`."""
    leads = []
    for source, rows in read_yaml(PUBLISHED).items():
        title = source.removeprefix("[").partition("]")[0].partition(",")[0]
        for row in rows:
            interval = Interval.of_deviation(row.pop("lead"), row.pop("deviation", None), row.get("seeds", 1))
            leads.append(Lead(source=source, name=f"{short(row['parameters'])}, {title}", difference=interval, **row))
    return leads


def table(leads: Sequence[Lead]) -> str:
    """Tabulate leads, a row for each."""
    is_here = any(lead.limits for lead in leads)
    head = ["from", "sublayers", "d", "parameters", "tokens", "per parameter", "seeds", f"Block {MINUS}"]
    if is_here:
        head += [f"at equal time, {TITLES[way]}" for way in WAYS] + ["limits"]
    rows = [head]
    for lead in leads:
        cells = [lead.source, str(lead.sublayers), f"{lead.width:,}", short(lead.parameters), short(lead.tokens)]
        cells += [lead.per_parameter, str(lead.seeds or "not reported"), _reported(lead)]
        if is_here:
            cells += [time.describe(2) if (time := lead.equal_time.get(way)) else "not measured" for way in WAYS]
            cells.append(lead.limits)
        rows.append(cells)
    return markdown(rows)


def verdicts(leads: Sequence[Lead]) -> str:
    """Tabulate in how many experiments Block AttnRes is lower, ties or is higher, at equal tokens and at equal time."""
    compared = {"at equal tokens": [lead.difference for lead in leads]}
    for way in WAYS:
        if times := [lead.equal_time[way] for lead in leads if way in lead.equal_time]:
            compared[f"at equal time, {TITLES[way]}"] = times
    words = ("lower", TIE, "higher")
    rows = [["Block AttnRes and the residual stream", "experiments", *words]]
    for title, differences in compared.items():
        count = Counter(difference.verdict for difference in differences)
        rows.append([title, str(len(differences)), *(str(count[word]) for word in words)])
    return markdown(rows)


def _reported(lead: Lead) -> str:
    """Format a difference. What others report has three digits, and mostly no deviation to make an interval from."""
    if lead.limits:
        return lead.difference.describe()
    return f"{lead.difference.mean:+.3f}" if lead.difference.bounds is None else lead.difference.describe(3)


def short(count: float) -> str:
    """Format a count such as 2.7M or 119B."""
    unit, letter = next(((u, name) for u, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if count >= u), (1.0, ""))
    return f"{count / unit:.3g}{letter}"


def plot(here: Sequence[Lead], others: Sequence[Lead], path: Path) -> None:
    """Draw each lead on a line of its own, beside the name of its model.

    Args:
        here: Leads that were measured here.
        others: Leads that others report.
        path: The picture.
    """
    finish(_draw(here, others), path)


@styled
def _draw(here: Sequence[Lead], others: Sequence[Lead]) -> Drawing:
    """Return the figure of `plot`."""
    groups = {
        "here, equal tokens": (list(here), "tab:blue", "o"),
        "the paper": ([lead for lead in others if lead.is_paper], "tab:orange", "D"),
        "others": ([lead for lead in others if not lead.is_paper], "tab:gray", "s"),
    }
    lines = [lead for leads, *_ in groups.values() for lead in leads]
    heights = {id(lead): -line for line, lead in enumerate(lines)}
    figure = column(1.8 + 0.17 * len(lines))
    axes = figure.subplots()
    axes.axvline(0, color="black", linewidth=0.8)
    for title, (leads, color, marker) in groups.items():
        if not leads:
            continue
        widths = [lead.difference.half_width or math.nan for lead in leads]  # no bar where there is no interval
        places = [(lead.difference.mean, heights[id(lead)]) for lead in leads]
        axes.errorbar(*zip(*places), xerr=widths, fmt=marker, color=color, capsize=2, markersize=4, label=title)
    # A compiled step is the fairer one. The eager one stands in where no other was measured.
    timed = [(lead, way) for lead in here if (way := next((way for way in WAYS[::-1] if way in lead.equal_time), ""))]
    for way, marker in zip(WAYS, "o^"):
        if of_way := [(lead.equal_time[way], heights[id(lead)] - 0.32) for lead, its_way in timed if its_way == way]:
            places = [(time.mean, height) for time, height in of_way]
            style = {"fmt": marker, "color": "tab:blue", "markerfacecolor": "white", "markersize": 4, "elinewidth": 0.6}
            widths = [time.half_width or math.nan for time, _ in of_way]
            axes.errorbar(*zip(*places), xerr=widths, **style, label=f"here, equal time, {TITLES[way]}")
    axes.set_yticks([*heights.values()], [f"{lead.name} ({lead.per_parameter})" for lead in lines])
    axes.set_ylim(-len(lines) + 0.3, 0.7)
    axes.grid(axis="x", alpha=0.3)
    figure.suptitle("Parameters, model (training tokens per parameter)", fontsize=SMALL + 1)
    meaning = "below 0 Block is better; bars: 95% intervals, if reported"
    figure.supxlabel(f"loss of Block AttnRes minus standard, nats/token\n{meaning}", fontsize=SMALL + 1)
    # Below the axes and its tick labels: no corner of the axes is free of points in every figure.
    axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(1, -0.05), ncols=2, fontsize=SMALL)
    return figure
