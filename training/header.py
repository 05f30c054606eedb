"""What a run says before it begins: model, data, steps and processes, and what is probably not meant like that."""

from collections.abc import Iterator

import torch
from datasets import Dataset, IterableDataset
from transformers import PreTrainedModel

from attnres import ResidualConfig
from attnres.utils.wording import counted

from .recipe import Recipe

MANY_EPOCHS = 10


def describe_run(
    recipe: Recipe,
    model: PreTrainedModel,
    train: Dataset | IterableDataset,
    held_out: Dataset,
    device: torch.device,
    division: str = "1 process",
) -> list[str]:
    """Return the lines that a run begins with; the last ones begin with `Note:`.

    Args:
        recipe: The recipe of the run.
        model: The model that is trained.
        train: The sequences to train on.
        held_out: The sequences to measure the loss on.
        device: Where the first process computes.
        division: How many processes train, and how they share the model.
    """
    config = model.config.get_text_config()
    parameters = [(tensor.numel(), tensor.requires_grad) for tensor in model.parameters()]
    total, trained = sum(n for n, _ in parameters), sum(n for n, is_trained in parameters if is_trained)
    kind = config.connection.describe(config) if isinstance(config, ResidualConfig) else "standard residual connections"
    sequences = f"sequences of {recipe.length:,} tokens"
    count = len(train) if isinstance(train, Dataset) else None
    steps = recipe.count_steps(count)
    if count is not None:
        read = f"{count:,} {sequences}"
        epochs = f", {_epochs(recipe, steps, count):.2g} epochs"
    else:
        read, epochs = f"a stream of {sequences}", ""
    documents = f"{train.info.description}: " if train.info.description else ""
    tokens = steps * recipe.batch_size * recipe.length
    return [
        f"Model: {recipe.model} ({config.model_type}), {kind}",
        f"Parameters: {total:,}, of which {'all' if trained == total else f'{trained:,}'} are trained, on {device}",
        f"Processes: {division}",
        f"Data: {documents}{read} to train on, {len(held_out):,} held out",
        f"Run: {counted(steps, 'step')} of {counted(recipe.batch_size, 'sequence')}, "
        f"{tokens:,} tokens{epochs}; into {recipe.out}",
        *(f"Note: {note}" for note in _notes(recipe, model, steps, count)),
    ]


def _epochs(recipe: Recipe, steps: int, sequences: int) -> float:
    return steps * recipe.batch_size / sequences


def _notes(recipe: Recipe, model: PreTrainedModel, steps: int, sequences: int | None) -> Iterator[str]:
    config = model.config.get_text_config()
    if recipe.most_steps is not None and steps < recipe.most_steps:
        times = _epochs(recipe, recipe.most_steps, sequences)
        digits = 0 if times >= 10 else 2
        yield (
            f"{recipe.most_steps:,} steps would read this data {times:,.{digits}f} times: the run ends "
            f"after epochs={recipe.epochs:g}. Give more data for a longer run; steps=N sets another length."
        )
    elif sequences is not None and (epochs := _epochs(recipe, steps, sequences)) > MANY_EPOCHS:
        fewer = max(1, MANY_EPOCHS * sequences // recipe.batch_size)
        yield (
            f"the run reads its data {epochs:.0f} times, which a model learns by heart: give more data, or at most "
            f"steps={fewer} for {MANY_EPOCHS} epochs."
        )
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and recipe.length > positions:
        yield f"length={recipe.length} is beyond the {positions:,} positions that the model is made for."


def show_share(share: float) -> str:
    """A share that is close to 1 by how far it is from there, which is what moves: `0.9321`, `1 - 3.4e-05`."""
    return f"{share:.4f}" if share < 0.99 else f"1 - {max(0.0, 1 - share):.1e}"


__all__ = ["describe_run", "show_share"]
