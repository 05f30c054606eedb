"""Block AttnRes against the residual stream in every experiment from scratch, beside what others report.

    y = loss of Block AttnRes minus that of the standard model,   x = tokens seen per parameter

The leads that were measured here come from the stored runs, those of others from `published.yaml`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from attnres.analysis.drawing import blank, finish
from attnres.configuration import count_parameters

from .costs import WAYS, costs_of
from .declared import read_declaration
from .scratch import DeclaredComparison
from .tables import at_equal_time, deviation_of, markdown, spread

APART = 1.1  # the least ratio between places on the axis, so that bars and their numbers can be told from each other
PUBLISHED = Path(__file__).with_name("published.yaml")


@dataclass(frozen=True)
class Lead:
    """One comparison of Block AttnRes with the residual stream.

    Attributes:
        source: its name, with a link to where it is from.
        sublayers: of the model.
        width: hidden size of the model.
        parameters: that a token uses, without the embeddings; of others, as they count them.
        tokens: that a run has seen.
        values: loss minus that of the residual stream, of each seed; of others one number, their mean.
        deviation: standard deviation over the seeds, if there are several.
        seeds: how many; None if they are not reported.
        equal_time: way to run -> the difference at equal time instead of equal tokens.
    """

    source: str
    sublayers: int
    width: int
    parameters: float
    tokens: float
    values: tuple[float, ...]
    deviation: float | None = None
    seeds: int | None = None
    equal_time: Mapping[str, float] | None = None

    @property
    def tokens_per_parameter(self) -> float:
        """Tokens seen per parameter."""
        return self.tokens / self.parameters

    @property
    def is_of_paper(self) -> bool:
        """Whether the paper reports it."""
        return self.source.startswith("paper")


def lead_of(comparison: DeclaredComparison) -> Lead | None:
    """Return the lead of the first Block AttnRes without further switches; None if it has no runs."""
    experiment = comparison.experiment
    shown = comparison.shown()
    label = next((label for label in shown.rates if _is_block(experiment.connections[label])), None)
    if label is None:
        return None
    config = experiment.config(experiment.connections[label])
    differences = shown.differences(label)
    equal_time = {
        way: value
        for way, ratios in costs_of(comparison).items()
        if (value := at_equal_time(shown, label, ratios.get(label))) is not None
    }
    return Lead(
        f"[{experiment.name}](results/{comparison.store.path.name}), {label}",
        2 * config.num_hidden_layers,
        config.hidden_size,
        count_parameters(config).activated_non_embedding,
        experiment.tokens,
        tuple(differences),
        deviation_of(differences),
        len(differences),
        equal_time,
    )


def _is_block(connection: Mapping[str, object]) -> bool:
    others = connection.keys() - {"attn_res_block_size", "residual_connection"}
    return connection.get("attn_res_block_size", 1) > 1 and not others


def published() -> list[Lead]:
    """Return what others report, in the order of `published.yaml`. Raises ValueError if the file is damaged."""
    sources = read_declaration(PUBLISHED)
    try:
        return [
            Lead(source=source, values=(row.pop("lead"),), **row) for source, rows in sources.items() for row in rows
        ]
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{PUBLISHED} lacks a field, or has another one ({error!r}): mend it.") from error


def leads_of(comparisons: Iterable[DeclaredComparison]) -> list[Lead]:
    """Return the leads of comparisons that have runs, the longest runs first."""
    leads = [lead for comparison in comparisons if (lead := lead_of(comparison))]
    return sorted(leads, key=lambda lead: (-lead.tokens, lead.source))


def table(leads: Sequence[Lead], first: int) -> str:
    """Tabulate leads, a row for each.

    Args:
        leads: the rows.
        first: the number of the first row; the figure has the same numbers.
    """
    rows = [["", "from", "sublayers", "d", "parameters", "tokens", "seeds", "Block minus standard"]]
    times = any(lead.equal_time for lead in leads)
    rows[0] += [f"at equal time, {way}" for way in WAYS] if times else []
    for number, lead in enumerate(leads, first):
        difference = spread(lead.values, "+") if len(lead.values) > 1 else f"{lead.values[0]:+.3f}"
        if lead.deviation is not None and len(lead.values) == 1:
            difference += f" ± {lead.deviation:.3f}"
        cells = [str(number), lead.source, str(lead.sublayers), f"{lead.width:,}"]
        cells += [_short(lead.parameters), _short(lead.tokens), str(lead.seeds or ""), difference]
        if times:
            known = lead.equal_time or {}
            cells += [f"{known[way]:+z.2f}" if way in known else "" for way in WAYS]
        rows.append(cells)
    return markdown(rows, texts=2)


def _short(count: float) -> str:
    """Format a count such as 2.7M or 119B."""
    unit, letter = next(((u, name) for u, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if count >= u), (1.0, ""))
    return f"{count / unit:.3g}{letter}"


def plot(here: Sequence[Lead], others: Sequence[Lead], path: Path) -> None:
    """Draw each lead against the tokens seen per parameter, with the number of its row.

    Args:
        here: leads that were measured here, the first rows.
        others: leads that others report.
        path: of the picture.
    """
    figure = blank(7, 4)
    axes = figure.subplots()
    numbered = list(enumerate([*here, *others], 1))
    for label, group, color, marker in (
        ("here: mean ± standard deviation over seeds", numbered[: len(here)], "tab:blue", "o"),
        ("the paper (mixtures of experts)", [row for row in numbered if row[1].is_of_paper], "tab:orange", "D"),
        ("others", [row for row in numbered[len(here) :] if not row[1].is_of_paper], "tab:gray", "s"),
    ):
        if not group:
            continue
        numbers, leads = zip(*group)
        places, means = [lead.tokens_per_parameter for lead in leads], [mean(lead.values) for lead in leads]
        deviations = [lead.deviation or 0.0 for lead in leads]
        if leads[0].is_of_paper:  # one number for all: they lie beside each other
            numbers = [f"{numbers[0]} to {numbers[-1]}"]
        else:
            places = _apart(places)
        axes.errorbar(places, means, deviations, fmt=marker, color=color, capsize=3, markersize=5, label=label)
        # Leads of here have their numbers above their bars, the others below: so they do not collide.
        is_here = group[0] in numbered[: len(here)]
        for place, value, deviation, text in zip(places, means, deviations, numbers):
            end, offset = (value + deviation, 3) if is_here else (value - deviation, -10)
            axes.annotate(str(text), (place, end), (0, offset), textcoords="offset points", ha="center", fontsize=7)
    axes.axhline(0, color="gray", linewidth=0.8)
    axes.set_xscale("log")
    axes.margins(x=0.08)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("training tokens per parameter")
    axes.set_ylabel("loss, Block minus standard (nats/token)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    finish(figure, path)


def _apart(places: Sequence[float]) -> list[float]:
    """Move places on a logarithmic axis to the right, so that each lies at least `APART` from the one before."""
    moved, before = list(places), 0.0
    for number in sorted(range(len(places)), key=places.__getitem__):
        before = moved[number] = max(places[number], before * APART)
    return moved
