"""What a run adds to the model card: that it trained the model, on what, for how long, and what came of it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import hf_hub_download
from transformers import PreTrainedModel

import attnres
from attnres import ResidualConfig
from attnres.configuration import names
from attnres.conversion.cards import CARD, Subject, add_step, linked, new_card, write_card
from attnres.conversion.markdown import code, is_hub_id, link
from attnres.utils.wording import counted

from .recipe import Recipe


def write_training_card(
    folder: Path, model: PreTrainedModel, recipe: Recipe, name: str, results: Mapping[str, Any], processes: int
) -> None:
    """Write the card of the model that a run has saved in `folder`; a standard decoder, which is not ours, gets none.

    Args:
        model: that was trained.
        name: of the recipe, where it comes with `attnres`.
        results: of the run, as in its `results.json`.
    """
    config = model.config
    if not isinstance(config, ResidualConfig):
        return
    is_local = Path(recipe.model).is_dir()
    hub_id = None if is_local or recipe.model in names() else recipe.model
    commit = getattr(config, "_commit_hash", None)
    source = Path(recipe.model) if is_local else hub_id and _card_on_hub(hub_id, commit)
    text = new_card(source, hub_id)
    made_of = linked(hub_id, recipe.model, commit)
    if recipe.model in names():
        step = f"**Trained from scratch**, the configuration {made_of}"
    elif recipe.retrofit is not None:
        step = f"**Retrofit** of {made_of}, {config.connection.describe(config)}, then **trained**"
    else:
        step = f"**Trained**, from {made_of},"
    step += f" by `attnres train{f' {name}' if name else ''}`{_on(recipe.train)}: {_how(recipe, results, processes)}"
    run = Path(recipe.out).absolute().name
    subject = Subject(
        config,
        folder,
        f"{run}/model",
        title=run,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        datasets=_on_hub(recipe.train),
    )
    write_card(add_step(text, step), subject)


def _how(recipe: Recipe, results: Mapping[str, Any], processes: int) -> str:
    losses = results["held_out_losses"]
    before = next((f", {loss:.4f} before" for step, loss in losses if step == 0), "")
    adapters = ", low-rank adapters merged into the weights" if recipe.lora is not None else ""
    tokens, steps = counted(results["tokens"], "token"), counted(results["steps"], "step")
    batch = f"{counted(recipe.batch_size, 'sequence')} of {counted(recipe.length, 'token')}"
    workers = "1 process" if processes == 1 else f"{processes} processes"
    return (
        f"{tokens} in {steps} of {batch}, {recipe.optimizer} at a rate of {recipe.learning_rate:g}, {recipe.schedule}, "
        f"seed {recipe.seed}{adapters}, on {workers}. Held-out loss {results['held_out_loss']:.4f} nats/token{before}. "
        f"attnres {attnres.__version__}, transformers {transformers.__version__}, torch {torch.__version__}."
    )


def _on(train: Sequence[str]) -> str:
    """The data, by links to the Hub or by the names of files."""
    hub = _on_hub(train)
    shown = [link(name, "datasets/") if name in hub else code(Path(name).name) for name in train]
    return f" on {', '.join(shown)}" if shown else ""


def _on_hub(train: Sequence[str]) -> list[str]:
    return [path for path in train if path.count("/") == 1 and not Path(path).exists() and is_hub_id(path)]


def _card_on_hub(hub_id: str, commit: str | None) -> Path | None:
    """The folder with the card of a model on the Hub; `None` if it has none, or the Hub does not give it now."""
    try:
        return Path(hf_hub_download(hub_id, CARD, revision=commit)).parent
    except (OSError, ValueError):
        return None


__all__ = ["write_training_card"]
