"""Text for small training runs: the Python installation's own sources, or a file; a tokenizer; the tokens in a row."""

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from attnres.conversion.tokenizers import load_tokenizer

from .loaders import END_OF_TEXT, TEXT_COLUMN, load_text

PADDING = "<|pad|>"


def python_sources(max_characters: int) -> list[str]:
    """The standard library's modules, code and docstrings, a document each, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "test", "tests", "encodings"}  # the last: tables of characters
    paths = [path for path in root.rglob("*.py") if not left_out & set(path.relative_to(root).parts)]
    # Ordered by a hash, so that a prefix is a fair sample of the library and the same on every run.
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
    """The documents of a text file, as training takes them from it; the last is the one that reaches `max_characters`.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds no text, or what is not UTF-8.
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
        remedy: How the user may name another, as for [`load_tokenizer`].

    Raises:
        OSError: `source` is no directory, and the Hub does not give it.
        ValueError: There is no tokenizer that loads, or it has no end-of-text token.
    """
    tokenizer = load_tokenizer(source, remedy=remedy)
    tokenizer.init_kwargs.pop("auto_map", None)  # what a run writes does not refer to code that it did not run
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {source} has no end-of-text token; set its `eos_token`.")
    return tokenizer


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer; its special tokens are `<|pad|>` (0) and `<|endoftext|>` (1, end and start)."""
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


def token_stream(documents: list[str], tokenizer: PreTrainedTokenizerBase, begin: bool = False) -> np.ndarray:
    """The tokens of all documents in a row, `[tokens]`, without the special tokens that the tokenizer itself adds.

    Args:
        begin: each document stands after the beginning-of-text token; else it ends with the end-of-text token.
    """
    tokenized = tokenizer(documents, add_special_tokens=False, verbose=False)["input_ids"] if documents else []
    first, last = ([tokenizer.bos_token_id], []) if begin else ([], [tokenizer.eos_token_id])
    return np.fromiter(chain.from_iterable(chain(first, ids, last) for ids in tokenized), np.int64)
