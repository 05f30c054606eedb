"""Healing: a pretrained model is trained on for equal tokens, as it is and with attention residuals.

`declared/healing/SIZE.yaml` holds the recipes. Recipes of `sweeps` choose settings, with one seed and on text that is
not reported. Recipes of `report` are measured with other seeds and on other text.
"""

import copy
import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attnres.analysis.depth_attention import depth_attention
from attnres.commands.inspect import InspectedSource
from attnres.conversion import retrofit
from attnres.residual_attnres import residual_tensors
from attnres.training.data.blocks import in_blocks
from attnres.training.text import read_documents

from .data import TokenData, load, token_stream
from .declared import HEALING_SEEDS, SELECTION_SEED, HealingExperiment, HealingRecipe
from .runs import PlannedRun, make_runs
from .store import RunStore
from .training import Run, sequence_losses, train

REPORT = "report"
DECAY_SHARE = 0.5
SAME_LOSS = 1e-3  # nats/token; another processor changes less
# Tensors that a recipe trains, by (name of the tensor, whether the retrofit adds it).
TRAINED: dict[str, Callable[[str, bool], bool]] = {
    "all": lambda name, is_attnres: True,
    "all but key norms": lambda name, is_attnres: not (is_attnres and name.endswith("_norm.weight")),
    "AttnRes": lambda name, is_attnres: is_attnres,
    "norms": lambda name, is_attnres: not is_attnres and "norm" in name,
}


def load_data(experiment: HealingExperiment, corpus: Path, tokenizer: PreTrainedTokenizerBase) -> TokenData:
    """Load the text to train on, the text that chooses settings, and the text that is reported.

    A declared text is the text of `experiments claim`: healing trains on what the model has not seen, and the two
    halves of `valid.txt` are held out. Without one, every tenth document of `train.txt` chooses settings, healing
    trains on the others, and `valid.txt` is reported. There each document stands after the beginning-of-text token,
    as in the pretraining of the stories models.

    Args:
        experiment: The declaration.
        corpus: The folder with `train.txt` and `valid.txt`.
        tokenizer: The tokenizer of the pretrained model.
    """
    if experiment.text is not None:
        if experiment.held_out is None:
            raise ValueError(f"{experiment.name}: a declaration with `text` needs `held_out`.")
        data = load(experiment.text, experiment.length, experiment.held_out, corpus)
        # Pretraining took the first sequences of this order.
        return replace(data, train=data.order(0, len(data.train))[experiment.seen // experiment.length :])

    def blocks(documents: list[str], length: int) -> Tensor:
        return torch.from_numpy(in_blocks(token_stream(documents, tokenizer, begin=True), length))

    documents, valid = (read_documents(corpus / f"{name}.txt") for name in ("train", "valid"))
    parts = (
        blocks([document for i, document in enumerate(documents) if i % 10], experiment.length),
        blocks(documents[::10], experiment.held_out_length),
        blocks(valid, experiment.held_out_length),
    )
    if not all(map(len, parts)):
        raise ValueError(f"{corpus} must hold a longer text: a part of it is shorter than one block.")
    tokens = hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts))
    return TokenData(*parts, fingerprint=tokens.hexdigest()[:12])


def load_start(checkpoint: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the pretrained model and its tokenizer. The model is in float32, since bfloat16 would lose small updates."""
    return InspectedSource(str(checkpoint), tokenizer=str(checkpoint), dtype="float32", device="cpu").load()


def reconnected(start: PreTrainedModel, recipe: HealingRecipe) -> PreTrainedModel:
    """Copy the pretrained model, with the residual connection of a recipe.

    The copy computes the same function, unless the scale of the recipe is `mean`.
    """
    model = copy.deepcopy(start)
    if recipe.block_size is None:
        return model
    return retrofit(model, block_size=recipe.block_size, scale=recipe.scale, attn_res_gated=recipe.gated)


def continue_training(
    model: PreTrainedModel, blocks: Tensor, recipe: HealingRecipe, seed: int, on_step: Callable[[], None], work: Path
) -> None:
    """Train a model in place.

    Args:
        model: The model.
        blocks: The token ids, `[steps * batch size, length]`.
        recipe: The rates, and which tensors are trained.
        seed: The seed of the run.
        on_step: Called after each step.
        work: The folder for checkpoints.
    """
    steps, batch_size = recipe.steps, len(blocks) // recipe.steps
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
        part, folder = blocks[first * batch_size : last * batch_size], work / f"{first}-{trained}"
        train(model, part, schedule, folder, on_step)


@dataclass(frozen=True)
class Healing:
    """The runs of an experiment, made with a pretrained model.

    Attributes:
        experiment: The declaration.
        start: The pretrained model, in float32.
        data: The text.
        store: The store of the runs.
        work: The folder for checkpoints.
    """

    experiment: HealingExperiment
    start: PreTrainedModel
    data: TokenData
    store: RunStore
    work: Path

    def make(self, groups: Iterable[str]) -> None:
        """Make the runs that the store lacks.

        Args:
            groups: Titles of sweeps, or `report`.

        Raises:
            ValueError: The store holds runs of another model or on another text.
        """
        losses = self.check_stored()
        plan = []
        for group in groups:
            recipes = self.experiment.report if group == REPORT else self.experiment.sweeps[group]
            for seed in HEALING_SEEDS if group == REPORT else [SELECTION_SEED]:
                for label, recipe in recipes.items():
                    plan.append(PlannedRun(f"{group}: {label}", asdict(recipe), seed, recipe.steps))
        identity = self.experiment.setting() | {"losses": losses, "fingerprint": self.data.fingerprint}
        make_runs(self.store, plan, self.measure, self.work, identity)

    def check_stored(self) -> list[float]:
        """Return the losses of the pretrained model on `valid` and on `selection`.

        Raises:
            ValueError: The store holds runs on another text, or of a model with another loss.
        """
        self.store.check_text(self.data.fingerprint)
        losses = [mean_loss(self.start, self.data.held_out(selecting)) for selecting in (False, True)]
        for run in self.store.runs:
            loss, before = losses[run["seed"] == SELECTION_SEED], run["before"]
            # With `sum`, a retrofit begins with the loss of the pretrained model.
            if run["recipe"]["scale"] == "sum" and abs(loss - before) > SAME_LOSS:
                raise ValueError(
                    f"{self.store.path} holds runs of a model that begins with a loss of {before:.4f}; this one begins "
                    f"with {loss:.4f}. Choose another --results for another --checkpoint."
                )
        return losses

    def measure(self, run: PlannedRun, on_step: Callable[[], None], work: Path) -> dict[str, Any]:
        """Train one run and measure it.

        Args:
            run: The run.
            on_step: Called after each step.
            work: The folder for its checkpoints.

        Returns:
            Held-out loss (nats/token) before and after, tokens, seconds, and depth attention with its distance from
            uniform.
        """
        recipe, held_out = HealingRecipe(**run.recipe), self.data.held_out(run.selecting)
        model = reconnected(self.start, recipe)
        before = mean_loss(model, held_out)
        began = time.monotonic()
        blocks = self.data.order(run.seed, recipe.steps * self.experiment.batch_size)
        continue_training(model, blocks, recipe, run.seed, on_step, work)
        result: dict[str, Any] = {
            "tokens": blocks.numel(),
            "after": mean_loss(model, held_out),
            "seconds": round(time.monotonic() - began, 1),
            "before": before,
            "text": self.data.fingerprint,
        }
        if recipe.block_size is not None:
            read = depth_attention(model, held_out[:32].split(16))
            result["depth_attention"] = [[round(w, 4) for w in row[~row.isnan()].tolist()] for row in read.mean]
            result["distance_from_uniform"] = round(read.distance[1:].mean().item(), 5)
        return result


def mean_loss(model: PreTrainedModel, blocks: Tensor) -> float:
    """Return the loss of a model (nats/token) on token ids `[sequences, length]`."""
    return round(sequence_losses(model, blocks).mean().item(), 6)
