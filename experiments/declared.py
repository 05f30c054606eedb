"""The experiments that are declared in `declared/*.yaml` (from scratch) and `declared/healing/*.yaml`.

A declaration names what is trained, on which text, for how long. It is checked as it is read,
before anything is trained.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, ClassVar, get_args

import yaml
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from attnres.configuration import load
from attnres.utils.yaml_files import load_yaml

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SELECTION_SEED = 10  # of the runs that choose settings, on text that is not reported
DECLARED = Path(__file__).parent / "declared"
BASELINE = "standard"
TINY = "tiny"  # the size that tries the whole path, and is never reported

# Which tensors a recipe of healing trains, by (name of the tensor, whether AttnRes adds it).
TRAINED: dict[str, Callable[[str, bool], bool]] = {
    "all": lambda name, is_attnres: True,
    "all but key norms": lambda name, is_attnres: not (is_attnres and name.endswith("_norm.weight")),
    "AttnRes": lambda name, is_attnres: is_attnres,
    "norms": lambda name, is_attnres: not is_attnres and "norm" in name,
}


def is_rate(value: object) -> bool:
    """Return whether a value can be a learning rate."""
    return type(value) in (int, float) and 0 < value < math.inf


def is_seed(value: object) -> bool:
    """Return whether a value can be the seed of a reported run."""
    return type(value) is int and 0 <= value < 2**32 and value != SELECTION_SEED


def _check_numbers(declaration: "DataclassInstance") -> None:
    """Raise ValueError if a number makes no sense, such as `3e-4`, which YAML reads as text."""
    for part in fields(declaration):
        name, value = part.name, getattr(declaration, part.name)
        kind = get_args(part.type)[0] if isinstance(part.type, UnionType) else part.type
        if value is None or value == part.default or isinstance(value, Mapping):
            continue
        if kind is int and not (type(value) is int and value > 0):
            raise ValueError(f"{name} must be a whole number above 0; got {value!r}.")
        if kind is bool and type(value) is not bool:
            raise ValueError(f"{name} must be true or false; got {value!r}.")
        if kind is float and not is_rate(value) and (value != 0 or name.endswith("rate")):
            raise ValueError(f"{name} must be a number above 0 such as 0.004; got {value!r}.")
        # The first token of a sequence has no loss.
        if name in ("length", "held_out_length") and value < 2:
            raise ValueError(f"{name} must be at least 2; got {value!r}.")


@dataclass(frozen=True)
class Corpus:
    """A text, and the vocabulary of the BPE that is trained on it.

    Attributes:
        corpus: name of the folder that holds `train.txt` and `valid.txt`.
        vocab_size: of the tokenizer.
        characters: how much of `train.txt` is read, in whole documents.

    Raises:
        ValueError: a value makes no sense.
    """

    corpus: str
    vocab_size: int
    characters: int

    def __post_init__(self) -> None:
        _check_numbers(self)
        # 256 bytes and two special tokens at least; ids are stored in 16 bits.
        if not 258 <= self.vocab_size <= 2**16:
            raise ValueError(f"vocab_size of the text must be from 258 to 65536; got {self.vocab_size}.")

    @property
    def name(self) -> str:
        """The name of its prepared file."""
        return f"{self.corpus}-{self.vocab_size}-{self.characters}"


@dataclass(frozen=True)
class ScratchRecipe:
    """What identifies a run from scratch, beside its seed.

    Attributes:
        connection: the fields of the configuration that make the residual connection.
        rate: the peak learning rate.
        tokens: how many it is trained on.
    """

    connection: Mapping[str, Any]
    rate: float
    tokens: int

    def __hash__(self) -> int:
        return hash((*sorted(self.connection.items()), self.rate, self.tokens))


@dataclass(frozen=True)
class ScratchExperiment:
    """A comparison from scratch, as `declared/NAME.yaml` declares it.

    Attributes:
        name: of the file.
        model: a named configuration (`name`) or a model type (`model_type`), with the fields that are set.
        connections: label -> the fields of the configuration that make the connection. One is `standard`.
        text: what is trained on.
        length: tokens of a sequence.
        batch_size: sequences of a step.
        held_out: sequences that the loss is measured on.
        tokens: of a reported run; more than the text has repeat it.
        sweep_tokens: of a run that chooses a learning rate.
        rates: the first learning rates of the sweep.
        seeds: of the reported runs.
        rate: the learning rate of all connections, or label -> rate; None: each has the best of its own sweep.
        bfloat16: matrix multiplications in bfloat16, with weights, norms and sums of outputs in float32.
        warmup: steps, of runs of any length; None: a twentieth of each.
        costs: the experiment whose measured costs hold for this one too, where it has none.
        published: label -> what the paper reports for it, minus its baseline (nats/token).
    """

    name: str
    model: dict[str, Any]
    connections: dict[str, dict[str, Any]]
    text: Corpus
    length: int
    batch_size: int
    held_out: int
    tokens: int
    sweep_tokens: int
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    rate: float | Mapping[str, float] | None = None
    bfloat16: bool = False
    warmup: int | None = None
    costs: str | None = None
    published: dict[str, float] = field(default_factory=dict)
    REQUIRED: ClassVar = ("curve",)  # keys of a stored run that tables need

    @classmethod
    def load(cls, name: str) -> "ScratchExperiment":
        """Read the declaration `name`. Raises ValueError if there is none, or if it is damaged or makes no sense."""

        def build(values: dict[str, Any]) -> ScratchExperiment:
            lists = {key: tuple(values[key]) for key in ("rates", "seeds")}
            return cls(name=name, **(values | lists | {"text": Corpus(**values["text"])}))

        return _load(_declaration(name), build)

    def config(self, connection: Mapping[str, Any]) -> PreTrainedConfig:
        """Build the configuration of the model with a connection.

        Args:
            connection: the fields that make it.

        Raises:
            ValueError: the model or the connection names a field that the configuration does not have.
        """
        values = self.model | connection
        name = values.pop("name", None)
        make = partial(load, name) if name else partial(AutoConfig.for_model, values.pop("model_type"))
        known = make()
        if unknown := [name for name in values if not hasattr(known, name) or callable(getattr(known, name))]:
            raise ValueError(f"{', '.join(unknown)} is no field of {type(known).__name__}.")
        return make(**values)

    def check(self) -> None:
        """Raise ValueError if a value makes no sense, or if a connection has no model."""
        _check_numbers(self)
        declared = [] if self.rate is None else [self.rate_of(label) for label in self.connections]
        if wrong := [rate for rate in [*self.rates, *declared] or [None] if not is_rate(rate)]:
            raise ValueError(f"a rate must be a number above 0 such as 0.004; got {wrong[0]!r}.")
        if wrong := [seed for seed in self.seeds or [None] if not is_seed(seed)]:
            raise ValueError(
                f"a seed must be a whole number but {SELECTION_SEED}, which chooses settings; got {wrong[0]!r}."
            )
        steps = self.steps(min(self.tokens, self.sweep_tokens))
        if 2 * (self.warmup or 0) > steps:
            raise ValueError(f"warmup must be at most half of {steps} steps: the rate decays in the other half.")
        if BASELINE not in self.connections:
            raise ValueError(f"connections must include {BASELINE}, which the others are compared with.")
        for connection in self.connections.values():
            config = self.config(connection)
            if config.vocab_size != self.text.vocab_size:
                raise ValueError(
                    f"the vocabulary of model and text must be one; got {config.vocab_size} and {self.text.vocab_size}."
                )
        if self.costs:
            _declaration(self.costs)

    def rate_of(self, label: str) -> float | None:
        """Return the declared learning rate of a connection; None if its sweep chooses it."""
        return self.rate.get(label) if isinstance(self.rate, Mapping) else self.rate

    def setting(self) -> dict[str, Any]:
        """Return what all runs of a results file share, whatever connections, rates and seeds there are."""
        own = ("connections", "tokens", "sweep_tokens", "rates", "rate", "seeds", "costs", "published")
        return {name: value for name, value in asdict(self).items() if name not in own and value is not None}

    def steps(self, tokens: int) -> int:
        """Return the optimiser steps of a run."""
        return math.ceil(tokens / (self.batch_size * self.length))


@dataclass(frozen=True)
class HealingRecipe:
    """How a pretrained model is trained on.

    Attributes:
        steps: optimiser steps.
        block_size: sublayers of a block of AttnRes; None: the standard model; 1: Full.
        gated: `h = residual + gamma * depth attention`, with gamma = 0 at the start.
        trained: which tensors, a key of `TRAINED`.
        rate: the peak learning rate of the backbone.
        attnres_rate: that of the tensors that the retrofit adds.
        warmup: share of the steps.
        scale: `sum` (exact) or `mean`.
        alone: share of the steps that trains the AttnRes tensors alone, before the others join.
    """

    steps: int = 256
    block_size: int | None = None
    gated: bool = False
    trained: str = "all"
    rate: float = 1e-3
    attnres_rate: float = 1e-3
    warmup: float = 0.1
    scale: str = "sum"
    alone: float = 0.0

    def check(self) -> None:
        """Raise ValueError if a value makes no sense."""
        _check_numbers(self)
        for name, allowed in (("trained", TRAINED), ("scale", ("sum", "mean"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {getattr(self, name)!r}.")

    @property
    def is_standard(self) -> bool:
        """Whether the model keeps its residual stream."""
        return self.block_size is None


@dataclass(frozen=True)
class HealingExperiment:
    """An experiment of healing, as `declared/healing/SIZE.yaml` declares it.

    Attributes:
        size: of the file.
        length: tokens of a training sequence.
        held_out_length: tokens of a sequence that the loss is measured on.
        batch_size: sequences of a step.
        report: label -> what is measured with several seeds.
        sweeps: title -> label -> what is tried with the selection seed.
        text: the text of a model of `experiments claim`; None: the folder of the corpus as it is.
        held_out: sequences that the loss is measured on, if `text` is given.
        seen: tokens of `text` that the model was pretrained on with seed 0; healing sees the others.
    """

    size: str
    length: int
    held_out_length: int
    batch_size: int
    report: dict[str, HealingRecipe]
    sweeps: dict[str, dict[str, HealingRecipe]]
    text: Corpus | None = None
    held_out: int | None = None
    seen: int = 0
    REQUIRED: ClassVar = ("before", "tokens")  # keys of a stored run that tables need

    @classmethod
    def load(cls, size: str) -> "HealingExperiment":
        """Read the declaration of a size. Raises ValueError if it is damaged or makes no sense."""

        def build(values: dict[str, Any]) -> HealingExperiment:
            values["sweeps"] = {title: _recipes(sweep) for title, sweep in values["sweeps"].items()}
            text = Corpus(**values["text"]) if "text" in values else None
            return cls(size, **(values | {"report": _recipes(values["report"]), "text": text}))

        return _load(DECLARED / "healing" / f"{size}.yaml", build)

    def check(self) -> None:
        """Raise ValueError if a value makes no sense, or if a reported recipe has no baseline."""
        _check_numbers(self)
        if self.text and not self.held_out:
            raise ValueError("a declared text needs held_out, the number of sequences that the loss is measured on.")
        for title, recipes in {"report": self.report, **self.sweeps}.items():
            for label, recipe in recipes.items():
                try:
                    recipe.check()
                except ValueError as error:
                    raise ValueError(f"{title}, {label}: {error}") from error
        for recipe in self.report.values():
            self.baseline(recipe)

    @property
    def name(self) -> str:
        """The name of its results file."""
        return f"healing-{self.size}"

    def setting(self) -> dict[str, Any]:
        """Return what all runs of a results file share."""
        text = {"text": asdict(self.text), "seen": self.seen, "held_out": self.held_out} if self.text else {}
        return {name: getattr(self, name) for name in ("length", "held_out_length", "batch_size")} | text

    def baseline(self, recipe: HealingRecipe) -> HealingRecipe:
        """Return the reported recipe that trains all of the standard model for as many steps.

        Args:
            recipe: what is compared with it.

        Raises:
            ValueError: none is declared.
        """
        for other in self.report.values():
            if other.is_standard and other.trained == "all" and other.steps == recipe.steps:
                return other
        raise ValueError(f"`report` has no standard model, all of it trained, for {recipe.steps} steps: add one.")


def _recipes(declared: Mapping[object, Mapping[str, Any]]) -> dict[str, HealingRecipe]:
    return {str(label): HealingRecipe(**values) for label, values in declared.items()}


def _load(path: Path, build: Callable[[dict[str, Any]], Any]) -> Any:
    values = read_declaration(path)
    try:
        experiment = build(values)
        experiment.check()
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    except (ArithmeticError, AttributeError, KeyError, TypeError, StrictDataclassError) as error:
        problem = " ".join(str(error).split())
        raise ValueError(f"{path} declares no experiment ({type(error).__name__}: {problem}).") from error
    return experiment


def read_declaration(path: Path, earlier: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read the fields of a YAML file. What it lacks comes from the file beside it that it is `like`, if it names one.

    Args:
        path: the file.
        earlier: files that are like this one, to notice a circle.

    Raises:
        ValueError: the file holds no fields, or is like a file that does not exist or like itself.
    """
    try:
        values = load_yaml(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no fields of a declaration.")
    like = values.pop("like", None)
    if like is None:
        return values
    other = path.parent / f"{like}.yaml"
    if path in earlier or not other.exists():
        raise ValueError(f"{path} is like {like!r}, which is no other declaration beside it.")
    return read_declaration(other, (*earlier, path)) | values


def names(experiment: str = "*") -> list[str]:
    """Return the names of the declarations from scratch, or of those of one experiment such as `claim`."""
    return sorted(path.stem for path in DECLARED.glob(f"{experiment}-*.yaml"))


def sizes_of_healing() -> list[str]:
    """Return the sizes of healing that are declared."""
    return sorted(path.stem for path in (DECLARED / "healing").glob("*.yaml"))


def _declaration(name: str) -> Path:
    path = DECLARED / f"{name}.yaml"
    if not path.exists():
        raise ValueError(f"There is no experiment {name!r}, but there is {', '.join(names())}.")
    return path
