"""Read a text to inspect models on, and cut it into sequences of equal length."""

import hashlib
import io
import os
import sys
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from attnres.utils.wording import counted

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer  # exists for type checkers alone

# Characters to read for each token that is needed. Few texts have more characters in a token.
_CHARACTERS_PER_TOKEN = 20
_CHUNK = 2**20  # bytes to read at a time for the digest alone


@dataclass(frozen=True)
class InspectedText:
    """A text and where it comes from.

    Attributes:
        name: The name of the file, or a description of the text.
        content: The beginning of the text, long enough for the inspection.
        sha256: The SHA-256 of the whole file's bytes, as hexadecimal digits; by default that of `content` in UTF-8, for
            a text that is not from a file.
    """

    name: str
    content: str = field(repr=False)
    sha256: str = ""

    def __post_init__(self):
        if not self.sha256:
            object.__setattr__(self, "sha256", hashlib.sha256(self.content.encode()).hexdigest())


class _HashedFile(io.FileIO):
    """A file that updates a digest by all bytes that are read from it. A pipe can be read only once."""

    def __init__(self, path: str | os.PathLike):
        super().__init__(path)
        self.digest = hashlib.sha256()

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        count = super().readinto(buffer)
        self.digest.update(memoryview(buffer)[:count])
        return count


def read_text(path: str | os.PathLike, tokens: int) -> InspectedText:
    """Read the beginning of a file, as training reads texts, and compute the digest of the whole file.

    A byte order mark and leading white space are left out, and lines end in a line feed.

    Args:
        path: A plain text file.
        tokens: The number of tokens that the text must have; 20 characters are read for each.

    Returns:
        The text, with the name of the file and the SHA-256 of its bytes.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is JSON or not UTF-8, or holds nothing but white space.
    """
    if Path(path).suffix in (".json", ".jsonl"):
        raise ValueError(f"{path} must be plain text, but its name says that it is JSON: write its texts to a file.")
    try:
        with _HashedFile(path) as source:
            buffered = io.BufferedReader(source)
            file = io.TextIOWrapper(buffered, encoding="utf-8-sig")
            content = file.read(_CHARACTERS_PER_TOKEN * tokens).lstrip()
            # If only white space was read, the text begins later.
            while not content and (part := file.read(_CHARACTERS_PER_TOKEN * tokens)):
                content = part.lstrip()
            while buffered.read(_CHUNK):  # the rest of the file
                pass
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: give a plain text file.") from error
    if not content:
        raise ValueError(f"{path} holds no text.")
    return InspectedText(Path(path).name, content, source.digest.hexdigest())


def language_reference(tokens: int) -> InspectedText:
    """Return a text that is on every machine: the pages on the Python language that `help()` shows.

    Args:
        tokens: The number of tokens that the text must have; 20 characters are returned for each.

    Returns:
        The beginning of the pages, in the order of their names.
    """
    from pydoc_data.topics import topics  # half a megabyte, which only this function needs

    name = f"the language reference of Python {sys.version_info.major}.{sys.version_info.minor}"
    pages = "\n\n".join(topics[topic] for topic in sorted(topics))
    return InspectedText(name, pages[: _CHARACTERS_PER_TOKEN * tokens])


def cut(text: InspectedText, tokenizer: PreTrainedTokenizerBase, length: int, tokens: int) -> tuple[Tensor, list[str]]:
    """Cut a text into sequences of equal length.

    If the tokenizer puts a BOS token in front of a text, every sequence begins with it.

    Args:
        text: The text to cut.
        tokenizer: The tokenizer of the model.
        length: The number of tokens of a sequence.
        tokens: The largest number of tokens to return. At least one sequence is returned.

    Returns:
        Token ids `[sequences, length]` in int64, and the words of the first sequence, one for each token. The words
        after the BOS token, joined, are the beginning of the text.

    Raises:
        ValueError: The text is shorter than one sequence.
    """
    encoded = tokenizer(text.content, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast, verbose=False)
    ids, special = encoded["input_ids"], tokenizer("", verbose=False)["input_ids"]
    prefix = [special[0]] if special and special[0] == tokenizer.bos_token_id else []
    step = length - len(prefix)
    if len(ids) < step:
        raise ValueError(
            f"{text.name} has {counted(len(ids), 'token')}, but one sequence takes {step:,}: give a longer text or a "
            "smaller length."
        )
    sequences = [prefix + ids[begin : begin + step] for begin in range(0, len(ids) - step + 1, step)]
    first = sequences[0][len(prefix) :]
    words = tokenizer.convert_ids_to_tokens(first)
    if tokenizer.is_fast:
        ends = [0, *(end for _, end in encoded["offset_mapping"][:step])]
        # Of the tokens of one character, the first gets the character, and the others get a dot.
        words = [text.content[begin:end] or "·" for begin, end in pairwise(ends)]
    sequences = sequences[: max(1, tokens // length)]
    return torch.tensor(sequences, dtype=torch.long), [*tokenizer.convert_ids_to_tokens(prefix), *words]


__all__ = ["InspectedText", "cut", "language_reference", "read_text"]
