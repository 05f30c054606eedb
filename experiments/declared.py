"""The experiments that are declared in `declared/NAME.yaml` (from scratch) and `declared/healing/SIZE.yaml`.

A declaration names what is trained, on which text, and for how long. The types of its values are checked as it is
loaded.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import ceil
from pathlib import Path
from typing import Any, Literal

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig

from attnres import CONNECTIONS
from attnres.attn_res_attnres import AttnRes
from attnres.configuration import load
from attnres.utils.yaml_files import read_yaml

DECLARED = Path(__file__).parent / "declared"
SELECTION_SEED = 10  # the seed of runs that choose settings, on text that is not reported
BASELINE = "standard"
HEALING_SEEDS = (0, 1, 2)  # the seeds of reported runs of healing
FROM_SCRATCH = {
    "claim": "attention residuals against the residual stream, dense and deep",
    "moe": "a small MoE",
    "ablations": "the forms of the paper's Table 4, and block sizes",
    "depth": "whether the gain grows with depth, at equal parameters",
}


@strict
@dataclass
class Corpus:
    """A text, and the vocabulary of the BPE that is trained on it.

    Attributes:
        corpus: The name of the folder that holds `train.txt` and `valid.txt`.
        vocab_size: The tokens of the vocabulary, at most 65,536.
        characters: How much of `train.txt` is read, in whole documents.
    """

    corpus: str
    vocab_size: int
    characters: int

    @property
    def name(self) -> str:
        """The name of its prepared file."""
        return f"{self.corpus}-{self.vocab_size}-{self.characters}"


@strict
@dataclass
class ScratchExperiment:
    """A comparison from scratch.

    Attributes:
        name: The name of the file.
        model: A named configuration (`name`) or a model type (`model_type`), and the fields that are set.
        connections: Label -> the fields of the configuration that make the residual connection.
        text: The text to train on.
        length: Tokens in a sequence.
        batch_size: Sequences in a step.
        held_out: Sequences that a loss is measured on.
        tokens: Tokens of a reported run.
        sweep_tokens: Tokens of a run that chooses a learning rate.
        rates: The learning rates to try.
        seeds: The seeds of the reported runs.
        rate: The learning rate of all connections, or label -> rate; `None` for the best of each sweep.
        rate_seed: The reported seed whose whole runs chose `rate`; `None` if no reported run chose it.
        bfloat16: Whether to multiply matrices in bfloat16. Weights, norms and sums of outputs stay in float32.
        warmup: Steps of warm-up; `None` for a twentieth of the run.
        costs: The experiment whose measured costs are used where this one has none.
        runs_of: The experiment that the runs of standard and Block AttnRes were taken from, if they were.
        pairs: Connections to compare with each other instead of with the standard model, such as `[Full, DenseFormer]`.
        rate_pairs: Label -> a learning rate, of comparisons at other rates than those of the tables.
        title: What tells it from experiments of the same size, in figures; may be empty.
        published: Label -> the loss that the paper reports, minus its baseline (nats/token).
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
    rates: list[float]
    seeds: list[int]
    rate: float | dict[str, float] | None = None
    rate_seed: int | None = None
    bfloat16: bool = False
    warmup: int | None = None
    costs: str | None = None
    runs_of: str | None = None
    pairs: list[list[str]] = field(default_factory=list)
    rate_pairs: list[dict[str, float]] = field(default_factory=list)
    title: str = ""
    published: dict[str, float] = field(default_factory=dict)

    @classmethod
    def load(cls, name: str) -> "ScratchExperiment":
        """Load the declaration `name`. Raise an error if a field is unknown or has another type."""
        values = read_declaration(name)
        experiment = cls(name=name, **values | {"text": Corpus(**values["text"])})
        for connection in experiment.connections.values():
            experiment.config(connection)
        return experiment

    def config(self, connection: Mapping[str, Any]) -> PreTrainedConfig:
        """Return the configuration of the model with the fields of a connection. Raise ValueError if one is unknown."""
        values = {**self.model, **connection}
        if name := values.pop("name", None):
            return load(name, **values)
        model_type = values.pop("model_type")
        # `transformers` would accept a misspelt field, which would have no effect.
        known = AutoConfig.for_model(model_type)
        if unknown := [field for field in values if not hasattr(known, field)]:
            raise ValueError(f"{unknown[0]!r} is not a field of {type(known).__name__}.")
        return AutoConfig.for_model(model_type, **values)

    def has_kernels(self, label: str) -> bool:
        """Return whether `attnres.accelerated` has kernels that read for a connection. No other model has any."""
        config = self.config(self.connections[label])
        connection = CONNECTIONS[config.residual_connection].form(config)(config, 1)
        # Some of the switches exclude the kernels.
        return isinstance(connection, AttnRes) and bool(getattr(connection, "is_plain", True))

    def rate_of(self, label: str) -> float | None:
        """Return the declared learning rate of a connection; `None` if its sweep chooses it."""
        return self.rate.get(label) if isinstance(self.rate, dict) else self.rate

    def setting(self) -> dict[str, Any]:
        """Return what all runs of a results file share, whatever their connections, rates, seeds and tokens."""
        free = {"connections", "tokens", "sweep_tokens", "rates", "rate", "seeds"}
        free |= {"rate_seed", "costs", "runs_of", "pairs", "rate_pairs", "title", "published"}
        return {name: value for name, value in asdict(self).items() if name not in free and value is not None}

    def steps(self, tokens: int) -> int:
        """Return the number of optimizer steps of a run."""
        return ceil(tokens / (self.batch_size * self.length))


@strict
@dataclass
class HealingRecipe:
    """How a pretrained model is trained on.

    Attributes:
        steps: Optimizer steps.
        block_size: Sublayers in a block of AttnRes; `None` for the standard model, 1 for Full.
        gated: Whether `h = residual + gamma * depth attention`, with gamma = 0 at the start.
        trained: The tensors that are trained.
        rate: The peak learning rate of the backbone.
        attnres_rate: The peak learning rate of the tensors that the retrofit adds.
        warmup: The share of the steps that warms up.
        scale: The scale of the retrofit: `sum` is exact, `mean` is not.
        alone: The share of the steps that trains the AttnRes tensors alone, before the others join.
    """

    steps: int = 256
    block_size: int | None = None
    gated: bool = False
    trained: Literal["all", "all but key norms", "AttnRes", "norms"] = "all"
    rate: float = 1e-3
    attnres_rate: float = 1e-3
    warmup: float = 0.1
    scale: Literal["sum", "mean"] = "sum"
    alone: float = 0.0

    @property
    def is_baseline(self) -> bool:
        """Return whether the recipe trains all tensors of the standard model."""
        return self.block_size is None and self.trained == "all"


@strict
@dataclass
class HealingExperiment:
    """An experiment of healing.

    Attributes:
        name: `healing-` and the name of the file.
        length: Tokens in a training sequence.
        held_out_length: Tokens in a sequence that the loss is measured on.
        batch_size: Sequences in a step.
        report: Label -> a recipe that is measured with several seeds.
        sweeps: Title -> label -> a recipe that is tried with the selection seed.
        text: The text of a model of `experiments claim`; `None` for the corpus folder as it is.
        held_out: Sequences that the loss is measured on, if `text` is given.
        seen: Tokens of `text` that the model was pretrained on with seed 0. Healing trains on the others.
    """

    name: str
    length: int
    held_out_length: int
    batch_size: int
    report: dict[str, HealingRecipe]
    sweeps: dict[str, dict[str, HealingRecipe]]
    text: Corpus | None = None
    held_out: int | None = None
    seen: int = 0

    @classmethod
    def load(cls, name: str) -> "HealingExperiment":
        """Load the declaration `name`. Raise an error if a field is unknown or has another type."""

        def recipes(declared: Mapping[object, Mapping[str, Any]]) -> dict[str, HealingRecipe]:
            return {str(label): HealingRecipe(**values) for label, values in declared.items()}

        values = read_declaration(name)
        values["report"] = recipes(values["report"])
        values["sweeps"] = {title: recipes(sweep) for title, sweep in values["sweeps"].items()}
        text = Corpus(**values["text"]) if "text" in values else None
        return cls(name=name, **values | {"text": text})

    def setting(self) -> dict[str, Any]:
        """Return what all runs of a results file share."""
        text = {"text": asdict(self.text), "seen": self.seen, "held_out": self.held_out} if self.text else {}
        return {name: getattr(self, name) for name in ("length", "held_out_length", "batch_size")} | text

    def baseline(self, recipe: HealingRecipe) -> HealingRecipe:
        """Return the reported recipe that trains all of the standard model for as many steps."""
        return next(other for other in self.report.values() if other.is_baseline and other.steps == recipe.steps)


def read_declaration(name: str) -> dict[str, Any]:
    """Return the fields of a declaration. If it is `like` another one, fields that it lacks come from that one."""
    values = read_yaml(DECLARED / f"{name.replace('healing-', 'healing/')}.yaml")
    like = values.pop("like", None)
    return read_declaration(like) | values if like else values


def names(experiment: str) -> list[str]:
    """Return the names of the declarations of an experiment, such as `claim-cpu` and `claim-gpu` of `claim`."""
    paths = [*DECLARED.glob(f"{experiment}-*.yaml"), *DECLARED.glob(f"{experiment}/*.yaml")]
    return sorted(path.relative_to(DECLARED).with_suffix("").as_posix().replace("/", "-") for path in paths)
