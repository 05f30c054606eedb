"""Training from scratch: connections on the same tokens in the same order, from the same start.

A seed gives all connections the same initial backbone and the same batches, so that differences are paired. Shorter
runs choose the learning rate of each connection, on text that is not reported. Each connection has as many of these
runs as another, unless its best rate is the last one tried.
"""

import math
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel, set_seed

from attnres.analysis.depth_attention import depth_attention
from attnres.configuration import count_parameters
from attnres.training.callbacks import ExpertBalance, routers

from .data import TokenData, tokenizer_folder
from .declared import BASELINE, SELECTION_SEED, ScratchExperiment
from .runs import PlannedRun, make_runs
from .store import RunStore
from .training import Run, sequence_losses, train

BEYOND = 2.0  # the factor by which a sweep goes on if its best rate is the last one tried
WARMUP, DECAY = 0.05, 0.5  # shares of the steps
BALANCING = 0.001  # the step of the routers' biases, where there are experts


def build(experiment: ScratchExperiment, connection: Mapping[str, Any], seed: int) -> PreTrainedModel:
    """Build a model at its start. The weights of its backbone depend on the seed alone."""
    set_seed(seed)
    return AutoModelForCausalLM.from_config(experiment.config(connection))


@dataclass(frozen=True)
class DeclaredComparison:
    """The runs of an experiment from scratch: made where the store lacks them, and read for its tables.

    Attributes:
        experiment: The declaration.
        store: The stored runs.
        data: The text; `None` if the runs are only read.
        work: The folder for checkpoints; `None` if the runs are only read.
        device: `cpu` or `cuda`.
        keep: The folder for the models of reported runs; `None` to keep none.
        compiled: Whether runs are made with `torch.compile`.
    """

    experiment: ScratchExperiment
    store: RunStore
    data: TokenData | None = None
    work: Path | None = None
    device: str = "cpu"
    keep: Path | None = None
    compiled: bool = False

    @property
    def text(self) -> TokenData:
        """The text of runs that are made."""
        if self.data is None:
            raise ValueError("runs that are only read have no text.")
        return self.data

    def make(self, settings: Sequence[tuple[str, float, int, int]]) -> None:
        """Make the runs that the store lacks.

        Args:
            settings: The label of the connection, learning rate, tokens and seed of each run.

        Raises:
            ValueError: The store holds runs on another text of the same name, or a folder for a model exists.
        """
        if self.work is None:
            raise ValueError("runs that are made need a folder for their checkpoints.")
        self.store.read()
        self.store.check_text(self.text.fingerprint)
        plan = []
        for label, rate, tokens, seed in settings:
            recipe = {"connection": self.experiment.connections[label], "rate": rate, "tokens": tokens}
            name = f"{label}, rate {rate}, {tokens:,} tokens"
            plan.append(PlannedRun(name, recipe, seed, self.experiment.steps(tokens)))
        for run in plan:
            if (kept := self._kept(run)) is None:
                continue
            is_stored, is_taken = self.store.find(run.recipe, run.seed) is not None, os.path.lexists(kept)
            if is_taken and not is_stored:
                raise ValueError(f"--keep: {kept} exists, and the model of {run} would go there. Move it away.")
            if is_stored and not is_taken:
                print(f"{run} is stored in {self.store.path}: it is not made again, and its model is not kept.")
        identity = {"device": self.device, "compiled": self.compiled, "fingerprint": self.text.fingerprint}
        identity |= self.experiment.setting()
        make_runs(self.store, plan, self.measure, self.work, identity, self.device)

    def measure(self, run: PlannedRun, on_step: Callable[[], None], work: Path) -> dict[str, Any]:
        """Train one run and measure it.

        Args:
            run: The run.
            on_step: Called after each step.
            work: The folder for its checkpoints.

        Returns:
            Parameters, held-out loss (`after`, nats/token), training loss over the steps (`curve`), mean weights of the
            depth attention, and the seconds since the run was last started.
        """
        began = time.monotonic()
        experiment, recipe = self.experiment, run.recipe
        model = build(experiment, recipe["connection"], run.seed)
        schedule = Run(
            run.steps,
            experiment.batch_size,
            recipe["rate"],
            warmup_steps=round(WARMUP * run.steps) if experiment.warmup is None else experiment.warmup,
            decay_steps=round(DECAY * run.steps),
            seed=run.seed,
        )
        curve = train(
            model,
            self.text.order(run.seed, run.steps * experiment.batch_size),
            schedule,
            work,
            on_step,
            [ExpertBalance(BALANCING)] if routers(model) else [],
            bf16=experiment.bfloat16,
            torch_compile=self.compiled,
            use_cpu=self.device == "cpu",
        )
        held_out = self.text.held_out(run.selecting)
        result = {
            "non_embedding": count_parameters(model.config).non_embedding,
            "after": round(sequence_losses(model, held_out).mean().item(), 6),
            "curve": [[step, round(loss, 4)] for step, loss in curve],
            "text": self.text.fingerprint,
        }
        if self.compiled:
            result["compiled"] = True
        result["seconds"] = round(time.monotonic() - began, 1)
        # A model that diverged has no weights to store.
        if getattr(model.config, "residual_connection", None) == "attn_res" and math.isfinite(result["after"]):
            weights = depth_attention(model, held_out[:32].split(16)).mean
            result["depth_attention"] = [[round(w, 4) for w in row[~row.isnan()].tolist()] for row in weights]
        if kept := self._kept(run):
            try:
                model.save_pretrained(kept)
                if (tokenizer := tokenizer_folder(experiment.text)).is_dir():  # not if only the token ids were copied
                    shutil.copytree(tokenizer, kept, dirs_exist_ok=True)
            except OSError as error:  # the run is stored all the same: it took longer than its model is worth
                print(f"The model of {run} is not kept: {error}.")
        return result

    def _kept(self, run: PlannedRun) -> Path | None:
        """Return the folder for the model of a run; `None` if it is not kept."""
        # Another experiment has runs of the same label, so the folder names the experiment too.
        return None if self.keep is None or run.selecting else self.keep / f"{self.experiment.name}-{run.folder}"

    def runs(
        self, label: str, rate: float | None = None, tokens: int | None = None, selecting: bool = False
    ) -> list[dict[str, Any]]:
        """Return the stored runs of a connection, the last one last.

        Args:
            label: The label of the connection.
            rate: The learning rate; `None` for all.
            tokens: The tokens of a run; `None` for all.
            selecting: Whether to return the runs that choose settings, instead of those that are reported.
        """
        recipe = {"connection": self.experiment.connections[label], "rate": rate, "tokens": tokens}
        given = {name: value for name, value in recipe.items() if value is not None}
        return [run for run in self.store.select(selecting) if given.items() <= run["recipe"].items()]

    def swept(self, label: str) -> dict[float, float]:
        """Return learning rate -> loss on the selection text, of the rates that the sweep has tried so far."""
        runs = self.runs(label, tokens=self.experiment.sweep_tokens, selecting=True)
        return {run["recipe"]["rate"]: run["after"] for run in runs}

    def best_rate(self, label: str) -> float | None:
        """Return the learning rate of the sweep with the lowest loss; `None` if there was no sweep."""
        losses = self.swept(label)
        # The loss of a run that diverged is NaN.
        return min(losses, key=lambda rate: math.inf if math.isnan(losses[rate]) else losses[rate], default=None)

    def choose_rates(self, labels: Sequence[str]) -> dict[str, float]:
        """Return the learning rates that connections are reported at: declared, or chosen by a sweep."""
        declared = {label: rate for label in labels if (rate := self.experiment.rate_of(label))}
        others = [label for label in labels if label not in declared]
        return declared | (self.sweep(others) if others else {})

    def sweep(self, labels: Sequence[str]) -> dict[str, float]:
        """Make the runs of the sweep, and return the best learning rate of each connection.

        The sweep tries the declared rates, and goes on beyond them while the best is the last one tried.
        """
        tokens = self.experiment.sweep_tokens
        pending = [(label, rate, tokens, SELECTION_SEED) for label in labels for rate in self.experiment.rates]
        best: dict[str, float] = {}
        while pending:
            self.make(pending)
            best, pending = {label: rate for label in labels if (rate := self.best_rate(label))}, []
            for label, rate in best.items():
                tried = self.swept(label)
                if rate == max(tried):
                    pending.append((label, rate * BEYOND, tokens, SELECTION_SEED))
                elif rate == min(tried):
                    pending.append((label, rate / BEYOND, tokens, SELECTION_SEED))
        return best

    def shown(self, tokens: int | None = None, rates: Mapping[str, float] | None = None) -> "ShownRuns":
        """Return the runs that a page shows.

        Args:
            tokens: The length of the runs; `None` for the declared one.
            rates: Label -> learning rate; `None` for the declared one, or else the best of the sweep.
        """
        experiment, tokens = self.experiment, tokens or self.experiment.tokens
        chosen = rates or {
            label: experiment.rate_of(label) or self.best_rate(label) for label in experiment.connections
        }
        rates = {label: rate for label, rate in chosen.items() if rate}
        runs = {label: {run["seed"]: run for run in self.runs(label, rate, tokens)} for label, rate in rates.items()}
        baseline = runs.get(BASELINE, {})
        # Differences are within seeds: a run that shares no seed with the baseline is not shown.
        pairs = {
            label: [(by_seed[seed], baseline[seed]) for seed in sorted(by_seed.keys() & baseline)]
            for label, by_seed in runs.items()
        }
        return ShownRuns(self, tokens, {label: rates[label] for label in rates if pairs[label]}, pairs)


@dataclass(frozen=True)
class ShownRuns:
    """The runs of a comparison that its tables show.

    Attributes:
        comparison: The comparison.
        tokens: The length of the runs.
        rates: Label -> learning rate, of the connections that share a seed with the baseline; may be empty.
        pairs: Label -> the run of the connection and that of the baseline, for each seed that both have.
    """

    comparison: DeclaredComparison
    tokens: int
    rates: dict[str, float]
    pairs: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]]

    def differences(self, label: str, without: int | None = None) -> list[float]:
        """Return the held-out loss of a connection minus that of the baseline, for each seed.

        Args:
            label: The connection.
            without: A seed to leave out.
        """
        return [run["after"] - standard["after"] for run, standard in self.pairs[label] if run["seed"] != without]
