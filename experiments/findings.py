"""The paper's findings in the models trained here: a table of `analysis/RESULTS.md`, made from stored inspections.

An inspection is the `inspection.json` of `attnres inspect`; `analysis/results` holds them.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from attnres.analysis.tables import update_tables

from .store import ROOT
from .tables import distance_of_means, markdown

INSPECTIONS, PAGE = ROOT / "analysis" / "results", ROOT / "analysis" / "RESULTS.md"
ABSENT = "no depth attention"


@dataclass(frozen=True)
class InspectedModel:
    """A model of a stored inspection.

    Attributes:
        name: its column in the table.
        numbers: its part of the inspection.
    """

    name: str
    numbers: dict[str, Any]

    @property
    def consumers(self) -> list[int]:
        """The sublayers that have several sources, and the output as the last one."""
        return [
            consumer for consumer in range(len(self.numbers["depth_attention"]["mean"])) if self.count(consumer) > 1
        ]

    def weights(self, consumer: int) -> list[float]:
        """Return the mean weight of each source of a consumer."""
        return [weight for weight in self.numbers["depth_attention"]["mean"][consumer] if weight is not None]

    def count(self, consumer: int) -> int:
        """Return how many sources a consumer has."""
        return len(self.weights(consumer))

    def attention(self, name: str, consumers: list[int]) -> list[float]:
        """Return a measure of the depth attention, such as `entropy`, of some consumers."""
        return [self.numbers["depth_attention"][name][consumer] for consumer in consumers]


def read(folder: Path = INSPECTIONS) -> list[InspectedModel]:
    """Read the models of all inspections in a folder.

    A model has the name of its file; where a file has two models, that of the model stands behind.

    Raises:
        ValueError: a file is no inspection, or lacks what the table shows.
    """
    models = []
    for path in sorted(folder.glob("*.json")):
        try:
            inspected = json.loads(path.read_text(encoding="utf-8"))["models"]
            for numbers in inspected:
                model = Path(numbers["model"]["name"]).name
                models.append(InspectedModel(f"{path.stem}: {model}" if len(inspected) > 1 else path.stem, numbers))
                column(models[-1])  # fails here, where the name of the file is known
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} is damaged, or no inspection with all that the table shows ({error!r}): move it away, or make "
                "it anew by `attnres inspect`."
            ) from error
    return models


def nearest(model: InspectedModel) -> str:
    """Say how many consumers give their nearest source most, and its weight as a multiple of an even share."""
    rows = [model.weights(consumer) for consumer in model.consumers]
    most = sum(row[-1] == max(row) for row in rows)
    return f"{most} of {len(rows)} give it most; {mean(row[-1] * len(row) for row in rows):.2f} x even"


def embedding(model: InspectedModel) -> str:
    """Say the weight that consumers of the second half give the embedding, also as a multiple of an even share."""
    half = len(model.numbers["depth"]["readers"]) // 2
    later = [consumer for consumer in model.consumers if consumer > half]
    weights = model.attention("embedding", later)
    even = mean(weight * model.count(consumer) for weight, consumer in zip(weights, later))
    return f"{mean(weights):.2f}; {even:.2f} x even"


def sharper(model: InspectedModel) -> str:
    """Say the normalised entropy before attention and before MLPs."""
    kinds, last = model.numbers["depth"]["kinds"], len(model.numbers["depth"]["readers"]) - 1
    sublayers = [consumer for consumer in model.consumers if consumer < last]
    by_kind = {kind: [s for s in sublayers if kinds[s % len(kinds)] == kind] for kind in kinds}
    return ", ".join(f"{kind} {mean(model.attention('entropy', own)):.2f}" for kind, own in by_kind.items())


def by_token(model: InspectedModel) -> str:
    """Say the mean distance from uniform of the weights of single tokens, and of their mean."""
    rows = [model.weights(consumer) for consumer in model.consumers]
    distance = mean(model.attention("distance", model.consumers))
    return f"{distance:.2f}, of the mean map {distance_of_means(rows):.2f}"


def growth(model: InspectedModel) -> str:
    """Say the largest magnitude of the stream over its median, and the input of the output over the embedding."""
    sizes = model.numbers["magnitudes"]
    stream, inputs = sizes["stream"], sizes["inputs"]
    largest = max(stream) / sorted(stream)[len(stream) // 2]
    return f"largest / median {largest:.1f}; input of the output / embedding {inputs[-1] / inputs[0]:.1f}"


def gradients(model: InspectedModel) -> str:
    """Say the gradients of the first quarter of the sublayers over the last, and of the largest over the smallest."""
    sizes = model.numbers["magnitudes"]["gradients"][1:]
    quarter = max(1, len(sizes) // 4)
    return f"{mean(sizes[:quarter]) / mean(sizes[-quarter:]):.1f}; largest / smallest {max(sizes) / min(sizes):.0f}"


def used(model: InspectedModel) -> str:
    """Say which hidden source costs most, and which consumer's weights matter most."""
    interventions, depth = model.numbers["interventions"], model.numbers["depth"]
    cost, source = max(zip(interventions["hidden"], depth["sources"]))
    rises = [(rise, name) for rise, name in zip(interventions["uniform"], depth["readers"]) if rise is not None]
    return f"{source} +{cost:.2f}" + (", uniform {1} +{0:.3f}".format(*max(rises)) if rises else "")


# Row -> (its cells, whether they need depth attention).
MEASURES: dict[str, tuple[Callable[[InspectedModel], str], bool]] = {
    "weight on the nearest source": (nearest, True),
    "weight on the embedding, second half of the depth": (embedding, True),
    "normalised entropy before": (sharper, True),
    "distance from uniform, token by token": (by_token, True),
    "magnitudes: stream": (growth, False),
    "gradients, first quarter over last": (gradients, False),
    "loss rises most (nats) with hidden": (used, False),
}


def column(model: InspectedModel) -> list[str]:
    """Return the cells of a model: name, connection, shape, and each measure."""
    fact, attention = model.numbers["model"], model.numbers["depth_attention"]
    cells = [model.name, fact["connection"].partition(",")[0], f"{fact['sublayers']}, {fact['hidden_size']}"]
    return cells + [ABSENT if needs and attention is None else measure(model) for measure, needs in MEASURES.values()]


def table(models: list[InspectedModel]) -> str:
    """Tabulate models: a column for each model and a row for each measure."""
    names = ["", "connection", "sublayers, width", *MEASURES]
    return markdown(list(zip(names, *map(column, models))), texts=len(models) + 1)


def write(folder: Path = INSPECTIONS, page: Path = PAGE) -> None:
    """Write the table of all inspections into a page.

    Args:
        folder: holds the inspections.
        page: the Markdown file.

    Raises:
        FileNotFoundError: there are no inspections.
    """
    models = read(folder)
    if not models:
        raise FileNotFoundError(f"{folder} holds no inspections: copy inspection.json of `attnres inspect` there.")
    update_tables(page, {"findings": table(models)})
    print(f"Written from {len(models)} models: the table of {page}.")
