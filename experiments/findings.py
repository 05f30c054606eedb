"""The table of `analysis/RESULTS.md`: the paper's findings in the stored inspections of `analysis/results`.

An inspection is the `inspection.json` of `attnres inspect`.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median_high
from typing import Any

from attnres.analysis.tables import update_tables

from .store import ROOT
from .tables import distance_of_means, markdown

INSPECTIONS, PAGE = ROOT / "analysis" / "results", ROOT / "analysis" / "RESULTS.md"
ROWS = (
    *("", "connection", "sublayers, width", "weight on the nearest source"),
    *("weight on the embedding, second half of the depth", "normalised entropy before"),
    *("distance from uniform, token by token", "magnitudes: stream", "gradients, first quarter over last"),
    "loss rises most (nats) with hidden",
)


def write() -> None:
    """Write the table of all inspections into the page: a column for each model and a row for each measure."""
    columns: list[Sequence[str]] = [ROWS]
    for path in sorted(INSPECTIONS.glob("*.json")):
        models = json.loads(path.read_text(encoding="utf-8"))["models"]
        for model in models:
            name = f"{path.stem}: {Path(model['model']['name']).name}" if len(models) > 1 else path.stem
            columns.append((name, *column(model)))
    update_tables(PAGE, {"findings": markdown(list(zip(*columns)), texts=len(columns))})
    print(f"Written from {len(columns) - 1} models: the table of {PAGE}.")


def column(model: dict[str, Any]) -> list[str]:
    """Return the cells of a model below its name.

    Args:
        model: The part of the model in an inspection.
    """
    facts, depth, sizes, effects = (model[key] for key in ("model", "depth", "magnitudes", "interventions"))
    attention = _attention(model["depth_attention"], depth) if model["depth_attention"] else ["no depth attention"] * 4

    stream, inputs, gradients = sizes["stream"], sizes["inputs"], sizes["gradients"][1:]
    quarter = max(1, len(gradients) // 4)
    evenness = mean(gradients[:quarter]) / mean(gradients[-quarter:])

    cost, source = max(zip(effects["hidden"], depth["sources"]))
    rises = [(rise, name) for rise, name in zip(effects["uniform"], depth["readers"]) if rise is not None]
    return [
        facts["connection"].partition(",")[0],
        f"{facts['sublayers']}, {facts['hidden_size']}",
        *attention,
        f"largest / median {max(stream) / median_high(stream):.1f}; "
        f"input of the output / embedding {inputs[-1] / inputs[0]:.1f}",
        f"{evenness:.1f}; largest / smallest {max(gradients) / min(gradients):.0f}",
        f"{source} +{cost:.2f}" + (", uniform {1} +{0:.3f}".format(*max(rises)) if rises else ""),
    ]


def _attention(measured: dict[str, Any], depth: dict[str, Any]) -> list[str]:
    """Return the cells that need depth attention: nearest source, embedding, entropy, distance from uniform."""
    # Consumers are the sublayers and, as the last one, the output. One with a single source has no choice.
    rows = [[weight for weight in row if weight is not None] for row in measured["mean"]]
    choosing = [consumer for consumer, row in enumerate(rows) if len(row) > 1]
    nearest = sum(rows[consumer][-1] == max(rows[consumer]) for consumer in choosing)
    # Weights are also given as multiples of an even share.
    share = mean(rows[consumer][-1] * len(rows[consumer]) for consumer in choosing)

    last = len(rows) - 1
    later = [consumer for consumer in choosing if consumer > len(rows) // 2]
    on_embedding = mean(measured["embedding"][consumer] for consumer in later)
    even = mean(measured["embedding"][consumer] * len(rows[consumer]) for consumer in later)

    kinds = depth["kinds"]
    entropy = {
        kind: mean(measured["entropy"][c] for c in choosing if c < last and kinds[c % len(kinds)] == kind)
        for kind in kinds
    }
    distance = mean(measured["distance"][consumer] for consumer in choosing)
    return [
        f"{nearest} of {len(choosing)} give it most; {share:.2f} x even",
        f"{on_embedding:.2f}; {even:.2f} x even",
        ", ".join(f"{kind} {value:.2f}" for kind, value in entropy.items()),
        f"{distance:.2f}, of the mean map {distance_of_means(rows):.2f}",
    ]
