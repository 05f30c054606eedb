"""An inspection as numbers in files: `inspection.json` with all of them, and CSV files with a row for each fact.

The same inspection gives the same bytes: numbers have six digits, and nothing tells the time.
"""

import csv
import io
import json
import math
import platform
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from torch import Tensor

from .inspection import Inspection
from .overview import LABELS

WRITTEN_BY = '"written_by": "attnres inspect"'  # in the JSON file of a directory that may be replaced
_VERSIONS = ("attnres", "torch", "transformers")
_DIGITS = 6
# Measures of a sublayer -> columns of a table.
_SIZES = {
    "inputs": "input",
    "outputs": "output",
    "stream": "stream",
    "gradients": "gradient",
    "largest": "largest_over_median",
}
_WEIGHTS = {
    "entropy": "entropy",
    "distance": "distance_from_uniform",
    "embedding": "on_embedding",
    "nearest": "on_nearest",
    "rest": "on_rest",
}
# Files of tables -> their columns.
TABLES = {
    "sublayers.csv": ("model", "place", "name", "kind", *_SIZES.values(), *_WEIGHTS.values()),
    "depth_attention.csv": ("model", "reader", "source", "mean", "spread"),
    "depth_mixing.csv": ("model", "reader", "output", "mean", "spread"),
    "attention_sinks.csv": ("model", "layer", "mean", "strongest_head", "uniform"),
    "interventions.csv": ("model", "intervention", "of", "loss", "rise"),
}


def to_json(inspections: Sequence[Inspection]) -> str:
    """All numbers of the inspections but those of the passage; NaN, which tells of what does not exist, as null."""
    record = {
        "written_by": "attnres inspect",
        "versions": versions(),
        "models": [numbers(inspection) for inspection in inspections],
    }
    return _text(record) + "\n"


def _text(value: Any, indent: str = "") -> str:
    """As JSON: objects over several lines, and matrices with a line for each row."""
    inner = indent + " "
    if isinstance(value, dict):
        items, (begin, end) = [f"{json.dumps(key)}: {_text(item, inner)}" for key, item in value.items()], "{}"
    elif isinstance(value, list) and value and isinstance(value[0], (dict, list)):
        items, (begin, end) = [_text(item, inner) for item in value], "[]"
    else:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    return f"{begin}\n{inner}" + f",\n{inner}".join(items) + f"\n{indent}{end}"


def versions() -> dict[str, str]:
    """Of what measured, by name."""
    return {name: version(name) for name in _VERSIONS} | {"python": platform.python_version()}


def numbers(inspection: Inspection) -> dict[str, Any]:
    """An inspection as what JSON has: objects, lists, texts, numbers of six digits and null."""
    attention, interventions = inspection.depth_attention, inspection.interventions
    depth = inspection.depth
    return {
        "model": inspection.model,
        "text": inspection.text,
        "depth": {name: getattr(depth, name) for name in ("kinds", "readers", "sources", "outputs", "block_size")},
        "depth_attention": attention
        and {name: plain(getattr(attention, name)) for name in ("mean", "spread", *_WEIGHTS)}
        | {"most_read": [plain(attention.most_read(reader)) for reader in range(len(depth.readers))]},
        "mixing": {name: plain(getattr(inspection.mixing, name)) for name in ("mean", "spread")},
        "magnitudes": {name: plain(getattr(inspection.magnitudes, name)) for name in _SIZES},
        "attention_sinks": {name: plain(getattr(inspection.sinks, name)) for name in ("mean", "strongest", "uniform")},
        "interventions": interventions
        and {name: plain(getattr(interventions, name)) for name in ("loss", "hidden", "uniform", "tokens")},
    }


def plain(value: Any) -> Any:
    """A value as what JSON has."""
    if isinstance(value, Tensor):
        return plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    return value


def to_csv(inspections: Sequence[Inspection]) -> dict[str, str]:
    """File name -> content, of those of `TABLES` that have rows."""
    if len(inspections) > 1:  # the letters of the page: names may be the same
        models = [i.model | {"name": f"{letter}: {i.model['name']}"} for letter, i in zip(LABELS, inspections)]
        inspections = [replace(i, model=model) for i, model in zip(inspections, models)]
    rows: dict[str, Iterable[tuple]] = {
        "sublayers.csv": (row for i in inspections for row in _sublayers(i)),
        "depth_attention.csv": (
            row for i in inspections if i.depth_attention for row in _cells(i, i.depth_attention, i.depth.sources)
        ),
        "depth_mixing.csv": (row for i in inspections for row in _cells(i, i.mixing, i.depth.outputs)),
        "attention_sinks.csv": (
            (i.model["name"], layer, mean, strongest, i.sinks.uniform)
            for i in inspections
            for layer, (mean, strongest) in enumerate(zip(i.sinks.mean.tolist(), i.sinks.strongest.tolist()))
        ),
        "interventions.csv": (row for i in inspections if i.interventions for row in _interventions(i)),
    }
    tables = {name: _table(header, rows[name]) for name, header in TABLES.items()}
    return {name: table for name, table in tables.items() if table.count("\n") > 1}


def _sublayers(inspection: Inspection) -> Iterable[tuple]:
    """A row for each reader: of a sublayer what it reads and puts out, of the output what it reads."""
    depth, sizes, attention = inspection.depth, inspection.magnitudes, inspection.depth_attention
    nothing = [math.nan] * len(depth.readers)
    of_outputs = ("outputs", "stream", "gradients")  # they begin with the embedding
    columns = [
        [*getattr(sizes, name)[1:].tolist(), math.nan] if name in of_outputs else getattr(sizes, name).tolist()
        for name in _SIZES
    ]
    columns += [getattr(attention, name).tolist() if attention else nothing for name in _WEIGHTS]
    for place, (reader, *values) in enumerate(zip(depth.readers, *columns)):
        yield inspection.model["name"], place, reader, depth.kind(place), *values


def _cells(inspection: Inspection, of: Any, columns: Sequence[str]) -> Iterable[tuple]:
    for row, (reader, means, spreads) in enumerate(zip(inspection.depth.readers, of.mean.tolist(), of.spread.tolist())):
        for column, (name, mean, spread) in enumerate(zip(columns, means, spreads)):
            if not math.isnan(mean) and column <= row:  # a reader has no more sources than there are readers up to it
                yield inspection.model["name"], reader, name, mean, spread


def _interventions(inspection: Inspection) -> Iterable[tuple]:
    found, depth = inspection.interventions, inspection.depth
    for what, names, rises in (("hidden", depth.sources, found.hidden), ("uniform", depth.readers, found.uniform)):
        for name, rise in zip(names, rises.tolist()):
            if not math.isnan(rise):
                yield inspection.model["name"], what, name, found.loss + rise, rise


def _table(header: Sequence[str], rows: Iterable[Sequence]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([plain(value) for value in row] for row in rows)
    return file.getvalue()


__all__ = ["TABLES", "WRITTEN_BY", "numbers", "plain", "to_csv", "to_json", "versions"]
