"""Does healing pay? A pretrained model continued for equal tokens, as it is and with attention residuals.

    python -m experiments healing --checkpoint DIR --corpus DIR

The settings were chosen by the runs of `SWEEPS`, on one seed and on a tenth of the training text; `REPORT` holds what
is measured with other seeds on the validation text. What came out: `experiments/healing.md`.
"""

import argparse
import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from attnres.analysis.depth_attention import depth_attention
from attnres.analysis.tables import update_tables
from attnres.conversion import retrofit
from attnres.residual_attnres import residual_tensors
from attnres.training.packing import in_blocks
from attnres.training.runs import Run, sequence_losses, train
from attnres.training.text import read_documents, token_stream

from .data import Data
from .harness import SELECTION_SEED, Planned, Store, make_runs, spread

HERE = Path(__file__).parent
LENGTH, HELD_OUT_LENGTH = 256, 512
DECAY_SHARE = 0.5


@dataclass(frozen=True)
class Recipe:
    """How one model is continued. Rates are absolute; `attnres_rate` is that of pseudo-queries and key norms."""

    block_size: int | None = None  # None: the standard model; 1: Full
    trained: str = "all"
    rate: float = 1e-3
    attnres_rate: float = 1e-3
    warmup: float = 0.1  # share of the steps
    scale: str = "sum"
    alone: float = 0.0  # share of the steps that trains the AttnRes tensors alone, before the rest joins

    @property
    def is_standard(self) -> bool:
        return self.block_size is None


# What `trained` means, by (name of the tensor, is it one of the AttnRes tensors).
TRAINED: dict[str, Callable[[str, bool], bool]] = {
    "all": lambda name, attnres: True,
    "all but key norms": lambda name, attnres: not (attnres and name.endswith("_norm.weight")),
    "AttnRes": lambda name, attnres: attnres,
    "queries": lambda name, attnres: attnres and not name.endswith("_norm.weight"),
    "norms": lambda name, attnres: not attnres and "norm" in name,
}

STANDARD = Recipe(rate=3e-4)
FULL = Recipe(1, rate=3e-4, attnres_rate=3e-4)
SWEEPS: dict[str, dict[str, Recipe]] = {
    "standard: rate": {f"{rate:g}": replace(STANDARD, rate=rate) for rate in (3e-5, 1e-4, 2e-4, 3e-4, 1e-3)},
    "Full: rate of the AttnRes tensors": {
        f"{rate:g}": replace(FULL, attnres_rate=rate) for rate in (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
    },
    "Full, AttnRes tensors only: their rate": {
        f"{rate:g}": replace(FULL, trained="AttnRes", attnres_rate=rate) for rate in (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
    },
    "changes of the schedule": {
        "standard: none": STANDARD,
        "standard: no warm-up": replace(STANDARD, warmup=0.0),
        "Full: none": FULL,
        "Full: no warm-up": replace(FULL, warmup=0.0),
        "Full: `mean` for `sum`": replace(FULL, scale="mean"),
        "Full: key norms not trained": replace(FULL, trained="all but key norms"),
        "Full: first quarter AttnRes tensors only, at 1e-3": replace(FULL, alone=0.25, attnres_rate=1e-3),
    },
    "standard, its norms only: their rate": {
        f"{rate:g}": replace(STANDARD, trained="norms", rate=rate) for rate in (1e-3, 3e-3, 1e-2, 3e-2)
    },
}
REPORTED = {"Full": 1, "Block, S=2": 2, "Block, S=4": 4}
REPORT: dict[str, Recipe] = {
    "standard": replace(STANDARD, warmup=0.0),
    **{name: replace(FULL, block_size=size, warmup=0.0) for name, size in REPORTED.items()},
    **{
        f"{name}, AttnRes only": replace(FULL, block_size=size, warmup=0.0, trained="AttnRes", attnres_rate=1e-3)
        for name, size in REPORTED.items()
    },
    # The control of the last three: as many steps for the few vectors that the standard model has anyway.
    "standard, its norms only": replace(STANDARD, warmup=0.0, trained="norms", rate=1e-2),
}


def load_data(corpus: Path, tokenizer: PreTrainedTokenizerBase) -> Data:
    """`train.txt` of the folder, every tenth document of it kept for selection, and `valid.txt`.

    Sequences have `LENGTH` tokens to train on, and `HELD_OUT_LENGTH` else. Documents stand after the beginning-of-text
    token: that is how the stories models were trained.
    """
    train_documents, valid = (read_documents(corpus / f"{name}.txt") for name in ("train", "valid"))

    def blocks(documents: list[str], length: int) -> Tensor:
        stream = token_stream(documents, tokenizer, begin=True)
        if len(stream) < length:
            raise ValueError(f"{len(stream)} tokens are less than one block of {length}. Give a longer text.")
        return torch.from_numpy(in_blocks(stream, length))

    return Data(
        blocks([d for i, d in enumerate(train_documents) if i % 10], LENGTH),
        blocks(train_documents[::10], HELD_OUT_LENGTH),
        blocks(valid, HELD_OUT_LENGTH),
    )


def prepare(start: PreTrainedModel, recipe: Recipe) -> PreTrainedModel:
    """A copy of the pretrained model under the recipe's residual connection, at the same function for `sum`."""
    model = copy.deepcopy(start)
    if not recipe.is_standard:
        model = retrofit(model, block_size=recipe.block_size, scale=recipe.scale)
    return model


def continue_training(
    model: PreTrainedModel, blocks: Tensor, recipe: Recipe, steps: int, batch_size: int, seed: int, on_step: Callable
) -> None:
    """Train in place on `blocks` `[steps * batch_size, LENGTH]`."""
    alone = round(recipe.alone * steps)
    for first, last, trained in ((0, alone, "AttnRes"), (alone, steps, recipe.trained)):
        if first == last:
            continue
        attnres = residual_tensors(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(TRAINED[trained](name, name in attnres))
        run = Run(
            last - first,
            batch_size,
            recipe.rate,
            warmup_steps=round(recipe.warmup * (last - first)),
            decay_steps=round(DECAY_SHARE * steps) if last == steps else 0,
            residual_lr_factor=recipe.attnres_rate / recipe.rate,
            seed=seed,
        )
        train(model, blocks[first * batch_size : last * batch_size], run, on_step)


class Healing:
    """The runs of the experiment: made with a pretrained model, and stored."""

    def __init__(self, start: PreTrainedModel, data: Data, store: Store):
        self.start, self.data, self.store = start, data, store
        self.steps, self.batch_size = (store.content["setting"][name] for name in ("steps", "batch_size"))
        self.loss_at_step_0 = cache(self._loss_at_step_0)

    def make(self, wanted: Sequence[tuple[str, Recipe, int]]) -> None:
        """Make what the store lacks of (label, recipe, seed)."""
        make_runs(self.store, [Planned(*run, self.steps) for run in wanted], self._measure)

    def _measure(self, run: Planned, on_step: Callable[[], None]) -> dict[str, Any]:
        """One run: held-out loss (nats/token) before and after it, and the depth attention."""
        began = time.monotonic()
        recipe, held_out = run.recipe, self._held_out(run.seed)
        model = prepare(self.start, recipe)
        blocks = self.data.order(run.seed, self.steps * self.batch_size)
        continue_training(model, blocks, recipe, self.steps, self.batch_size, run.seed, on_step)
        result = {
            "tokens": blocks.numel(),
            "after": mean_loss(model, held_out),
            "seconds": round(time.monotonic() - began, 1),
            "before": self.loss_at_step_0(recipe.block_size, recipe.scale, run.seed == SELECTION_SEED),
        }
        if not recipe.is_standard:
            weights = depth_attention(model.eval(), held_out[:32].split(16)).mean
            result["depth_attention"] = [[round(w, 4) for w in row[~row.isnan()].tolist()] for row in weights]
            result["distance_from_uniform"] = round(distance_from_uniform(model, held_out[:32]), 5)
        return result

    def _held_out(self, seed: int) -> Tensor:
        return self.data.selection if seed == SELECTION_SEED else self.data.valid

    def _loss_at_step_0(self, block_size: int | None, scale: str, selecting: bool) -> float:
        model = prepare(self.start, Recipe(block_size=block_size, scale=scale))
        return mean_loss(model, self.data.selection if selecting else self.data.valid)


@torch.no_grad()
def distance_from_uniform(model: PreTrainedModel, blocks: Tensor) -> float:
    """`1/2 sum_i |a_i - 1/n|`, mean over tokens and readers with n > 1 sources: 0 is uniform, 1 - 1/n one source.

    A mean of the weights over tokens says less: what one token weighs up and the next down cancels in it.
    """
    distances = []
    for batch in blocks.split(16):
        attentions = model(batch, use_cache=False, output_depth_attentions=True).depth_attentions
        distances += [half_absolute(a - 1 / len(a)).mean().item() for a in attentions if len(a) > 1]
    return mean(distances)


def half_absolute(difference: Tensor) -> Tensor:
    return difference.float().abs().sum(0) / 2


def mean_loss(model: PreTrainedModel, blocks: Tensor) -> float:
    return round(sequence_losses(model, blocks).mean().item(), 6)


def report_table(store: Store, seeds: list[int]) -> str:
    """Held-out loss of the reported recipes, mean and standard deviation over the seeds, paired with `standard`."""
    rows = [
        "| model | trained | tokens | held-out loss | minus standard | minus start |",
        "|---|---|---|---|---|---|",
    ]
    for label, recipe in REPORT.items():
        runs = [(store.find(recipe, seed), store.find(REPORT["standard"], seed)) for seed in seeds]
        runs = [(run, standard) for run, standard in runs if run and standard]
        if not runs:
            continue
        against_standard = [run["after"] - standard["after"] for run, standard in runs]
        against_start = [run["after"] - standard["before"] for run, standard in runs]
        cells = (
            label,
            recipe.trained,
            f"{runs[0][0]['tokens']:,}",
            spread([run["after"] for run, _ in runs]),
            "" if recipe == REPORT["standard"] else spread(against_standard, sign="+"),
            spread(against_start, sign="+"),
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def sweep_table(store: Store, title: str) -> str:
    """The recipes of one sweep, each on the selection seed and text."""
    rows = [f"| {title} | loss at step 0 | loss | minus best standard |", "|---|---|---|---|"]
    standard = store.find(REPORT["standard"], SELECTION_SEED)
    for label, recipe in SWEEPS[title].items():
        run = store.find(recipe, SELECTION_SEED)
        if run:
            difference = f"{run['after'] - standard['after']:+.4f}" if standard else ""
            rows.append(f"| {label} | {run['before']:.4f} | {run['after']:.4f} | {difference} |")
    return "\n".join(rows)


def depth_table(store: Store, seeds: list[int]) -> str:
    """How far the depth attention moved from uniform: as seen by each token, and of the weights' mean over tokens."""
    rows = ["| model | distance from uniform, mean over tokens | distance of the mean weights |", "|---|---|---|"]
    for label, recipe in REPORT.items():
        runs = [run for seed in seeds if (run := store.find(recipe, seed)) and "distance_from_uniform" in run]
        if not runs:
            continue
        of_means = []
        for run in runs:
            readers = [torch.tensor(row) for row in run["depth_attention"] if len(row) > 1]
            of_means.append(mean(half_absolute(row - 1 / len(row)).item() for row in readers))
        rows.append(f"| {label} | {spread([run['distance_from_uniform'] for run in runs])} | {spread(of_means)} |")
    return "\n".join(rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    groups = ["report", *SWEEPS]
    parser.add_argument("--checkpoint", type=Path, required=True, help="directory of the pretrained model")
    parser.add_argument("--corpus", type=Path, required=True, help="directory with train.txt and valid.txt")
    parser.add_argument("--groups", nargs="+", choices=groups, default=groups, metavar="GROUP", help=f"of {groups}")
    parser.add_argument(
        "--recipes",
        nargs="+",
        choices=REPORT,
        default=list(REPORT),
        metavar="NAME",
        help=f"of the group report, of {list(REPORT)}",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of the group report")
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=4, help=f"sequences of {LENGTH} tokens")
    parser.add_argument("--results", type=Path, default=HERE / "results" / "healing.json")
    parser.add_argument("--tables", type=Path, default=HERE / "healing.md", help="Markdown file to update")


def run(options: argparse.Namespace) -> None:
    store = Store(options.results, {"steps": options.steps, "batch_size": options.batch_size})
    start = AutoModelForCausalLM.from_pretrained(options.checkpoint)
    data = load_data(options.corpus, AutoTokenizer.from_pretrained(options.checkpoint))
    wanted = []
    for group in options.groups:
        if group == "report":
            wanted += [(name, REPORT[name], seed) for seed in options.seeds for name in options.recipes]
        else:
            wanted += [(f"{group}: {label}", recipe, SELECTION_SEED) for label, recipe in SWEEPS[group].items()]
    Healing(start, data, store).make(wanted)
    tables = {"report": report_table(store, options.seeds), "depth attention": depth_table(store, options.seeds)}
    update_tables(options.tables, tables | {title: sweep_table(store, title) for title in SWEEPS})
