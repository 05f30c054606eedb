"""Comparison of models that train on the same batches, by their loss on held-out documents, over several seeds."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from .data.packing import in_blocks
from .runs import Run, sequence_losses, train
from .text import token_stream

BLOCKS_OF_A_DOCUMENT = 4  # at most, so that held-out text comes from many documents
HELD_OUT_BLOCKS = 256


@dataclass(frozen=True)
class ComparisonData:
    """Packed token blocks.

    Attributes:
        train: Blocks to train on, `[blocks, seq]`.
        held_out: Held-out blocks, `[held-out blocks, seq]`.
        documents: The number of the document that each held-out block belongs to, `[held-out blocks]`.
    """

    train: Tensor
    held_out: Tensor
    documents: Tensor


@dataclass(frozen=True)
class Trial:
    """The result of one run.

    Attributes:
        label: The label of the model.
        seed: The seed of the run.
        curve: The training loss as points (step, nats/token).
        losses: The held-out loss of each block at the end, nats/token `[held-out blocks]`.
    """

    label: str
    seed: int
    curve: list[tuple[int, float]]
    losses: Tensor


def split(documents: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide documents into training documents and held-out documents. Every fourth one is held out."""
    return [document for i, document in enumerate(documents) if i % 4], list(documents[::4])


def comparison_data(
    train: list[str], held_out: list[str], tokenizer: PreTrainedTokenizerBase, length: int, least: int
) -> ComparisonData:
    """Tokenise documents and cut them into blocks, at most [`BLOCKS_OF_A_DOCUMENT`] of each held-out document.

    Args:
        train: The documents to train on.
        held_out: The held-out documents.
        tokenizer: The tokenizer.
        length: Tokens in a block.
        least: The least number of blocks to train on.

    Returns:
        The blocks.

    Raises:
        ValueError: There are fewer than `least` blocks to train on, or held-out blocks of fewer than two documents.
    """
    blocks, held_out_blocks = (
        torch.from_numpy(in_blocks(token_stream(part, tokenizer), length)) for part in (train, held_out)
    )
    ends = (held_out_blocks == tokenizer.eos_token_id).flatten().numpy().cumsum()
    # A block belongs to the document of its first token. The number of that document is the count of ends before it.
    documents = np.concatenate([[0], ends[:-1]])[::length] if len(ends) else ends
    _, firsts, numbers = np.unique(documents, return_index=True, return_inverse=True)
    kept = np.flatnonzero(np.arange(len(documents)) - firsts[numbers] < BLOCKS_OF_A_DOCUMENT)[:HELD_OUT_BLOCKS]
    data = ComparisonData(blocks, held_out_blocks[kept], torch.from_numpy(documents[kept]))
    num_documents = len(data.documents.unique())
    if len(blocks) < least or num_documents < 2:
        raise ValueError(
            f"the text gives {len(blocks)} sequences of {length} tokens to train on, and held-out sequences of "
            f"{num_documents} documents, but the demo needs at least {least} and 2. Give a longer --text, of more "
            "documents: these end at empty lines, or at lines that hold only <|endoftext|>."
        )
    return data


def compare(
    starts: Mapping[str, Callable[[], PreTrainedModel]],
    data: ComparisonData,
    run: Run,
    seeds: Sequence[int],
    on_run: Callable[[str], None],
    on_step: Callable[[], None],
) -> Iterator[tuple[Trial, PreTrainedModel]]:
    """Train every model with every seed. All models of a seed train on the same batches.

    Args:
        starts: Label -> a function that makes the model. The seed decides the weights that it draws.
        data: The blocks to train on and to measure on.
        run: The settings of the runs.
        seeds: The seeds.
        on_run: A function that is called with a description before each run.
        on_step: A function that is called after each step.

    Yields:
        The result of each run, and its model.
    """
    for seed in seeds:
        order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(seed))
        blocks = data.train[order[: run.steps * run.batch_size]]
        for label, start in starts.items():
            on_run(f"{label}, seed {seed}")
            set_seed(seed)
            model = start()
            curve = train(model, blocks, replace(run, seed=seed), on_step)
            yield Trial(label, seed, curve, sequence_losses(model, data.held_out)), model


@dataclass(frozen=True)
class Difference:
    """The held-out loss of a model minus that of another, in nats/token.

    Attributes:
        by_seed: The difference for each seed.
        mean: The mean over seeds.
        over_seeds: The standard deviation over seeds.
        over_documents: The standard error of the mean from the choice of held-out documents.
    """

    by_seed: list[float]
    mean: float
    over_seeds: float
    over_documents: float


def difference(trials: Sequence[Trial], of: str, to: str, documents: Tensor) -> Difference:
    """Compute the difference in held-out loss between two models, within each seed.

    Args:
        trials: The results of the runs.
        of: The label of the first model.
        to: The label of the second model, whose loss is subtracted.
        documents: The number of each held-out block's document, `[held-out blocks]`. Blocks of one document do not
            count as independent.

    Returns:
        The difference.
    """
    losses = {label: torch.stack([t.losses for t in trials if t.label == label]) for label in (of, to)}
    differences = losses[of] - losses[to]  # [seeds, blocks]
    by_seed = differences.mean(1)
    # The standard error of clustered data: residuals are summed within each document before they are squared.
    around = differences.mean(0) - differences.mean()  # [blocks]
    _, numbers = documents.unique(return_inverse=True)
    sums = torch.zeros(int(numbers.max()) + 1, dtype=around.dtype).index_add_(0, numbers, around)
    variance = sums.square().sum() * len(sums) / (len(sums) - 1)
    return Difference(
        by_seed.tolist(), by_seed.mean().item(), by_seed.std().item(), variance.sqrt().item() / len(around)
    )
