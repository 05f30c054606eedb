"""Healing: a pretrained model trained on for equal tokens, as it is and with attention residuals.

`declared/healing/SIZE.yaml` holds the recipes. Those of `sweeps` choose settings, with one seed and on text that is not
reported. Those of `report` are measured with other seeds and on other text.
"""

import copy
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attnres.analysis.depth_attention import depth_attention
from attnres.commands.inspect import InspectedSource
from attnres.conversion import retrofit
from attnres.residual_attnres import residual_tensors
from attnres.training.packing import in_blocks
from attnres.training.runs import Run, sequence_losses, train
from attnres.training.text import read_documents, token_stream

from .data import TokenData, load, prepare, prepared_file
from .declared import SELECTION_SEED, TRAINED, HealingExperiment, HealingRecipe
from .runs import PlannedRun, checkpoint_folder, make_runs
from .store import RunStore

SEEDS = (0, 1, 2)
DECAY_SHARE = 0.5
SAME_LOSS = 1e-3  # nats/token; another processor changes less


def load_data(experiment: HealingExperiment, corpus: Path, tokenizer: PreTrainedTokenizerBase) -> TokenData:
    """Load what is trained on, what chooses settings, and what is reported.

    A declared text is the one that `experiments claim` prepared: healing trains on what the model has not seen, and
    the two halves of `valid.txt` are held out. Without one, every tenth document of `train.txt` chooses settings,
    healing trains on the others, and `valid.txt` is reported. There each document stands after the beginning-of-text
    token, as in the pretraining of the stories models.

    Args:
        experiment: the declaration.
        corpus: folder with `train.txt` and `valid.txt`.
        tokenizer: of the pretrained model.

    Raises:
        OSError: a text cannot be read.
        ValueError: a text is too short, or the tokenizer has no beginning-of-text token.
    """
    if experiment.text is not None:
        if not prepared_file(experiment.text).exists():
            prepare(experiment.text, corpus)
        data = load(experiment.text, experiment.length, experiment.held_out)
        rest = data.order(0, len(data.train))[experiment.seen // experiment.length :]
        if not len(rest):
            raise ValueError(
                f"{experiment.size}: seen is {experiment.seen} tokens, which is all of the {data.train.numel()} that "
                f"{experiment.text.corpus} gives. Declare less, or a longer text."
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
        blocks([document for i, document in enumerate(train_documents) if i % 10], experiment.length),
        blocks(train_documents[::10], experiment.held_out_length),
        blocks(valid, experiment.held_out_length),
    )
    tokens = hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts))
    return TokenData(*parts, fingerprint=tokens.hexdigest()[:12])


def load_start(checkpoint: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the pretrained model, and its tokenizer.

    The model is in float32, whatever it is stored in: bfloat16 would lose small updates.

    Raises:
        ValueError: one of them cannot be loaded, or a tensor is missing.
    """
    try:
        return InspectedSource(str(checkpoint), tokenizer=str(checkpoint), dtype="float32", device="cpu").load()
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"--checkpoint: {error}") from error


def reconnected(start: PreTrainedModel, recipe: HealingRecipe) -> PreTrainedModel:
    """Copy the pretrained model, with the residual connection of a recipe.

    Args:
        start: stays as it is.
        recipe: names the connection.

    Returns:
        A model that computes the same function, unless the scale is `mean`.
    """
    model = copy.deepcopy(start)
    if not recipe.is_standard:
        model = retrofit(model, block_size=recipe.block_size, scale=recipe.scale, attn_res_gated=recipe.gated)
    return model


def continue_training(
    model: PreTrainedModel,
    blocks: Tensor,
    recipe: HealingRecipe,
    batch_size: int,
    seed: int,
    on_step: Callable[[], None],
    work: Path | None = None,
) -> None:
    """Train a model in place.

    Args:
        model: what is trained.
        blocks: token ids, `[recipe.steps * batch_size, length]`.
        recipe: rates, and which tensors are trained.
        batch_size: sequences of a step.
        seed: of the run.
        on_step: called after each step.
        work: folder for checkpoints.
    """
    steps = recipe.steps
    alone = round(recipe.alone * steps)
    for first, last, trained in ((0, alone, "AttnRes"), (alone, steps, recipe.trained)):
        if first == last:
            continue
        attnres = residual_tensors(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(TRAINED[trained](name, name in attnres))
        schedule = Run(
            last - first,
            batch_size,
            recipe.rate,
            warmup_steps=round(recipe.warmup * (last - first)),
            decay_steps=round(DECAY_SHARE * steps) if last == steps else 0,
            residual_lr_factor=recipe.attnres_rate / recipe.rate,
            seed=seed,
        )
        # Each stage has a folder: the second must not resume from checkpoints of the first.
        stage = work and work / f"{first}-{trained}"
        train(model, blocks[first * batch_size : last * batch_size], schedule, on_step, work=stage)


class Healing:
    """The runs of an experiment, made with a pretrained model.

    Args:
        experiment: the declaration.
        start: the pretrained model, in float32.
        data: the text.
        store: where the runs go.
        work: folder for checkpoints.
    """

    def __init__(
        self,
        experiment: HealingExperiment,
        start: PreTrainedModel,
        data: TokenData,
        store: RunStore,
        work: Path | None = None,
    ) -> None:
        self.experiment, self.start, self.data, self.store, self.work = experiment, start, data, store, work
        self._loss_at_start = cache(self._measure_start)

    def make(self, wanted: Sequence[tuple[str, HealingRecipe, int]]) -> None:
        """Make the runs that the store lacks.

        Args:
            wanted: label, recipe and seed of each run.

        Raises:
            ValueError: the store holds runs of another model or on another text.
        """
        self.check_stored()
        start = {"size": self.experiment.size, "loss": self._loss_at_start(None, False, "sum", False)}
        identity = self.experiment.setting() | start | {"tokens": self.data.fingerprint}
        plan = [PlannedRun(label, recipe, seed, recipe.steps) for label, recipe, seed in wanted]
        make_runs(self.store, plan, self.measure, checkpoints=partial(checkpoint_folder, self.work, identity))

    def check_stored(self) -> None:
        """Raise ValueError if the store holds runs on another text, or of a model that begins with another loss."""
        if texts := self.store.other_texts(self.data.fingerprint):
            raise ValueError(
                f"{self.store.path} holds runs on another text ({', '.join(texts)}, not "
                f"{self.data.fingerprint}). Choose another --results for another --corpus."
            )
        for run in self.store.runs:
            block_size, gated, scale = (run["recipe"][name] for name in ("block_size", "gated", "scale"))
            if scale == "sum":  # a retrofit computes what the standard model does: one measurement is enough for all
                block_size, gated = None, False
            loss, before = self._loss_at_start(block_size, gated, scale, run["seed"] == SELECTION_SEED), run["before"]
            if not abs(loss - before) <= SAME_LOSS:  # `>` would let a NaN pass
                raise ValueError(
                    f"{self.store.path} holds runs of a model that begins with a loss of {before:.4f} on its text; "
                    f"here it is {loss:.4f}. Choose another --results for another --checkpoint or --corpus."
                )

    def measure(self, run: PlannedRun, on_step: Callable[[], None], work: Path | None = None) -> dict[str, Any]:
        """Train one run and measure it.

        Args:
            run: what to train.
            on_step: called after each step.
            work: folder for its checkpoints.

        Returns:
            Held-out loss (nats/token) before and after, tokens, seconds, depth attention with its distance from
            uniform, and the mean of |gamma| where there are gates.
        """
        began = time.monotonic()
        recipe, batch_size = run.recipe, self.experiment.batch_size
        held_out = self.data.held_out(run.selecting)
        model = reconnected(self.start, recipe)
        blocks = self.data.order(run.seed, recipe.steps * batch_size)
        continue_training(model, blocks, recipe, batch_size, run.seed, on_step, work)
        result = {
            "tokens": blocks.numel(),
            "after": mean_loss(model, held_out),
            "seconds": round(time.monotonic() - began, 1),
            "before": self._loss_at_start(recipe.block_size, recipe.gated, recipe.scale, run.selecting),
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

    def _measure_start(self, block_size: int | None, gated: bool, scale: str, selecting: bool) -> float:
        model = reconnected(self.start, HealingRecipe(block_size=block_size, gated=gated, scale=scale))
        return mean_loss(model, self.data.held_out(selecting))


def mean_loss(model: PreTrainedModel, blocks: Tensor) -> float:
    """Return the loss of a model (nats/token).

    Args:
        model: what is measured.
        blocks: token ids, `[sequences, length]`.
    """
    return round(sequence_losses(model, blocks).mean().item(), 6)
