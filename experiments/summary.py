"""Block AttnRes against the residual stream in every experiment from scratch, beside what others report.

    y = loss of Block AttnRes minus that of the standard model,   x = tokens seen per parameter

Leads that were measured here come from the stored runs, leads that others report from `published.yaml`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from attnres.configuration import count_parameters
from attnres.utils.drawing import SMALL, Drawing, column, finish, styled
from attnres.utils.yaml_files import read_yaml

from .costs import TITLES, WAYS, costs_of
from .scratch import DeclaredComparison
from .tables import at_equal_time, deviation_of, markdown, spread

APART = 1.15  # the least ratio between places on the axis, so that bars and their numbers can be told from each other
PUBLISHED = Path(__file__).with_name("published.yaml")


@dataclass(frozen=True)
class Lead:
    """One comparison of Block AttnRes with the residual stream.

    Attributes:
        source: The name of the comparison, with a link.
        sublayers: Sublayers of the model.
        width: The hidden size of the model.
        parameters: Activated parameters, without the embedding and the output projection. For experiments of others, as
            those authors count them.
        tokens: Tokens that a run has seen.
        values: Loss minus that of the residual stream, of each seed; of others one number, their mean.
        deviation: The standard deviation over the seeds, if there are several.
        seeds: The number of seeds; `None` if it is not reported.
        equal_time: `eager` or `compiled` -> the difference at equal time instead of equal tokens.
    """

    source: str
    sublayers: int
    width: int
    parameters: float
    tokens: float
    values: Sequence[float]
    deviation: float | None = None
    seeds: int | None = None
    equal_time: Mapping[str, float] = field(default_factory=dict)


def lead_of(comparison: DeclaredComparison) -> Lead | None:
    """Return the lead of the first Block AttnRes without further switches; `None` if it has no runs."""
    experiment, shown = comparison.experiment, comparison.shown()
    label = next((label for label in shown.rates if _is_block(experiment.connections[label])), None)
    if label is None:
        return None
    config = experiment.config(experiment.connections[label])
    values = shown.differences(label)
    times = {way: at_equal_time(shown, label, ratios.get(label)) for way, ratios in costs_of(comparison).items()}
    return Lead(
        f"[{experiment.name}](results/{comparison.store.path.name}), {label}",
        2 * config.num_hidden_layers,
        config.hidden_size,
        count_parameters(config).activated_non_embedding,
        experiment.tokens,
        values,
        deviation_of(values),
        len(values),
        {way: value for way, value in times.items() if value is not None},
    )


def _is_block(connection: Mapping[str, Any]) -> bool:
    others = connection.keys() - {"attn_res_block_size", "residual_connection"}
    return connection.get("attn_res_block_size", 1) > 1 and not others


def leads_of(comparisons: Iterable[DeclaredComparison]) -> list[Lead]:
    """Return the leads of comparisons that have runs, the longest runs first."""
    leads = [lead for comparison in comparisons if (lead := lead_of(comparison))]
    return sorted(leads, key=lambda lead: (-lead.tokens, lead.source))


def published() -> list[Lead]:
    """Return what others report, in the order of `published.yaml`."""
    rows = [(source, row) for source, rows in read_yaml(PUBLISHED).items() for row in rows]
    return [Lead(source=source, values=[row.pop("lead")], **row) for source, row in rows]


def table(leads: Sequence[Lead], first: int) -> str:
    """Tabulate leads, a row for each.

    Args:
        leads: The rows.
        first: The number of the first row; the figure has the same numbers.
    """
    ways = WAYS if any(lead.equal_time for lead in leads) else ()
    head = ["", "from", "sublayers", "d", "parameters", "tokens", "seeds", "Block minus standard"]
    rows = [head + [f"at equal time, {TITLES[way]}" for way in ways]]
    for number, lead in enumerate(leads, first):
        if len(lead.values) > 1:
            difference = spread(lead.values, "+")
        else:
            difference = f"{lead.values[0]:+.3f}" + (f" ± {lead.deviation:.3f}" if lead.deviation else "")
        cells = [str(number), lead.source, str(lead.sublayers), f"{lead.width:,}"]
        cells += [_short(lead.parameters), _short(lead.tokens), str(lead.seeds or ""), difference]
        rows.append(cells + [f"{lead.equal_time[way]:+z.2f}" if way in lead.equal_time else "" for way in ways])
    return markdown(rows, texts=2)


def _short(count: float) -> str:
    """Format a count such as 2.7M or 119B."""
    unit, letter = next(((u, name) for u, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if count >= u), (1.0, ""))
    return f"{count / unit:.3g}{letter}"


def plot(here: Sequence[Lead], others: Sequence[Lead], path: Path) -> None:
    """Draw each lead against the tokens seen per parameter, with the number of its row.

    Args:
        here: Leads that were measured here, the first rows.
        others: Leads that others report.
        path: The picture.
    """
    finish(_draw(here, others), path)


@styled
def _draw(here: Sequence[Lead], others: Sequence[Lead]) -> Drawing:
    """Return the figure of `plot`."""
    figure = column(2.9)
    axes = figure.subplots()
    numbered = list(enumerate([*here, *others], 1))
    measured, reported = numbered[: len(here)], numbered[len(here) :]
    paper = [row for row in reported if row[1].source.startswith("paper")]
    for label, group, color, marker in (
        ("here: mean ± deviation over seeds", measured, "tab:blue", "o"),
        ("the paper (mixtures of experts)", paper, "tab:orange", "D"),
        ("others", [row for row in reported if row not in paper], "tab:gray", "s"),
    ):
        if not group:
            continue
        numbers, leads = zip(*group)
        places, means = [lead.tokens / lead.parameters for lead in leads], [mean(lead.values) for lead in leads]
        deviations = [lead.deviation or 0.0 for lead in leads]
        if group is paper:  # one number for all, since they lie beside each other
            numbers = [f"{numbers[0]} to {numbers[-1]}"]
        else:
            places = _apart(places)
        axes.errorbar(places, means, deviations, fmt=marker, color=color, capsize=2, markersize=4, label=label)
        # Leads of here have their numbers above their bars and the others below, so that they do not collide.
        for place, value, deviation, text in zip(places, means, deviations, numbers):
            end, offset = (value + deviation, 3) if group is measured else (value - deviation, -10)
            axes.annotate(text, (place, end), (0, offset), textcoords="offset points", ha="center", fontsize=SMALL)
    axes.axhline(0, color="gray", linewidth=0.8)
    axes.set_xscale("log")
    axes.margins(x=0.08, y=0.08)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("training tokens per parameter")
    axes.set_ylabel("loss, Block minus standard (nats/token)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower right")
    return figure


def _apart(places: Sequence[float]) -> list[float]:
    """Move places on a logarithmic axis to the right, so that each lies at least `APART` from the one before."""
    moved, before = list(places), 0.0
    for number in sorted(range(len(places)), key=places.__getitem__):
        before = moved[number] = max(places[number], before * APART)
    return moved
