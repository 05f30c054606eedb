"""The text that models are inspected on: cut into sequences of equal length, as token ids and as words for people."""

import hashlib
import os
import sys
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from attnres.utils.wording import counted

_CHARACTERS = 20  # that are read for each token that is wanted; few texts have so many in one


@dataclass(frozen=True)
class Text:
    """A text for people: where it is from and what it says.

    Attributes:
        name: the file, or what the text is.
        content: as much of it as is needed.
    """

    name: str
    content: str = field(repr=False)

    @property
    def sha256(self) -> str:
        """Of `content`, in UTF-8."""
        return hashlib.sha256(self.content.encode()).hexdigest()


def read_text(path: str | os.PathLike, tokens: int) -> Text:
    """The beginning of a file, enough for so many tokens.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no UTF-8, or empty.
    """
    try:
        with open(path, encoding="utf-8") as file:
            content = file.read(_CHARACTERS * tokens).lstrip()
            while not content and (part := file.read(_CHARACTERS * tokens)):  # blank so far
                content = part.lstrip()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: give a plain text file.") from error
    if not content:
        raise ValueError(f"{path} holds no text.")
    return Text(Path(path).name, content)


def language_reference(tokens: int) -> Text:
    """Prose that is on every machine: what `help()` shows of the Python language, in its order."""
    from pydoc_data.topics import topics  # half a megabyte

    name = f"the language reference of Python {sys.version_info.major}.{sys.version_info.minor}"
    return Text(name, "\n\n".join(topics[topic] for topic in sorted(topics))[: _CHARACTERS * tokens])


def cut(text: Text, tokenizer: PreTrainedTokenizerBase, length: int, tokens: int) -> tuple[Tensor, list[str]]:
    """Token ids `[sequences, length]` of up to so many tokens, and the words of the first sequence's tokens.

    Each sequence begins with what the tokenizer puts in front of a text. Joined, the words are the text itself.

    Raises:
        ValueError: the text is shorter than one sequence.
    """
    encoded = tokenizer(text.content, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast, verbose=False)
    ids, before = encoded["input_ids"], tokenizer("", verbose=False)["input_ids"]
    before = [before[0]] if before and before[0] == tokenizer.bos_token_id else []
    step = length - len(before)
    if len(ids) < step:
        raise ValueError(
            f"{text.name} has {counted(len(ids), 'token')}, but one sequence takes {step:,}: give a longer text or a "
            "smaller length."
        )
    sequences = [before + ids[begin : begin + step] for begin in range(0, len(ids) - step + 1, step)]
    first = sequences[0][len(before) :]
    words = tokenizer.convert_ids_to_tokens(first)
    if tokenizer.is_fast:
        ends = [0, *(end for _, end in encoded["offset_mapping"][:step])]
        # A character of several tokens ends with the first of them.
        words = [text.content[begin:end] or "·" for begin, end in pairwise(ends)]
    kept = sequences[: max(1, tokens // length)]
    return torch.tensor(kept, dtype=torch.long), [*tokenizer.convert_ids_to_tokens(before), *words]


__all__ = ["Text", "cut", "language_reference", "read_text"]
