"""Does healing pay? A pretrained model continued for equal tokens, as it is and with attention residuals.

    python -m experiments healing --size stories --checkpoint DIR --corpus DIR

What is tried and what is reported stands in `declared/healing/SIZE.yaml`. The recipes of `sweeps` choose settings, on
one seed and on text that is not reported; those of `report` are measured with other seeds on other text.
"""

import argparse
import copy
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attnres.analysis.depth_attention import depth_attention
from attnres.analysis.tables import update_tables
from attnres.commands.inspect import InspectedSource
from attnres.conversion import retrofit
from attnres.residual_attnres import residual_tensors
from attnres.training.packing import in_blocks
from attnres.training.runs import Run, sequence_losses, train
from attnres.training.text import read_documents, token_stream

from .data import Data, load, prepare, prepared_file
from .harness import (
    SELECTION_SEED,
    TINY,
    Planned,
    Store,
    checkpoints,
    is_number,
    make_runs,
    page_of,
    results_file,
    tables_file,
)
from .healing_declared import DECLARED, TRAINED, Declaration, Recipe, is_count
from .healing_tables import tables
from .options import PAGES, a_page, a_results_file, a_seed, add_work, chosen

SEEDS = [0, 1, 2]
DECAY_SHARE = 0.5
SAME_LOSS = 1e-3  # another processor changes less of it


def load_data(declaration: Declaration, corpus: Path, tokenizer: PreTrainedTokenizerBase) -> Data:
    """What is trained on, what settings are chosen by, and what is reported.

    Of a text that `experiments claim` prepared: what the model has not seen, and the two halves of `valid.txt`. Else
    `train.txt` of the folder, every tenth document of it kept for selection, and `valid.txt`; documents stand after the
    beginning-of-text token: that is how the stories models were trained.

    Raises:
        OSError: a text cannot be read.
        ValueError: one is too short, or the tokenizer has no beginning-of-text token.
    """
    if declaration.text is not None:
        if not prepared_file(declaration.text).exists():
            prepare(declaration.text, corpus)
        data = load(declaration.text, declaration.length, declaration.held_out)
        rest = data.order(0, len(data.train))[declaration.seen // declaration.length :]
        if not len(rest):
            raise ValueError(
                f"{declaration.size}: seen is {declaration.seen} tokens, which is all of the {data.train.numel()} that "
                f"{declaration.text.corpus} gives. Declare less, or a longer text."
            )
        return replace(data, train=rest)
    if tokenizer.bos_token_id is None:
        raise ValueError(
            "--checkpoint: its tokenizer has no beginning-of-text token, which each document stands after. "
            "Name it as bos_token in tokenizer_config.json."
        )
    train_documents, valid = (read_documents(corpus / f"{name}.txt") for name in ("train", "valid"))

    def blocks(documents: list[str], length: int) -> Tensor:
        stream = token_stream(documents, tokenizer, begin=True)
        if len(stream) < length:
            raise ValueError(f"{len(stream)} tokens are less than one block of {length}. Give a longer text.")
        return torch.from_numpy(in_blocks(stream, length))

    parts = (
        blocks([d for i, d in enumerate(train_documents) if i % 10], declaration.length),
        blocks(train_documents[::10], declaration.held_out_length),
        blocks(valid, declaration.held_out_length),
    )
    tokens = hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts))
    return Data(*parts, fingerprint=tokens.hexdigest()[:12])


def load_start(checkpoint: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The pretrained model in float32, whatever it is stored in: bfloat16 loses small updates. And its tokenizer.

    Raises:
        ValueError: one of them cannot be loaded, or a tensor is missing.
    """
    try:
        return InspectedSource(str(checkpoint), tokenizer=str(checkpoint), dtype="float32", device="cpu").load()
    except (OSError, ValueError) as error:
        raise ValueError(f"--checkpoint: {error}") from error


def reconnected(start: PreTrainedModel, recipe: Recipe) -> PreTrainedModel:
    """A copy of the pretrained model under the recipe's residual connection: the same function, except for `mean`."""
    model = copy.deepcopy(start)
    if not recipe.is_standard:
        model = retrofit(model, block_size=recipe.block_size, scale=recipe.scale, attn_res_gated=recipe.gated)
    return model


def continue_training(
    model: PreTrainedModel,
    blocks: Tensor,
    recipe: Recipe,
    batch_size: int,
    seed: int,
    on_step: Callable[[], None],
    work: Path | None = None,
) -> None:
    """Train in place on `blocks` `[recipe.steps * batch_size, length]`, with checkpoints in `work`."""
    steps = recipe.steps
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
        train(
            model,
            blocks[first * batch_size : last * batch_size],
            run,
            on_step,
            work=work and work / f"{first}-{trained}",
        )


def check_run(run: Mapping[str, Any]) -> None:
    """Raises KeyError, TypeError or ValueError: a stored run is none of healing."""
    recipe = Recipe(**run["recipe"])
    recipe.check()
    if asdict(recipe) != run["recipe"]:
        raise ValueError("the recipe lacks a field")
    numbers = [run["before"], run.get("distance_from_uniform", 0.0)]
    for row in [] if recipe.is_standard else run["depth_attention"]:
        numbers += row
    if not all(map(is_number, numbers)) or not is_count(run["tokens"]):
        raise TypeError("before, depth_attention and distance_from_uniform must hold numbers, and tokens a whole one")


class Healing:
    """The runs of the experiment: made with a pretrained model, from checkpoints in `work` if stopped, and stored."""

    def __init__(
        self, declaration: Declaration, start: PreTrainedModel, data: Data, store: Store, work: Path | None = None
    ):
        self.declaration, self.start, self.data, self.store = declaration, start, data, store
        self.work = work
        self.loss_at_step_0 = cache(self._loss_at_step_0)

    def make(self, wanted: Sequence[tuple[str, Recipe, int]]) -> None:
        """Make what the store lacks of (label, recipe, seed).

        Raises:
            ValueError: the store holds runs of another model or on another text.
        """
        plan = [Planned(label, recipe, seed, recipe.steps) for label, recipe, seed in wanted]
        self._check_stored()
        make_runs(self.store, plan, self._measure, folder=partial(checkpoints, self.work, self._identity))

    def _check_stored(self) -> None:
        """Raises ValueError: the store holds runs on another text, or that began with another loss."""
        if texts := self.store.other_texts(self.data.fingerprint):
            raise ValueError(
                f"{self.store.path} holds runs on another text ({', '.join(texts)}, not "
                f"{self.data.fingerprint}). Choose another --results for another --corpus."
            )
        for run in self.store.content["runs"]:
            block_size, gated, scale = (run["recipe"][name] for name in ("block_size", "gated", "scale"))
            if scale == "sum":  # every one computes what the standard model does: one measurement is enough
                block_size, gated = None, False
            loss, before = self.loss_at_step_0(block_size, gated, scale, run["seed"] == SELECTION_SEED), run["before"]
            if not abs(loss - before) <= SAME_LOSS:  # `>` would let a NaN pass
                raise ValueError(
                    f"{self.store.path} holds runs of a model that begins with a loss of {before:.4f} on its text; "
                    f"here it is {loss:.4f}. Choose another --results for another --checkpoint or --corpus."
                )

    @property
    def _identity(self) -> dict[str, Any]:
        start = {"size": self.declaration.size, "loss": self.loss_at_step_0(None, False, "sum", False)}
        return self.declaration.setting() | start | {"tokens": self.data.fingerprint}

    def _measure(self, run: Planned, on_step: Callable[[], None], work: Path | None = None) -> dict[str, Any]:
        """One run: held-out loss (nats/token) before and after it, the depth attention, the mean |gamma| of gates."""
        began = time.monotonic()
        recipe, batch_size = run.recipe, self.declaration.batch_size
        held_out = self.data.held_out(run.selecting)
        model = reconnected(self.start, recipe)
        blocks = self.data.order(run.seed, recipe.steps * batch_size)
        continue_training(model, blocks, recipe, batch_size, run.seed, on_step, work)
        result = {
            "tokens": blocks.numel(),
            "after": mean_loss(model, held_out),
            "seconds": round(time.monotonic() - began, 1),
            "before": self.loss_at_step_0(recipe.block_size, recipe.gated, recipe.scale, run.selecting),
        }
        if self.data.fingerprint:
            result["text"] = self.data.fingerprint
        if not recipe.is_standard:
            read = depth_attention(model, held_out[:32].split(16))
            result["depth_attention"] = [[round(w, 4) for w in row[~row.isnan()].tolist()] for row in read.mean]
            gates = [tensor.abs() for name, tensor in residual_tensors(model).items() if name.endswith(".gamma")]
            if gates:
                result["gamma"] = round(torch.cat(gates).mean().item(), 5)
            result["distance_from_uniform"] = round(read.distance[1:].mean().item(), 5)
        return result

    def _loss_at_step_0(self, block_size: int | None, gated: bool, scale: str, selecting: bool) -> float:
        model = reconnected(self.start, Recipe(block_size=block_size, gated=gated, scale=scale))
        return mean_loss(model, self.data.held_out(selecting))


def mean_loss(model: PreTrainedModel, blocks: Tensor) -> float:
    return round(sequence_losses(model, blocks).mean().item(), 6)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sizes = sorted(path.stem for path in DECLARED.glob("*.yaml"))
    parser.add_argument("--size", choices=sizes, default="stories", help="which declaration; default stories")
    parser.add_argument("--checkpoint", type=Path, required=True, help="directory of the pretrained model")
    parser.add_argument("--corpus", type=Path, required=True, help="directory with train.txt and valid.txt")
    parser.add_argument("--groups", nargs="+", metavar="GROUP", help="sweeps, or `report`; default all")
    parser.add_argument("--recipes", nargs="+", metavar="NAME", help="of the group `report`; default all")
    parser.add_argument("--seeds", nargs="+", type=a_seed, default=SEEDS, help="of the group `report`")
    parser.add_argument("--results", type=a_results_file, help="JSON file; default in experiments/results")
    parser.add_argument("--tables", type=a_page, help=PAGES)
    add_work(parser)


def write_all() -> None:
    """The tables of all sizes that have stored runs."""
    for size in sorted({path.stem for path in DECLARED.glob("*.yaml")} - {TINY}):
        declaration = Declaration.load(size)
        path = results_file(f"healing-{size}")
        if path.exists():
            update_tables(page_of("healing"), tables(declaration, Store(path, declaration.setting(), check_run), SEEDS))


def run(options: argparse.Namespace) -> None:
    declaration = Declaration.load(options.size)
    groups = chosen("--groups", options.groups, ["report", *declaration.sweeps])
    recipes = chosen("--recipes", options.recipes, list(declaration.report))
    seeds = list(dict.fromkeys(options.seeds))  # one that is named twice is one run
    store = Store(options.results or results_file(f"healing-{options.size}"), declaration.setting(), check_run)
    page = tables_file(options.tables, "healing", options.size, store.path, bool(options.results))
    for option, path in (("--checkpoint", options.checkpoint / "config.json"), ("--corpus", options.corpus)):
        if not path.exists():
            raise ValueError(f"{option}: there is no {path}.")
    start, tokenizer = load_start(options.checkpoint)
    if declaration.text is not None and start.config.vocab_size != declaration.text.vocab_size:
        raise ValueError(
            f"--checkpoint: {options.checkpoint} has a vocabulary of {start.config.vocab_size} tokens, and "
            f"{options.size} is declared for one of {declaration.text.vocab_size}."
        )
    data = load_data(declaration, options.corpus, tokenizer)
    wanted = []
    for group in groups:
        if group == "report":
            wanted += [(name, declaration.report[name], seed) for seed in seeds for name in recipes]
        else:
            sweep = declaration.sweeps[group].items()
            wanted += [(f"{group}: {label}", recipe, SELECTION_SEED) for label, recipe in sweep]
    Healing(declaration, start, data, store, options.work).make(wanted)
    update_tables(page, tables(declaration, store, seeds if options.results else SEEDS))
    print(f"Runs: {store.path}. Tables: {page}.")
