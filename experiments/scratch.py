"""Connections from scratch: each at its own best rate, on the same tokens in the same order, from the same start.

One seed gives all connections the same initial backbone and the same batches, so that differences are paired. Every
connection's learning rate is chosen by shorter runs with a seed of their own, on text that is not reported, as many for
one as for another unless the best of them is the last one tried.
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
from transformers.utils import CONFIG_NAME

from attnres.analysis.depth_attention import depth_attention
from attnres.configuration import count_parameters
from attnres.training.balance import ExpertBalance, routers
from attnres.training.runs import Run, sequence_losses, train
from attnres.utils.files import atomic_directory

from .data import Data, tokenizer_folder
from .harness import SELECTION_SEED, Planned, Store, checkpoints, is_number, is_rate, make_runs
from .scratch_declared import BASELINE, Experiment, Recipe

BEYOND = 2.0  # a sweep whose best rate is the last one tried goes on by this factor
WARMUP, DECAY = 0.05, 0.5  # shares of the steps
BALANCING = 0.001  # of experts, where there are any
ENTROPY = "expert_load_entropy"


def build(experiment: Experiment, connection: Mapping[str, Any], seed: int) -> PreTrainedModel:
    """The model at its start; the backbone's weights depend on the seed alone."""
    set_seed(seed)
    return AutoModelForCausalLM.from_config(experiment.config(connection))


def check_run(run: Mapping[str, Any]) -> None:
    """Raises KeyError, TypeError or ValueError: a stored run is none of these experiments."""
    recipe = Recipe(**run["recipe"])
    if not (is_rate(recipe.rate) and type(recipe.tokens) is int and isinstance(recipe.connection, dict)):
        raise ValueError(f"recipe: {run['recipe']}")
    if not run["curve"] or not all(type(step) is int and is_number(loss) for step, loss in run["curve"]):
        raise ValueError("the curve must hold pairs of a step and a loss")


class WholeRunBalance(ExpertBalance):
    """Leaves its measurements out of the log, so that at the end they are those of all steps since the last start."""

    def on_log(self, *args, **kwargs) -> None:
        pass


def measure(
    experiment: Experiment,
    data: Data,
    run: Planned,
    on_step: Callable[[], None],
    work: Path | None,
    device: str,
    keep: Path | None = None,
    compiled: bool = False,
) -> dict[str, Any]:
    """One run: held-out loss (nats/token), training loss over the steps, and what the depth attention became.

    The model goes to the folder `keep`, with the tokenizer if that is at hand. `compiled`: trains with `torch.compile`.
    """
    began = time.monotonic()
    recipe, seed = run.recipe, run.seed
    model = build(experiment, recipe.connection, seed)
    schedule = Run(
        run.steps,
        experiment.batch_size,
        recipe.rate,
        warmup_steps=round(WARMUP * run.steps) if experiment.warmup is None else experiment.warmup,
        decay_steps=round(DECAY * run.steps),
        seed=seed,
    )
    balance = WholeRunBalance(BALANCING)
    curve = train(
        model,
        data.order(seed, run.steps * experiment.batch_size),
        schedule,
        on_step,
        [balance] if routers(model) else [],
        work,
        bf16=experiment.bfloat16,
        torch_compile=compiled,
        use_cpu=device == "cpu",
    )
    held_out = data.held_out(run.selecting)
    losses = sequence_losses(model, held_out)
    result = {
        "non_embedding": count_parameters(model.config).non_embedding,
        "after": round(losses.mean().item(), 6),
        "curve": [[step, round(loss, 4)] for step, loss in curve],
    }
    if data.fingerprint:
        result["text"] = data.fingerprint
    if compiled:
        result["compiled"] = True
    if ENTROPY in (metrics := balance.metrics()):  # there are experts, and a resume has left a step to measure them in
        result[ENTROPY] = round(metrics[ENTROPY], 4)
    result["seconds"] = round(time.monotonic() - began, 1)
    if getattr(model.config, "residual_connection", None) == "attn_res" and math.isfinite(result["after"]):
        weights = depth_attention(model, held_out[:32].split(16)).mean
        result["depth_attention"] = [[round(w, 4) for w in row[~row.isnan()].tolist()] for row in weights]
    if keep is not None:
        _keep(model, tokenizer_folder(experiment.text), keep)
    return result


def _keep(model: PreTrainedModel, tokenizer: Path, out: Path) -> None:
    try:
        with atomic_directory(out, overwrite=False, marker=CONFIG_NAME) as stage:
            model.save_pretrained(stage)
            if tokenizer.is_dir():
                shutil.copytree(tokenizer, stage, dirs_exist_ok=True)
    except FileExistsError:  # the run is worth more than that
        print(f"Another process has made {out} meanwhile: this model is not kept.")


@dataclass(frozen=True)
class Comparison:
    """The runs of an experiment: made on `device`, from checkpoints in `work` where they were stopped, and stored.

    The models of those that are reported go to folders of `keep`. `compiled`: they train with `torch.compile`.
    """

    experiment: Experiment
    store: Store
    data: Data | None = None
    work: Path | None = None
    device: str = "cpu"
    keep: Path | None = None
    compiled: bool = False

    def make(self, wanted: Sequence[tuple[str, float, int, int]], on_stored: Callable[[], None] = lambda: None) -> None:
        """Make what the store lacks of (label of a connection, rate, tokens, seed); `on_stored` as in [`make_runs`].

        Raises:
            ValueError: the store holds runs on another text of the same name.
        """
        self.store.read()
        if self.data and (texts := self.store.other_texts(self.data.fingerprint)):
            raise ValueError(
                f"{self.store.path} holds runs on another {self.experiment.text.corpus} "
                f"({', '.join(texts)}, not {self.data.fingerprint}): choose another --results."
            )
        plan = [self._planned(*run) for run in wanted]
        for run in plan:
            kept = self._kept(run)
            is_stored = self.store.find(run.recipe, run.seed)
            if kept and not is_stored and os.path.lexists(kept):
                raise ValueError(
                    f"--keep: {kept} exists, perhaps of a call that was stopped before it stored the run; the model of "
                    f"{run} would go there. Move it away."
                )
            if kept and is_stored and not kept.exists():
                print(f"{run} is stored in {self.store.path}: it is not made again, and its model is not kept.")
        folder = partial(checkpoints, self.work, self._identity)
        make_runs(self.store, plan, self._measure, self.device, folder, on_stored)

    def runs(self, label: str, rate: float, tokens: int) -> dict[int, dict[str, Any]]:
        """seed -> the stored run of that seed, of those that are reported."""
        return self.by_length(label, rate).get(tokens, {})

    def by_length(self, label: str, rate: float, selecting: bool = False) -> dict[int, dict[int, dict[str, Any]]]:
        """tokens -> seed -> the stored run, of those that are reported or of those that settings are chosen by."""
        found, connection = {}, self.experiment.connections[label]
        for run in sorted(self.store.runs(selecting), key=lambda run: run["seed"]):
            recipe = run["recipe"]
            if (recipe["connection"], recipe["rate"]) == (connection, rate):
                found.setdefault(recipe["tokens"], {})[run["seed"]] = run
        return found

    def pairs(self, label: str, rates: Mapping[str, float], tokens: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Runs of a connection and of the baseline, for each seed that both have."""
        runs, baseline = (self.runs(name, rates[name], tokens) for name in (label, BASELINE))
        return [(run, baseline[seed]) for seed, run in runs.items() if seed in baseline]

    def differences(self, label: str, rates: Mapping[str, float], tokens: int) -> list[float]:
        """Held-out loss minus that of the baseline, for each of these pairs."""
        return [run["after"] - standard["after"] for run, standard in self.pairs(label, rates, tokens)]

    def leads(self, label: str, rates: Mapping[str, float], tokens: int) -> list[list[tuple[int, float]]]:
        """Training loss minus that of the baseline, as points of each of these pairs."""
        curves = [(run["curve"], standard["curve"]) for run, standard in self.pairs(label, rates, tokens)]
        return [[(step, a - b) for (step, a), (_, b) in zip(*pair, strict=True)] for pair in curves]

    def reported(self, tokens: int) -> dict[str, float]:
        """label -> rate, of the connections that share a seed with the baseline in the runs of that length.

        The rate is the declared one or the best of the sweep, or else that of the last run.
        """
        rates = {}
        for label, connection in self.experiment.connections.items():
            recipes = [run["recipe"] for run in self.store.runs(selecting=False)]
            tried = [r["rate"] for r in recipes if (r["connection"], r["tokens"]) == (connection, tokens)]
            if tried:
                best = self.experiment.rate_of(label) or (self.best_rate(label) if self.swept(label) else None)
                rates[label] = best if best in tried else tried[-1]
        if BASELINE not in rates:
            return {}
        return {label: rate for label, rate in rates.items() if self.differences(label, rates, tokens)}

    def swept(self, label: str) -> dict[float, float]:
        """The loss on the selection text by rate, of the rates tried so far."""
        connection, tokens = self.experiment.connections[label], self.experiment.sweep_tokens
        runs = [(run["recipe"], run["after"]) for run in self.store.runs(selecting=True)]
        return {r["rate"]: loss for r, loss in runs if (r["connection"], r["tokens"]) == (connection, tokens)}

    def best_rate(self, label: str) -> float:
        """The rate of the sweep with the lowest loss on the selection text."""
        losses = self.swept(label)
        return min(losses, key=lambda rate: math.inf if math.isnan(losses[rate]) else losses[rate])

    def choose_rates(self, labels: Sequence[str]) -> dict[str, float]:
        """The learning rates that these connections are reported at."""
        declared = {label: rate for label in labels if (rate := self.experiment.rate_of(label))}
        return declared or self.sweep(labels)

    def sweep(self, labels: Sequence[str]) -> dict[str, float]:
        """The best rate of each connection: among the first ones, and beyond while the best is the last one tried."""
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

    @property
    def _identity(self) -> dict[str, Any]:
        text = self.data.fingerprint if self.data else ""
        return {"device": self.device, "compiled": self.compiled, "fingerprint": text, **self.experiment.setting()}

    def _planned(self, label: str, rate: float, tokens: int, seed: int) -> Planned:
        recipe = Recipe(self.experiment.connections[label], rate, tokens)
        return Planned(f"{label}, rate {rate}, {tokens:,} tokens", recipe, seed, self.experiment.steps(tokens))

    def _measure(self, run: Planned, on_step: Callable[[], None], work: Path | None) -> dict[str, Any]:
        return measure(self.experiment, self.data, run, on_step, work, self.device, self._kept(run), self.compiled)

    def _kept(self, run: Planned) -> Path | None:
        """Where the model of a run goes, if it is kept; another experiment has runs of the same label."""
        return None if self.keep is None or run.selecting else self.keep / f"{self.experiment.name}-{run.folder}"
