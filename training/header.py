"""What a run says before it begins: model, data, steps and device, and what is probably not meant like that."""

from collections.abc import Iterator

import torch
from datasets import Dataset, IterableDataset
from transformers import PreTrainedModel

from attnres import ResidualConfig
from attnres.wording import counted

from .recipe import Recipe

MANY_EPOCHS = 10
HEAL = "heal"


def describe_run(
    recipe: Recipe,
    name: str,
    model: PreTrainedModel,
    train: Dataset | IterableDataset,
    held_out: Dataset,
    device: torch.device,
) -> list[str]:
    """The lines of it; the last ones begin with `Note:`."""
    config = model.config.get_text_config()
    parameters = [(tensor.numel(), tensor.requires_grad) for tensor in model.parameters()]
    total, trained = sum(n for n, _ in parameters), sum(n for n, is_trained in parameters if is_trained)
    kind = config.connection.describe(config) if isinstance(config, ResidualConfig) else "standard residual connections"
    sequences = f"sequences of {recipe.length:,} tokens"
    if isinstance(train, Dataset):
        read = f"{len(train):,} {sequences}"
        epochs = f", {_epochs(recipe, train):.2g} epochs"
    else:
        read, epochs = f"a stream of {sequences}", ""
    documents = f"{train.info.description}: " if train.info.description else ""
    tokens = recipe.num_steps * recipe.batch_size * recipe.length
    return [
        f"Model: {recipe.model} ({config.model_type}), {kind}",
        f"Parameters: {total:,}, of which {'all' if trained == total else f'{trained:,}'} are trained, on {device}",
        f"Data: {documents}{read} to train on, {len(held_out):,} held out",
        f"Run: {counted(recipe.num_steps, 'step')} of {counted(recipe.batch_size, 'sequence')}, "
        f"{tokens:,} tokens{epochs}; into {recipe.out}",
        *(f"Note: {note}" for note in _notes(recipe, name, model, train)),
    ]


def _epochs(recipe: Recipe, train: Dataset) -> float:
    return recipe.num_steps * recipe.batch_size / len(train)


def _notes(recipe: Recipe, name: str, model: PreTrainedModel, train: Dataset | IterableDataset) -> Iterator[str]:
    config = model.config.get_text_config()
    if isinstance(train, Dataset) and (epochs := _epochs(recipe, train)) > MANY_EPOCHS:
        fewer = max(1, MANY_EPOCHS * len(train) // recipe.batch_size)
        yield (
            f"the run reads its data {epochs:.0f} times, which a model learns by heart: give more data, or at most "
            f"steps={fewer} for {MANY_EPOCHS} epochs."
        )
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and recipe.length > positions:
        yield f"length={recipe.length} is beyond the {positions:,} positions that the model is made for."
    is_standard = not isinstance(config, ResidualConfig) or config.residual_connection == "standard"
    if name == HEAL and is_standard:
        yield (
            f"{recipe.model} has standard residual connections, so there is nothing to heal: it is trained on without "
            "attention residuals. To put them in: `attnres convert` it to DIR and give model=DIR, or add retrofit={}."
        )


def show_share(share: float) -> str:
    """A share that is close to 1 by how far it is from there, which is what moves: `0.9321`, `1 - 3.4e-05`."""
    return f"{share:.4f}" if share < 0.99 else f"1 - {max(0.0, 1 - share):.1e}"


__all__ = ["describe_run", "show_share"]
