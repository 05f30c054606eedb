"""Turn the keys of a recipe that name data into sequences to train on and sequences held out."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from attnres.utils.extras import require_extra
from attnres.utils.wording import counted

from ..recipe import Recipe
from .blocks import DataSpec, digest_of, load_blocks, select_rows
from .chat import encode_chat
from .documents import file_identities
from .images import load_conversations

with require_extra("train"):
    from datasets import Dataset, IterableDataset

MAX_HELD_OUT = 64  # sequences, if the recipe gives no number


class RunData(NamedTuple):
    """The data of a run.

    Attributes:
        train: The sequences to train on.
        held_out: The sequences to measure the loss on.
        digests: A text that changes with a data set, by its key in the recipe.
    """

    train: Dataset | IterableDataset
    held_out: Dataset
    digests: dict[str, str]

    @property
    def sequences(self) -> int | None:
        """Return the number of sequences to train on; `None` for a stream."""
        return len(self.train) if isinstance(self.train, Dataset) else None


def prepare_data(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, processor: Any = None) -> RunData:
    """Tokenise the data of a recipe, and divide it into sequences to train on and sequences held out.

    Args:
        recipe: The recipe of the run.
        tokenizer: The tokenizer of the run.
        processor: The processor of the model, for data with images.

    Returns:
        The data.

    Raises:
        OSError: A file cannot be read, or the cache cannot be written.
        ValueError: A data set, file or row cannot be used, or there are too few sequences.
    """
    spec = DataSpec(recipe.train, recipe.split, recipe.column, recipe.streaming, recipe.bad_rows)
    if processor is None:
        encode = encode_chat(tokenizer, recipe.column) if recipe.chat else None
        options = {"encode": encode, "separate": recipe.separate_documents}
        load_spec: Any = partial(load_blocks, tokenizer=tokenizer, length=recipe.length, **options)
    else:
        load_spec = partial(load_conversations, processor=processor, length=recipe.length)
    train = load_spec(spec, seed=recipe.seed)
    # The tokens of a stream are not known yet: its files stand in for them.
    digests = {"train": digest_of(train) if isinstance(train, Dataset) else repr(file_identities(spec))}
    if recipe.held_out:
        split = recipe.held_out_split or recipe.split
        held_out = load_spec(replace(spec, paths=recipe.held_out, split=split, streaming=False), seed=None)
        assert isinstance(held_out, Dataset)
        digests |= {"held_out": digest_of(held_out)}
        if isinstance(train, Dataset):
            return RunData(_whole_batches(train, recipe), held_out, digests)
        # `Trainer` does not know where a pass over a stream ends: it would add the micro-batches of a short last step
        # to the next step, and resume in the first pass. So there is one pass without an end.
        endless = train.repeat(None)  # pyrefly: ignore[bad-argument-type]  # documented: `None` repeats without an end
        return RunData(endless, held_out, digests)
    assert isinstance(train, Dataset)  # a recipe with a stream has `held_out`
    # At most a tenth of the data, so that most of a small data set is left to train on.
    count = recipe.held_out_sequences or min(MAX_HELD_OUT, max(1, len(train) // 10))
    num_train = len(train) - count
    if num_train <= 0:
        raise ValueError(
            f"`held_out_sequences` of the recipe is {count}, but the data has only "
            f"{counted(len(train), 'sequence')} of {recipe.length} tokens: hold out fewer, name other data by "
            "`held_out`, or give more data, or a smaller `length`."
        )
    first, last = (select_rows(train, rows) for rows in (range(num_train), range(num_train, len(train))))
    return RunData(_whole_batches(first, recipe, count), last, digests)


def _whole_batches(train: Dataset, recipe: Recipe, num_held_out: int = 0) -> Dataset:
    """Return the sequences without the last ones, which make no whole batch. Raise ValueError if none is left.

    The last batch of an epoch would be short, and with several processes accelerate would fill it with sequences of the
    epoch's first batch.
    """
    left_out = len(train) % recipe.batch_size
    if left_out == len(train):
        held_out = f", {num_held_out} of them held out" if num_held_out else ""
        raise ValueError(
            f"the data has {counted(len(train) + num_held_out, 'sequence')} of {recipe.length} tokens{held_out}: less "
            f"than one batch of {recipe.batch_size}. Give more data, or smaller `length` or `batch_size`."
        )
    whole = select_rows(train, range(len(train) - left_out))
    if left_out:
        last = f"the last {counted(left_out, 'sequence')} left out, which fill no batch of {recipe.batch_size}"
        whole.info.description = ", ".join(filter(None, [train.info.description, last]))
    return whole


__all__ = ["MAX_HELD_OUT", "RunData", "prepare_data"]
