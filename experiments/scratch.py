"""Training from scratch: connections on the same tokens in the same order, from the same start.

A seed gives all connections the same initial backbone and the same batches, so that differences are paired. Shorter
runs choose the learning rate of each connection, on text that is not reported: as many runs for one connection as for
another, unless the best rate is the last one tried.
"""

import math
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel, set_seed

from attnres.analysis.depth_attention import depth_attention
from attnres.configuration import count_parameters
from attnres.training.balance import ExpertBalance, routers
from attnres.training.runs import Run, sequence_losses, train

from .data import TokenData, tokenizer_folder
from .declared import BASELINE, SELECTION_SEED, ScratchExperiment, ScratchRecipe
from .runs import PlannedRun, checkpoint_folder, make_runs
from .store import RunStore, results_file

BEYOND = 2.0  # the factor by which a sweep goes on if its best rate is the last one tried
WARMUP, DECAY = 0.05, 0.5  # shares of the steps
BALANCING = 0.001  # step of the routers' biases, where there are experts


def build(experiment: ScratchExperiment, connection: Mapping[str, Any], seed: int) -> PreTrainedModel:
    """Build a model at its start.

    Args:
        experiment: names the backbone.
        connection: the fields of the configuration that make the residual connection.
        seed: the weights of the backbone depend on it alone.
    """
    set_seed(seed)
    return AutoModelForCausalLM.from_config(experiment.config(connection))


@dataclass(frozen=True)
class DeclaredComparison:
    """The runs of an experiment from scratch: made where the store lacks them, read for its tables.

    Attributes:
        experiment: the declaration.
        store: holds the runs.
        data: the text; None: the runs are only read.
        work: folder for checkpoints.
        device: `cpu` or `cuda`.
        keep: folder for the models of reported runs; None: none are kept.
        compiled: whether runs are made with `torch.compile`.
    """

    experiment: ScratchExperiment
    store: RunStore
    data: TokenData | None = None
    work: Path | None = None
    device: str = "cpu"
    keep: Path | None = None
    compiled: bool = False

    def make(self, wanted: Sequence[tuple[str, float, int, int]], on_stored: Callable[[], None] = lambda: None) -> None:
        """Make the runs that the store lacks.

        Args:
            wanted: label of the connection, learning rate, tokens and seed of each run.
            on_stored: called after each run, and once if none is missing.

        Raises:
            ValueError: the store holds runs on another text of the same name, or a folder of `keep` is taken.
        """
        self.store.read()
        if self.data and (texts := self.store.other_texts(self.data.fingerprint)):
            raise ValueError(
                f"{self.store.path} holds runs on another {self.experiment.text.corpus} "
                f"({', '.join(texts)}, not {self.data.fingerprint}): choose another --results."
            )
        plan = []
        for label, rate, tokens, seed in wanted:
            recipe = ScratchRecipe(self.experiment.connections[label], rate, tokens)
            name = f"{label}, rate {rate}, {tokens:,} tokens"
            plan.append(PlannedRun(name, recipe, seed, self.experiment.steps(tokens)))
        for run in plan:
            kept, is_stored = self._kept(run), self.store.find(run.recipe, run.seed) is not None
            if kept and os.path.lexists(kept) and not is_stored:
                raise ValueError(f"--keep: {kept} exists, and the model of {run} would go there. Move it away.")
            if kept and is_stored and not kept.exists():
                print(f"{run} is stored in {self.store.path}: it is not made again, and its model is not kept.")
        fingerprint = self.data.fingerprint if self.data else ""
        identity = {"device": self.device, "compiled": self.compiled, "fingerprint": fingerprint}
        folder = partial(checkpoint_folder, self.work, identity | self.experiment.setting())
        make_runs(self.store, plan, self.measure, self.device, folder, on_stored)

    def measure(self, run: PlannedRun, on_step: Callable[[], None], work: Path | None) -> dict[str, Any]:
        """Train one run and measure it.

        Args:
            run: what to train.
            on_step: called after each step.
            work: folder for its checkpoints.

        Returns:
            Parameters, held-out loss (`after`, nats/token), training loss over the steps (`curve`), mean weights of the
            depth attention, and the seconds that it took since it was last started.
        """
        began = time.monotonic()
        experiment, recipe = self.experiment, run.recipe
        model = build(experiment, recipe.connection, run.seed)
        schedule = Run(
            run.steps,
            experiment.batch_size,
            recipe.rate,
            warmup_steps=round(WARMUP * run.steps) if experiment.warmup is None else experiment.warmup,
            decay_steps=round(DECAY * run.steps),
            seed=run.seed,
        )
        curve = train(
            model,
            self.data.order(run.seed, run.steps * experiment.batch_size),
            schedule,
            on_step,
            [ExpertBalance(BALANCING)] if routers(model) else [],
            work,
            bf16=experiment.bfloat16,
            torch_compile=self.compiled,
            use_cpu=self.device == "cpu",
        )
        held_out = self.data.held_out(run.selecting)
        result = {
            "non_embedding": count_parameters(model.config).non_embedding,
            "after": round(sequence_losses(model, held_out).mean().item(), 6),
            "curve": [[step, round(loss, 4)] for step, loss in curve],
        }
        if self.data.fingerprint:
            result["text"] = self.data.fingerprint
        if self.compiled:
            result["compiled"] = True
        result["seconds"] = round(time.monotonic() - began, 1)
        if getattr(model.config, "residual_connection", None) == "attn_res" and math.isfinite(result["after"]):
            weights = depth_attention(model, held_out[:32].split(16)).mean
            result["depth_attention"] = [[round(w, 4) for w in row[~row.isnan()].tolist()] for row in weights]
        if kept := self._kept(run):
            try:
                model.save_pretrained(kept)
                if (tokenizer := tokenizer_folder(experiment.text)).is_dir():
                    shutil.copytree(tokenizer, kept, dirs_exist_ok=True)
            except OSError as error:  # the run must be stored all the same: it took longer than its model is worth
                print(f"The model of {run} is not kept: {error}.")
        return result

    def _kept(self, run: PlannedRun) -> Path | None:
        # The name of the experiment is part of the folder's: another one has runs of the same label.
        return None if self.keep is None or run.selecting else self.keep / f"{self.experiment.name}-{run.folder}"

    def by_length(self, label: str, rate: float, selecting: bool = False) -> dict[int, dict[int, dict[str, Any]]]:
        """Return tokens -> seed -> run, of a connection at a learning rate.

        Args:
            label: of the connection.
            rate: the learning rate.
            selecting: of the runs that choose settings, instead of those that are reported.
        """
        runs, connection = {}, self.experiment.connections[label]
        for run in sorted(self.store.select(selecting), key=lambda run: run["seed"]):
            recipe = run["recipe"]
            if (recipe["connection"], recipe["rate"]) == (connection, rate):
                runs.setdefault(recipe["tokens"], {})[run["seed"]] = run
        return runs

    def swept(self, label: str) -> dict[float, float]:
        """Return learning rate -> loss on the selection text, of the rates that the sweep has tried so far."""
        connection, tokens = self.experiment.connections[label], self.experiment.sweep_tokens
        runs = [(run["recipe"], run["after"]) for run in self.store.select(selecting=True)]
        return {r["rate"]: loss for r, loss in runs if (r["connection"], r["tokens"]) == (connection, tokens)}

    def best_rate(self, label: str) -> float:
        """Return the learning rate of the sweep with the lowest loss."""
        losses = self.swept(label)
        return min(losses, key=lambda rate: math.inf if math.isnan(losses[rate]) else losses[rate])

    def choose_rates(self, labels: Sequence[str]) -> dict[str, float]:
        """Return the learning rates that these connections are reported at: declared, or chosen by a sweep."""
        declared = {label: rate for label in labels if (rate := self.experiment.rate_of(label))}
        return declared or self.sweep(labels)

    def sweep(self, labels: Sequence[str]) -> dict[str, float]:
        """Make the runs of the sweep, and return the best learning rate of each connection.

        The sweep tries the declared rates, and goes on beyond them while the best is the last one tried.
        """
        rates = {label: list(self.experiment.rates) for label in labels}
        while True:
            tokens = self.experiment.sweep_tokens
            self.make([(label, rate, tokens, SELECTION_SEED) for label in labels for rate in rates[label]])
            best = {label: self.best_rate(label) for label in labels}
            tried = {label: self.swept(label).keys() for label in labels}
            open_ended = [label for label in labels if best[label] in (min(tried[label]), max(tried[label]))]
            if not open_ended:
                return best
            for label in open_ended:
                upwards = best[label] == max(tried[label])
                rates[label].append(best[label] * (BEYOND if upwards else 1 / BEYOND))

    def shown(self, tokens: int | None = None, rates: Mapping[str, float] | None = None) -> "ShownRuns":
        """Return the runs that a page shows.

        Args:
            tokens: the length of the runs; default the declared one.
            rates: label -> learning rate; default the declared one, or the best of the sweep, or that of the last run.
        """
        tokens = tokens or self.experiment.tokens
        rates = rates or self._reported_rates(tokens)
        runs = {label: self.by_length(label, rate).get(tokens, {}) for label, rate in rates.items()}
        baseline = runs.get(BASELINE, {})
        # Differences are within seeds: what shares no seed with the baseline is not shown.
        paired = {label: [seed for seed in own if seed in baseline] for label, own in runs.items()}
        pairs = {label: [(runs[label][seed], baseline[seed]) for seed in paired[label]] for label in runs}
        return ShownRuns(self, tokens, {label: rates[label] for label in rates if pairs[label]}, pairs)

    def _reported_rates(self, tokens: int) -> dict[str, float]:
        rates = {}
        recipes = [run["recipe"] for run in self.store.select(selecting=False)]
        for label, connection in self.experiment.connections.items():
            tried = [r["rate"] for r in recipes if (r["connection"], r["tokens"]) == (connection, tokens)]
            if tried:
                best = self.experiment.rate_of(label) or (self.best_rate(label) if self.swept(label) else None)
                rates[label] = best if best in tried else tried[-1]
        return rates


@dataclass(frozen=True)
class ShownRuns:
    """The runs of a comparison that its tables and figure show.

    Attributes:
        comparison: whose runs these are.
        tokens: the length of the runs.
        rates: label -> learning rate, of the connections that share a seed with the baseline; may be empty.
        pairs: label -> the run of the connection and that of the baseline, for each seed that both have.
    """

    comparison: DeclaredComparison
    tokens: int
    rates: dict[str, float]
    pairs: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]]

    def differences(self, label: str) -> list[float]:
        """Return the held-out loss of a connection minus that of the baseline, for each seed."""
        return [run["after"] - standard["after"] for run, standard in self.pairs[label]]

    def leads(self, label: str) -> list[list[tuple[int, float]]]:
        """Return the training loss minus that of the baseline, as (step, difference), for each seed."""
        curves = [(run["curve"], standard["curve"]) for run, standard in self.pairs[label]]
        return [[(step, a - b) for (step, a), (_, b) in zip(*pair, strict=True)] for pair in curves]


def stored_comparison(name: str) -> DeclaredComparison | None:
    """Return the comparison `name` with its runs in the repository; None if there are none."""
    experiment, path = ScratchExperiment.load(name), results_file(name)
    return DeclaredComparison(experiment, RunStore(experiment, path)) if path.exists() else None
