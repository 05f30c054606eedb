"""The numbers of an inspection as file contents: `inspection.json` with all numbers, and CSV tables.

The same inspection gives the same bytes: numbers have six digits, and there are no dates.
"""

import csv
import io
import json
import math
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from torch import Tensor

from .depth_attention import DepthAttention
from .inspection import LABELS, Inspection
from .mixing import DepthMixing

WRITTEN_BY = '"written_by": "attnres inspect"'  # marks the JSON file of every report
_PACKAGES = ("attnres", "torch", "transformers")
_DIGITS = 6
# Fields of `Magnitudes` -> columns of `sublayers.csv`.
_MAGNITUDES = {
    "inputs": "input",
    "outputs": "output",
    "stream": "stream",
    "gradients": "gradient",
    "largest": "largest_over_median",
}
# Fields of `DepthAttention` -> columns of `sublayers.csv`.
_WEIGHTS = {
    "entropy": "entropy",
    "distance": "distance_from_uniform",
    "embedding": "on_embedding",
    "nearest": "on_nearest",
    "rest": "on_rest",
}
# Names of tables -> their columns.
TABLES = {
    "sublayers.csv": ("model", "place", "name", "kind", *_MAGNITUDES.values(), *_WEIGHTS.values()),
    "depth_attention.csv": ("model", "reader", "source", "mean", "spread"),
    "depth_mixing.csv": ("model", "reader", "output", "mean", "spread"),
    "attention_sinks.csv": ("model", "layer", "mean", "strongest_head", "uniform"),
    "interventions.csv": ("model", "intervention", "of", "loss", "rise"),
}


def to_json(inspections: Sequence[Inspection]) -> str:
    """Return all numbers of inspections, except those of the passage, as a JSON text.

    Args:
        inspections: One inspection, or two that are compared.

    Returns:
        The text of `inspection.json`. A number that does not exist (NaN) is null.
    """
    record = {
        "written_by": "attnres inspect",
        "versions": versions(),
        "models": [numbers(inspection) for inspection in inspections],
    }
    return _json_text(record) + "\n"


def _json_text(value: Any, indent: str = "") -> str:
    """Return a value as JSON text, with a line for each member of an object and each row of a matrix."""
    inner = indent + " "
    if isinstance(value, dict):
        items, (begin, end) = [f"{json.dumps(key)}: {_json_text(item, inner)}" for key, item in value.items()], "{}"
    elif isinstance(value, list) and value and isinstance(value[0], (dict, list)):
        items, (begin, end) = [_json_text(item, inner) for item in value], "[]"
    else:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    return f"{begin}\n{inner}" + f",\n{inner}".join(items) + f"\n{indent}{end}"


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that the numbers depend on, by name."""
    return {name: version(name) for name in _PACKAGES} | {"python": platform.python_version()}


def numbers(inspection: Inspection) -> dict[str, Any]:
    """Return an inspection as dictionaries, lists, strings, numbers of six digits and `None`, ready for JSON."""
    attention, interventions, depth = inspection.depth_attention, inspection.interventions, inspection.depth
    return {
        "model": inspection.model,
        "text": inspection.text,
        "depth": {
            "kinds": depth.kinds,
            "readers": depth.consumers,
            "sources": depth.sources,
            "outputs": depth.outputs,
            "block_size": depth.block_size,
        },
        "depth_attention": attention
        and {name: plain(getattr(attention, name)) for name in ("mean", "spread", *_WEIGHTS)}
        | {"most_read": [plain(attention.most_read(consumer)) for consumer in range(len(depth.consumers))]},
        "mixing": {name: plain(getattr(inspection.mixing, name)) for name in ("mean", "spread")},
        "magnitudes": {name: plain(getattr(inspection.magnitudes, name)) for name in _MAGNITUDES},
        "attention_sinks": {name: plain(getattr(inspection.sinks, name)) for name in ("mean", "strongest", "uniform")},
        "interventions": interventions
        and {name: plain(getattr(interventions, name)) for name in ("loss", "hidden", "uniform", "tokens")},
    }


def plain(value: Any) -> Any:
    """Convert a value for JSON: tensors to lists, floats to six digits, and NaN and infinity to `None`."""
    if isinstance(value, Tensor):
        return plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    return value


def to_csv(inspections: Sequence[Inspection]) -> dict[str, str]:
    """Return the numbers of inspections as CSV tables.

    Args:
        inspections: One inspection, or two that are compared.

    Returns:
        The text of each table by its name in `TABLES`. Tables without rows are left out.
    """
    # Two models may have the same name, so each gets its letter of the page.
    if len(inspections) > 1:
        models = [i.model | {"name": f"{letter}: {i.model['name']}"} for letter, i in zip(LABELS, inspections)]
        inspections = [replace(i, model=model) for i, model in zip(inspections, models)]
    rows: dict[str, Iterable[tuple]] = {
        "sublayers.csv": (row for i in inspections for row in _sublayer_rows(i)),
        "depth_attention.csv": (
            row for i in inspections if i.depth_attention for row in _cell_rows(i, i.depth_attention, i.depth.sources)
        ),
        "depth_mixing.csv": (row for i in inspections for row in _cell_rows(i, i.mixing, i.depth.outputs)),
        "attention_sinks.csv": (
            (i.model["name"], layer, mean, strongest, i.sinks.uniform)
            for i in inspections
            for layer, (mean, strongest) in enumerate(zip(i.sinks.mean.tolist(), i.sinks.strongest.tolist()))
        ),
        "interventions.csv": (row for i in inspections for row in _intervention_rows(i)),
    }
    tables = {name: _table(header, rows[name]) for name, header in TABLES.items()}
    return {name: table for name, table in tables.items() if table.count("\n") > 1}


def _sublayer_rows(inspection: Inspection) -> Iterator[tuple]:
    """Yield a row for each sublayer, on its input and output, and a row for the model's output, on its input."""
    depth, magnitudes, attention = inspection.depth, inspection.magnitudes, inspection.depth_attention
    missing = [math.nan] * len(depth.consumers)
    # These fields begin with the embedding, so the output of sublayer l has index l + 1, and its input has index l.
    of_outputs = ("outputs", "stream", "gradients")
    columns = [
        [*getattr(magnitudes, name)[1:].tolist(), math.nan]
        if name in of_outputs
        else getattr(magnitudes, name).tolist()
        for name in _MAGNITUDES
    ]
    columns += [getattr(attention, name).tolist() if attention else missing for name in _WEIGHTS]
    for place, (name, *values) in enumerate(zip(depth.consumers, *columns)):
        yield inspection.model["name"], place, name, depth.kind(place), *values


def _cell_rows(inspection: Inspection, matrix: DepthAttention | DepthMixing, columns: Sequence[str]) -> Iterator[tuple]:
    """Yield a row for each entry of a matrix: the names of its row and column, its mean and its spread."""
    consumers = inspection.depth.consumers
    for row, (consumer, means, spreads) in enumerate(zip(consumers, matrix.mean.tolist(), matrix.spread.tolist())):
        for column, (name, mean, spread) in enumerate(zip(columns, means, spreads)):
            # Above the diagonal are sources that come after the consumer.
            if not math.isnan(mean) and column <= row:
                yield inspection.model["name"], consumer, name, mean, spread


def _intervention_rows(inspection: Inspection) -> Iterator[tuple]:
    """Yield a row for each source that was hidden, and each consumer whose weights were made uniform."""
    interventions, depth = inspection.interventions, inspection.depth
    if interventions is None:
        return
    for kind, names, rises in (
        ("hidden", depth.sources, interventions.hidden),
        ("uniform", depth.consumers, interventions.uniform),
    ):
        for name, rise in zip(names, rises.tolist()):
            if not math.isnan(rise):
                yield inspection.model["name"], kind, name, interventions.loss + rise, rise


def _table(header: Sequence[str], rows: Iterable[Sequence]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([plain(value) for value in row] for row in rows)
    return file.getvalue()


__all__ = ["TABLES", "WRITTEN_BY", "numbers", "plain", "to_csv", "to_json", "versions"]
