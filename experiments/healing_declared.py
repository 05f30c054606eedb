"""What `experiments healing` makes: the recipes of `declared/healing/*.yaml`."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .data import Text
from .harness import is_number, is_rate, read_declaration

DECLARED = Path(__file__).parent / "declared" / "healing"

# What `trained` means, by (name of the tensor, is it one of the AttnRes tensors).
TRAINED: dict[str, Callable[[str, bool], bool]] = {
    "all": lambda name, attnres: True,
    "all but key norms": lambda name, attnres: not (attnres and name.endswith("_norm.weight")),
    "AttnRes": lambda name, attnres: attnres,
    "norms": lambda name, attnres: not attnres and "norm" in name,
}
SCALES = ("sum", "mean")


def is_count(value: object) -> bool:
    return type(value) is int and value > 0


def is_share(value: object) -> bool:
    return is_number(value) and 0 <= value <= 1


_LENGTH = (lambda value: is_count(value) and value > 1, "a whole number above 1")  # the first token has no loss
_COUNT = (is_count, "a whole number above 0")
_RATE = (is_rate, "a number above 0 such as 0.0003")
_SHARE = (is_share, "a number from 0 to 1")
# Field -> (whether it can have this value, what it must be).
_RIGHT: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("length", "held_out_length"), _LENGTH),
    **dict.fromkeys(("held_out", "batch_size", "characters"), _COUNT),
    "seen": (lambda value: value == 0 or is_count(value), "a whole number"),
    "steps": _COUNT,
    "block_size": (lambda value: value is None or is_count(value), _COUNT[1]),
    "gated": (lambda value: isinstance(value, bool), "true or false"),
    "trained": (TRAINED.__contains__, f"one of {', '.join(TRAINED)}"),
    "rate": _RATE,
    "attnres_rate": _RATE,
    "warmup": _SHARE,
    "scale": (SCALES.__contains__, f"one of {', '.join(SCALES)}"),
    "alone": _SHARE,
}


def _check(fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        can_be, what = _RIGHT[name]
        if not can_be(value):
            raise ValueError(f"{name} is {value!r}, but must be {what}.")


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

    def check(self) -> None:
        """Raises ValueError: a value makes no sense."""
        _check(asdict(self))

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
        """Raises ValueError: it cannot be read, or lacks a field, or a value makes no sense."""
        path = DECLARED / f"{size}.yaml"
        fields = read_declaration(path)
        try:
            sweeps = {title: _recipes(sweep) for title, sweep in fields.pop("sweeps").items()}
            text = Text(**fields.pop("text")) if "text" in fields else None
            declaration = cls(size, report=_recipes(fields.pop("report")), sweeps=sweeps, text=text, **fields)
            declaration.check()
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{path} declares no recipes ({type(error).__name__}: {error}).") from error
        return declaration

    def check(self) -> None:
        """Raises ValueError: a value makes no sense, or a reported recipe has nothing to be compared with."""
        _check({name: getattr(self, name) for name in ("length", "held_out_length", "batch_size", "seen")})
        if self.text:
            _check({"held_out": self.held_out, "characters": self.text.characters})
        for title, recipes in {"report": self.report, **self.sweeps}.items():
            for label, recipe in recipes.items():
                try:
                    recipe.check()
                except ValueError as error:
                    raise ValueError(f"{title}, {label}: {error}") from error
        for recipe in self.report.values():
            self.baseline(recipe)

    def setting(self) -> dict[str, Any]:
        """What all runs of a results file have in common."""
        text = {"text": asdict(self.text), "seen": self.seen, "held_out": self.held_out} if self.text else {}
        return {name: getattr(self, name) for name in ("length", "held_out_length", "batch_size")} | text

    def baseline(self, recipe: Recipe) -> Recipe:
        """What a reported recipe is compared with: the standard model, for as many steps.

        Raises:
            ValueError: none is declared.
        """
        candidates = [other for other in self.report.values() if other.is_standard and other.trained == "all"]
        for other in candidates:
            if other.steps == recipe.steps:
                return other
        raise ValueError(f"`report` has no standard model, all of it trained, for {recipe.steps} steps: add one.")


def _recipes(fields: dict[str, dict[str, Any]]) -> dict[str, Recipe]:
    return {str(label): Recipe(**of_label) for label, of_label in fields.items()}
