"""Models trained on the same batches from the same start, and their loss on held-out documents, over several seeds."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from .packing import in_blocks
from .runs import Run, sequence_losses, train
from .text import token_stream

BLOCKS_OF_A_DOCUMENT = 4  # so that held-out text is of many documents
HELD_OUT_BLOCKS = 256


@dataclass(frozen=True)
class ComparisonData:
    """Packed token blocks `[n, length]` to train on and held out; `documents` `[n]` numbers those of the latter."""

    train: Tensor
    held_out: Tensor
    documents: Tensor


@dataclass(frozen=True)
class Trial:
    """One run: the training loss over the steps, and the held-out loss of each block `[n]` at its end."""

    label: str
    seed: int
    curve: list[tuple[int, float]]
    losses: Tensor


def split(documents: Sequence[str]) -> tuple[list[str], list[str]]:
    """Those to train on, and those held out: every fourth."""
    return [document for i, document in enumerate(documents) if i % 4], list(documents[::4])


def pack(
    train: list[str], held_out: list[str], tokenizer: PreTrainedTokenizerBase, length: int, least: int
) -> ComparisonData:
    """The tokens of both parts in blocks; of a held-out document, the first few.

    Raises:
        ValueError: there are fewer than `least` blocks to train on, or held-out blocks of fewer than two documents.
    """
    blocks, held_out_blocks = (
        torch.from_numpy(in_blocks(token_stream(part, tokenizer), length)) for part in (train, held_out)
    )
    ends = (held_out_blocks == tokenizer.eos_token_id).flatten().numpy().cumsum()
    # A block counts for the document of its first token: the ends before it are the number of that document.
    documents = np.concatenate([[0], ends[:-1]])[::length] if len(ends) else ends
    _, firsts, numbers = np.unique(documents, return_index=True, return_inverse=True)
    kept = np.flatnonzero(np.arange(len(documents)) - firsts[numbers] < BLOCKS_OF_A_DOCUMENT)[:HELD_OUT_BLOCKS]
    data = ComparisonData(blocks, held_out_blocks[kept], torch.from_numpy(documents[kept]))
    found = len(data.documents.unique())
    if len(blocks) < least or found < 2:
        raise ValueError(
            f"the text gives {len(blocks)} blocks of {length} tokens to train on, and held-out blocks of {found} "
            f"documents, but the demo needs at least {least} and 2. Give a longer --text, of more documents: these end "
            "at empty lines, or at lines that hold only <|endoftext|>."
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
    """Train every model with every seed, which decides its first weights (where they are drawn) and its batches.

    Args:
        starts: label -> what makes the model.
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
    """Held-out loss of a model minus that of another (nats/token).

    Attributes:
        by_seed: of each seed.
        mean: of these.
        over_seeds: their standard deviation.
        over_documents: the standard error of the mean that comes from the choice of documents.
    """

    by_seed: list[float]
    mean: float
    over_seeds: float
    over_documents: float


def difference(trials: Sequence[Trial], of: str, to: str, documents: Tensor) -> Difference:
    """`of` minus `to`, within each seed; blocks of one document are not counted as independent."""
    losses = {label: torch.stack([t.losses for t in trials if t.label == label]) for label in (of, to)}
    differences = losses[of] - losses[to]  # [seeds, blocks]
    by_seed = differences.mean(1)
    around = differences.mean(0) - differences.mean()
    _, numbers = documents.unique(return_inverse=True)
    sums = torch.zeros(int(numbers.max()) + 1, dtype=around.dtype).index_add_(0, numbers, around)
    variance = sums.square().sum() * len(sums) / (len(sums) - 1)
    return Difference(
        by_seed.tolist(), by_seed.mean().item(), by_seed.std().item(), variance.sqrt().item() / len(around)
    )
