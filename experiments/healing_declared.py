"""What `experiments healing` makes: the recipes of `declared/healing/*.yaml`."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .data import Text
from .harness import read_declaration

DECLARED = Path(__file__).parent / "declared" / "healing"


@dataclass(frozen=True)
class Recipe:
    """How one model is continued. Rates are absolute; `attnres_rate` is that of what the retrofit adds."""

    steps: int = 256
    block_size: int | None = None  # None: the standard model; 1: Full
    gated: bool = False
    trained: str = "all"
    rate: float = 1e-3
    attnres_rate: float = 1e-3
    warmup: float = 0.1  # share of the steps
    scale: str = "sum"
    alone: float = 0.0  # share of the steps that trains the AttnRes tensors alone, before the rest joins

    @property
    def is_standard(self) -> bool:
        return self.block_size is None


@dataclass(frozen=True)
class Declaration:
    """A declaration of `declared/healing/*.yaml`.

    Attributes:
        length, batch_size: of the sequences trained on, and sequences in a step.
        held_out_length, held_out: of the sequences that the loss is measured on; how many, where `text` is given.
        report: label -> what is measured with several seeds.
        sweeps: title -> label -> what is tried on the selection seed.
        text: the text of a model of `experiments claim`; None: the folder of the corpus as it is.
        seen: tokens of it that the model was pretrained on with seed 0; healing sees the others.
    """

    size: str
    length: int
    held_out_length: int
    batch_size: int
    report: dict[str, Recipe]
    sweeps: dict[str, dict[str, Recipe]]
    text: Text | None = None
    held_out: int | None = None
    seen: int = 0

    @classmethod
    def load(cls, size: str) -> "Declaration":
        """Raises ValueError: it cannot be read, or lacks a field."""
        path = DECLARED / f"{size}.yaml"
        fields = read_declaration(path)
        try:
            sweeps = {title: _recipes(sweep) for title, sweep in fields.pop("sweeps").items()}
            text = Text(**fields.pop("text")) if "text" in fields else None
            return cls(size, report=_recipes(fields.pop("report")), sweeps=sweeps, text=text, **fields)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{path} declares no recipes ({type(error).__name__}: {error}).") from error

    def setting(self) -> dict[str, Any]:
        """What all runs of a results file have in common."""
        text = {"text": asdict(self.text), "seen": self.seen, "held_out": self.held_out} if self.text else {}
        return {name: getattr(self, name) for name in ("length", "held_out_length", "batch_size")} | text

    def baseline(self, recipe: Recipe) -> Recipe:
        """What a reported recipe is compared with: the standard model, for as many steps."""
        candidates = (other for other in self.report.values() if other.is_standard and other.trained == "all")
        return next(other for other in candidates if other.steps == recipe.steps)


def _recipes(fields: dict[str, dict[str, Any]]) -> dict[str, Recipe]:
    return {str(label): Recipe(**of_label) for label, of_label in fields.items()}
