"""Text for small training runs: the Python installation's own sources, or a file; a tokenizer; packed token blocks."""

import hashlib
import os
import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

END_OF_TEXT, PADDING = "<|endoftext|>", "<|pad|>"


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


def read_documents(path: str | os.PathLike, max_characters: int) -> list[str]:
    """The documents of a text file: split at lines that hold only `<|endoftext|>`, else in paragraphs.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds no text.
    """
    with open(path, encoding="utf-8", errors="ignore") as file:
        text = file.read(max_characters)
    at_marks = re.split(rf"^{re.escape(END_OF_TEXT)}$", text, flags=re.MULTILINE)
    parts = at_marks if len(at_marks) > 1 else text.split("\n\n")
    documents = [part.strip() for part in parts if part.strip()]
    if not documents:
        raise ValueError(f"{path} holds no text.")
    return documents


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


def pack(documents: list[str], tokenizer: PreTrainedTokenizerBase, length: int) -> Tensor:
    """Tokenize documents, end each with the end-of-text token, and cut the stream into blocks.

    Returns:
        Token ids `[blocks, length]`; the last, incomplete block is dropped.
    """
    tokenized = tokenizer(documents, add_special_tokens=False, verbose=False)["input_ids"] if documents else []
    ids = [token for document in tokenized for token in [*document, tokenizer.eos_token_id]]
    blocks = len(ids) // length
    return torch.tensor(ids[: blocks * length], dtype=torch.long).view(blocks, length)
