"""Text for small runs, the sources of the Python installation or a file, and a tokenizer that is trained on it.

The demo needs no network: it trains its own tokenizer on these sources.
"""

import hashlib
import os
import platform
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from attnres.utils.wording import counted

from .data.loaders import END_OF_TEXT, TEXT_COLUMN, load_text

PADDING = "<|pad|>"
MAX_TEXT_CHARACTERS = 4_000_000
# Every fourth document is held out. The loss is measured on the first tokens of the first of these.
HELD_OUT_EVERY, HELD_OUT_DOCUMENTS, HELD_OUT_CHARACTERS = 4, 64, 1500
LEAST_DOCUMENTS = HELD_OUT_EVERY + 1  # so that two are held out
PROMPT, PROMPT_CHARACTERS = "def ", 60  # for Python sources; the length of a prompt from another text


@dataclass(frozen=True)
class DemoText:
    """The text of a demo.

    Attributes:
        source: Where it comes from, in words.
        train: The documents to train on.
        held_out: The beginnings of held-out documents.
        prompt: The beginning that samples continue.
        note: A remark for the screen.
    """

    source: str
    train: list[str]
    held_out: list[str]
    prompt: str
    note: str = ""

    @property
    def sha256(self) -> str:
        """Return a digest of all documents."""
        digest = hashlib.sha256()
        for document in (*self.held_out, *self.train):
            digest.update(document.encode("utf-8") + b"\0")
        return digest.hexdigest()


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


def read_demo_text(path: Path | None) -> DemoText:
    """Read a file of text, or the sources of the Python installation."""
    documents = python_sources(MAX_TEXT_CHARACTERS) if path is None else read_documents(path, MAX_TEXT_CHARACTERS)
    if len(documents) < LEAST_DOCUMENTS:
        raise ValueError(
            f"{path} has {counted(len(documents), 'document')}, but the demo needs at least {LEAST_DOCUMENTS}: give a "
            "longer --text. A document ends at an empty line or, if there is one, at a line of <|endoftext|> alone."
        )
    train = [document for i, document in enumerate(documents) if i % HELD_OUT_EVERY]
    held_out = [document[:HELD_OUT_CHARACTERS] for document in documents[::HELD_OUT_EVERY][:HELD_OUT_DOCUMENTS]]
    if path is None:
        source = f"the standard library of Python {platform.python_version()}"
        return DemoText(source, train, held_out, PROMPT, " Another Python has another text.")
    # The first words of a document, without the last one, which may be cut.
    prompt = held_out[0][: PROMPT_CHARACTERS + 1]
    if len(prompt) > PROMPT_CHARACTERS:
        prompt = prompt.rpartition(" ")[0] or prompt[:-1]
    return DemoText(str(path), train, held_out, prompt)


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
