"""What `experiments` trains from scratch: the comparisons of `declared/*.yaml`."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from attnres.configuration import load

from .data import Text
from .harness import SELECTION_SEED, is_number, is_rate, is_seed, read_declaration

DECLARED = Path(__file__).parent / "declared"
BASELINE = "standard"


@dataclass(frozen=True)
class Recipe:
    """What identifies a run beside its seed: the fields of the configuration that make its connection, and how long."""

    connection: Mapping[str, Any]
    rate: float
    tokens: int

    def __hash__(self) -> int:
        return hash((*sorted(self.connection.items()), self.rate, self.tokens))


@dataclass(frozen=True)
class Experiment:
    """A declaration of `declared/*.yaml`; one that is `like` another states its differences alone.

    Attributes:
        model: a named configuration (`name`) or a model type (`model_type`), with the fields that are set.
        connections: label -> the fields of the configuration that make it; the first is what others are compared with.
        text: see [`Text`].
        length, batch_size: of the sequences, and sequences in a step.
        held_out: sequences that the loss is measured on.
        tokens, sweep_tokens: of a reported run, and of one that chooses a rate; more than the text has repeat it.
        rates: the first ones of the sweep.
        rate: of all connections, as in the paper, or label -> rate; None: each has the best of a sweep of its own.
        seeds: of the reported runs.
        bfloat16: matrix multiplications in bfloat16, with weights, norms and sums of outputs in float32.
        warmup: steps, of runs of any length; None: a twentieth of each.
        costs: the experiment whose measured costs are this one's too, where it has none of its own.
        published: label -> what the paper has for it, minus its baseline (nats/token).
    """

    name: str
    model: dict[str, Any]
    connections: dict[str, dict[str, Any]]
    text: Text
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

    def config(self, connection: Mapping[str, Any]) -> PreTrainedConfig:
        """Raises ValueError: the model or the connection names a field that the configuration does not have."""
        fields = self.model | connection
        named = fields.pop("name", None)
        make = partial(load, named) if named else partial(AutoConfig.for_model, fields.pop("model_type"))
        known = make()
        if unknown := [name for name in fields if not hasattr(known, name) or callable(getattr(known, name))]:
            raise ValueError(f"{', '.join(unknown)} is no field of {type(known).__name__}.")
        return make(**fields)

    def check(self) -> None:
        """Raises ValueError: a value makes no sense."""
        self._check_counts()
        if type(self.bfloat16) is not bool:
            raise ValueError(f"bfloat16 is {self.bfloat16!r}, neither true nor false.")
        declared = [] if self.rate is None else [self.rate_of(label) for label in self.connections]
        for rate in [*self.rates, *declared] or [None]:
            if not is_rate(rate):
                raise ValueError(f"a rate is {rate!r}, no number above 0 such as 0.004.")
        for seed in self.seeds or [None]:
            if not is_seed(seed):
                raise ValueError(f"a seed is {seed!r}, no whole number but {SELECTION_SEED}, which chooses settings.")
        for label, lead in self.published.items():
            if not is_number(lead) or not math.isfinite(lead):
                raise ValueError(f"published: of {label} it is {lead!r}, no number of nats such as -0.02.")
        self._check_connections()
        if self.costs:
            _declaration(self.costs)

    def _check_counts(self) -> None:
        counts = {name: getattr(self, name) for name in ("length", "batch_size", "held_out", "tokens", "sweep_tokens")}
        counts |= {"characters": self.text.characters} | ({} if self.warmup is None else {"warmup": self.warmup})
        for name, count in counts.items():
            least = 1 if name == "length" else 0  # the first token of a sequence has no loss
            if type(count) is not int or count <= least:
                raise ValueError(f"{name} is {count!r}, no whole number above {least}.")
        steps = self.steps(min(self.tokens, self.sweep_tokens))
        if 2 * (self.warmup or 0) > steps:
            raise ValueError(
                f"warmup is {self.warmup}, more than half of {steps} steps: in the other half the rate decays."
            )

    def _check_connections(self) -> None:
        for label in self.connections:
            if not isinstance(label, str) or not label.isprintable() or set(label) & set("|[<"):
                raise ValueError(f"a connection is called {label!r}: a name is text in a table, without | or [ or <.")
        if BASELINE not in self.connections:
            raise ValueError(f"of the connections none is {BASELINE}, which the others are compared with.")
        for connection in self.connections.values():  # none of them is found out after hours with the others
            config = self.config(connection)
            if (size := config.vocab_size) != self.text.vocab_size:
                raise ValueError(f"the model has a vocabulary of {size} tokens, the text of {self.text.vocab_size}.")
            if config.num_hidden_layers < 1:
                raise ValueError(f"num_hidden_layers is {config.num_hidden_layers}, no whole number above 0.")

    def rate_of(self, label: str) -> float | None:
        """The declared learning rate of a connection; None: its sweep chooses it."""
        return self.rate.get(label) if isinstance(self.rate, Mapping) else self.rate

    def setting(self) -> dict[str, Any]:
        """What all runs of a results file have in common, whatever connections, rates and seeds there are."""
        left_out = ("connections", "tokens", "sweep_tokens", "rates", "rate", "seeds", "costs", "published")
        return {name: value for name, value in asdict(self).items() if name not in left_out and value is not None}

    def steps(self, tokens: int) -> int:
        return math.ceil(tokens / (self.batch_size * self.length))


def declared(name: str) -> Experiment:
    """The experiment of that name.

    Raises:
        ValueError: there is none, or it cannot be read, or names a field that its configuration does not have.
    """
    path = _declaration(name)
    fields = read_declaration(path)
    try:
        fields |= {"text": Text(**fields["text"]), "rates": tuple(fields["rates"]), "seeds": tuple(fields["seeds"])}
        experiment = Experiment(name=name, **fields)
        experiment.check()
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    except (ArithmeticError, AttributeError, KeyError, TypeError, StrictDataclassError) as error:
        problem = " ".join(str(error).split())
        raise ValueError(f"{path} declares no experiment ({type(error).__name__}: {problem}).") from error
    return experiment


def _declaration(name: str) -> Path:
    path = DECLARED / f"{name}.yaml"
    if not path.exists():
        names = ", ".join(sorted(path.stem for path in DECLARED.glob("*.yaml")))
        raise ValueError(f"There is no experiment {name!r}, but there is {names}.")
    return path
