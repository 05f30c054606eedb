"""Text and tokenizers for small training runs: the sources of the Python installation, or a file.

The demo needs no network: it trains its own tokenizer on these sources.
"""

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from attnres.checkpoints.tokenizers import load_tokenizer

from .data.loaders import END_OF_TEXT, TEXT_COLUMN, load_text

PADDING = "<|pad|>"


def python_sources(max_characters: int) -> list[str]:
    """Return modules of Python's standard library in a fixed order, until they have `max_characters` characters."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "test", "tests", "encodings"}  # `encodings` holds tables of characters
    paths = [path for path in root.rglob("*.py") if not left_out & set(path.relative_to(root).parts)]
    # Ordered by a hash, so that the first modules are a fair sample of the library, and the same in every run.
    paths.sort(key=lambda path: hashlib.sha1(path.relative_to(root).as_posix().encode()).digest())
    documents, size = [], 0
    for path in paths:
        if size >= max_characters:
            break
        document = path.read_text(encoding="utf-8", errors="ignore").strip()
        size += len(document)
        if document:
            documents.append(document)
    return documents


def read_documents(path: str | os.PathLike, max_characters: int = sys.maxsize) -> list[str]:
    """Read the documents of a text file, divided as in training.

    Args:
        path: The file.
        max_characters: Stop after the document that reaches this number.

    Returns:
        The documents.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file holds no text, or is not UTF-8.
    """
    documents, size = [], 0
    for document in load_text(os.fspath(path), TEXT_COLUMN, whole_rows=False):
        if isinstance(document, ValueError):
            raise document
        documents.append(document.row[TEXT_COLUMN])
        size += len(documents[-1])
        if size >= max_characters:
            break
    if not documents:
        raise ValueError(f"{path} holds no text.")
    return documents


def open_tokenizer(source: str, remedy: str = "") -> PreTrainedTokenizerBase:
    """Load a tokenizer to train with, without the code that came with it.

    Args:
        source: The directory or Hub id of the tokenizer.
        remedy: The end of the error message, which says how to name another tokenizer, as for [`load_tokenizer`].

    Returns:
        The tokenizer.

    Raises:
        OSError: `source` is neither a directory nor a tokenizer that the Hub gives.
        ValueError: The tokenizer does not load, or has no end-of-text token.
    """
    tokenizer = load_tokenizer(source, remedy=remedy)
    # Code that came with the tokenizer was not run, so the saved tokenizer must not refer to it.
    tokenizer.init_kwargs.pop("auto_map", None)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {source} has no end-of-text token; set its `eos_token`.")
    return tokenizer


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer.

    Args:
        documents: The text to train on.
        vocab_size: The most tokens.

    Returns:
        The tokenizer. Its special tokens are `<|pad|>` (id 0) and `<|endoftext|>` (id 1), which is both the start and
        the end of a text.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PADDING, END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    special = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": PADDING}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
