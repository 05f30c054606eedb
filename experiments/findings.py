"""What of the paper's findings the models trained here show: a table made from stored inspections.

Inspections are the `inspection.json` of `attnres inspect`: `analysis/results` holds, `analysis/RESULTS.md` shows them.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from attnres.analysis.tables import update_tables

from .harness import ROOT, distance_of_means, markdown

INSPECTIONS, PAGE = ROOT / "analysis" / "results", ROOT / "analysis" / "RESULTS.md"
ABSENT = "no depth attention"


@dataclass(frozen=True)
class Model:
    """A model of a stored inspection."""

    name: str
    numbers: dict[str, Any]

    @property
    def readers(self) -> list[int]:
        """The readers with several sources, the output among them."""
        rows = self.numbers["depth_attention"]["mean"]
        return [place for place, row in enumerate(rows) if self.count(place) > 1]

    def count(self, reader: int) -> int:
        """How many sources a reader has."""
        return sum(weight is not None for weight in self.numbers["depth_attention"]["mean"][reader])

    def of(self, name: str, readers: list[int]) -> list[float]:
        return [self.numbers["depth_attention"][name][reader] for reader in readers]


def read(folder: Path = INSPECTIONS) -> list[Model]:
    """The models of all inspections in a folder: by the name of the file, and of its models, where it has two.

    Raises:
        ValueError: a file is none, or a column of the table cannot be made from it.
    """
    models = []
    for path in sorted(folder.glob("*.json")):
        try:
            found = json.loads(path.read_text())["models"]
            for numbers in found:
                own = Path(numbers["model"]["name"]).name
                models.append(Model(f"{path.stem}: {own}" if len(found) > 1 else path.stem, numbers))
                column(models[-1])  # what it lacks is found while its file is known
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} is damaged, or no inspection with all that the table shows ({error!r}): move it away, or make "
                "it anew by `attnres inspect`."
            ) from error
    return models


def nearest(model: Model) -> str:
    """How many readers give their nearest source most, and what they give it against an even share."""
    rows = [[w for w in model.numbers["depth_attention"]["mean"][r] if w is not None] for r in model.readers]
    most = sum(row[-1] == max(row) for row in rows)
    return f"{most} of {len(rows)} give it most; {mean(row[-1] * len(row) for row in rows):.2f} x even"


def embedding(model: Model) -> str:
    """What the readers of the second half give the embedding, against an even share."""
    later = [reader for reader in model.readers if reader > len(model.numbers["depth"]["readers"]) // 2]
    weights = model.of("embedding", later)
    even = mean(weight * model.count(reader) for weight, reader in zip(weights, later))
    return f"{mean(weights):.2f}; {even:.2f} x even"


def sharper(model: Model) -> str:
    """Normalised entropy before attention and before MLPs."""
    kinds, last = model.numbers["depth"]["kinds"], len(model.numbers["depth"]["readers"]) - 1
    by_kind = {k: [r for r in model.readers if r < last and kinds[r % len(kinds)] == k] for k in kinds}
    return ", ".join(f"{kind} {mean(model.of('entropy', readers)):.2f}" for kind, readers in by_kind.items())


def by_token(model: Model) -> str:
    """Mean distance from uniform of the weights of single tokens, and of their mean."""
    rows = [[w for w in model.numbers["depth_attention"]["mean"][r] if w is not None] for r in model.readers]
    return f"{mean(model.of('distance', model.readers)):.2f}, of the mean map {distance_of_means(rows):.2f}"


def growth(model: Model) -> str:
    """The largest magnitude of the stream over its median, and what the output reads over the embedding."""
    sizes = model.numbers["magnitudes"]
    stream, inputs = sizes["stream"], sizes["inputs"]
    largest = max(stream) / sorted(stream)[len(stream) // 2]
    return f"largest / median {largest:.1f}; input of the output / embedding {inputs[-1] / inputs[0]:.1f}"


def gradients(model: Model) -> str:
    """Of the first quarter of the sublayers over the last one, and of the largest over the smallest."""
    found = model.numbers["magnitudes"]["gradients"][1:]
    quarter = max(1, len(found) // 4)
    return f"{mean(found[:quarter]) / mean(found[-quarter:]):.1f}; largest / smallest {max(found) / min(found):.0f}"


def used(model: Model) -> str:
    """Which hidden source costs most, and the reader whose weights matter most."""
    found, depth = model.numbers["interventions"], model.numbers["depth"]
    cost, source = max(zip(found["hidden"], depth["sources"]))
    known = [(rise, name) for rise, name in zip(found["uniform"], depth["readers"]) if rise is not None]
    row = ", uniform {1} +{0:.3f}".format(*max(known)) if known else ""
    return f"{source} +{cost:.2f}{row}"


MEASURES: dict[str, tuple[Callable[[Model], str], bool]] = {
    "weight on the nearest source": (nearest, True),
    "weight on the embedding, second half of the depth": (embedding, True),
    "normalised entropy before": (sharper, True),
    "distance from uniform, token by token": (by_token, True),
    "magnitudes: stream": (growth, False),
    "gradients, first quarter over last": (gradients, False),
    "loss rises most (nats) with hidden": (used, False),
}


def column(model: Model) -> list[str]:
    """The cells of a model: what it is, and each measure."""
    fact, attention = model.numbers["model"], model.numbers["depth_attention"]
    cells = [model.name, fact["connection"].partition(",")[0], f"{fact['sublayers']}, {fact['hidden_size']}"]
    return cells + [ABSENT if needs and attention is None else measure(model) for measure, needs in MEASURES.values()]


def table(models: list[Model]) -> str:
    """A column for each model and a row for each measure, in Markdown."""
    names = ["", "connection", "sublayers, width", *MEASURES]
    return markdown(list(zip(names, *map(column, models))), texts=len(models) + 1)


def write(folder: Path = INSPECTIONS, page: Path = PAGE) -> None:
    """Raises FileNotFoundError: no inspection is stored."""
    models = read(folder)
    if not models:
        raise FileNotFoundError(f"{folder} holds no inspections: copy inspection.json of `attnres inspect` there.")
    update_tables(page, {"findings": table(models)})
    print(f"Written from {len(models)} models: the table of {page}.")
