"""Text as packed token ids. A corpus is tokenised once, into a small file that stands for it on other machines.

The file holds the token ids of `train.txt` and `valid.txt`, compressed. Each document ends with the end-of-text token.
One half of `valid.txt` chooses settings, and the other half is reported.
"""

import hashlib
import json
import lzma
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from attnres.training.data.blocks import in_blocks
from attnres.utils.files import atomic_write

from .declared import Corpus

PREPARED = Path(__file__).parent / "prepared"  # ignored by git


@dataclass(frozen=True)
class TokenData:
    """Packed token ids.

    Attributes:
        train: The sequences to train on, `[sequences, length]`.
        selection: The sequences that choose settings, `[held out, length]`.
        valid: The sequences that are reported, `[held out, length]`.
        fingerprint: The first digits of the SHA-256 of the text, to tell texts of one name apart.
    """

    train: Tensor
    selection: Tensor
    valid: Tensor
    fingerprint: str = ""

    def held_out(self, selecting: bool) -> Tensor:
        """Return the sequences that a run is measured on: `selection` if it chooses settings, or else `valid`."""
        return self.selection if selecting else self.valid

    def order(self, seed: int, count: int) -> Tensor:
        """Return the training sequences of a seed: all in a shuffled order, then all in another order, and so on.

        Args:
            seed: The seed of the shuffling.
            count: The number of sequences.

        Returns:
            The sequences, `[count, length]`.
        """
        generator = torch.Generator().manual_seed(seed)
        passes = -(-count // len(self.train))
        order = torch.cat([torch.randperm(len(self.train), generator=generator) for _ in range(passes)])
        return self.train[order[:count]]


def token_stream(documents: list[str], tokenizer: PreTrainedTokenizerBase, begin: bool = False) -> np.ndarray:
    """Tokenise documents and join them to one stream, without the special tokens that the tokenizer adds by itself.

    Args:
        documents: The documents.
        tokenizer: The tokenizer.
        begin: Put the beginning-of-text token before each document. Else put the end-of-text token after it.

    Returns:
        The token ids, int64 `[tokens]`.
    """
    tokenized = tokenizer(documents, add_special_tokens=False, verbose=False)["input_ids"] if documents else []
    first, last = ([tokenizer.bos_token_id], []) if begin else ([], [tokenizer.eos_token_id])
    return np.fromiter(chain.from_iterable(chain(first, ids, last) for ids in tokenized), np.int64)


def prepared_file(text: Corpus, out: Path = PREPARED) -> Path:
    """Return the file of the token ids of a text."""
    return out / f"{text.name}.xz"


def tokenizer_folder(text: Corpus, out: Path = PREPARED) -> Path:
    """Return the folder of the tokenizer of a text."""
    return out / f"{text.name}-tokenizer"


def prepare(text: Corpus, corpus: Path | None, out: Path = PREPARED) -> None:
    """Tokenise a corpus: write its token ids to a file, and the tokenizer to a folder beside it.

    Args:
        text: The declared text.
        corpus: The folder with `train.txt` and `valid.txt`.
        out: The folder that is written to.

    Raises:
        OSError: A text cannot be read.
        ValueError: A text is empty, or the folder is missing or has another name than the corpus.
    """
    # Runs are stored under the declared name, so another text must not get it.
    if corpus is None or corpus.resolve().name != text.corpus:
        raise ValueError(f"--corpus must be the folder of {text.corpus}; got {corpus}.")
    # Imported here, since the machine of the GPU has prepared text and no `datasets`.
    from attnres.training.text import read_documents, train_tokenizer

    documents = read_documents(corpus / "train.txt", text.characters)
    tokenizer = train_tokenizer(documents, text.vocab_size)
    parts = {"train": documents, "valid": read_documents(corpus / "valid.txt")}
    streams = {name: token_stream(part, tokenizer).astype(np.uint16) for name, part in parts.items()}
    head = {name: len(stream) for name, stream in streams.items()}
    content = json.dumps(head).encode() + b"\n" + b"".join(stream.tobytes() for stream in streams.values())
    tokenizer.save_pretrained(tokenizer_folder(text, out))
    path = prepared_file(text, out)
    atomic_write(path, lzma.compress(content, preset=1))
    print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB")


def load(text: Corpus, length: int, held_out: int, corpus: Path | None = None, out: Path = PREPARED) -> TokenData:
    """Load the token ids of a text, which is prepared first if it was not before.

    Args:
        text: The declared text.
        length: Tokens in a sequence.
        held_out: Sequences in each half of `valid.txt`.
        corpus: The folder with `train.txt` and `valid.txt`; `None` if the text was prepared.
        out: The folder of prepared texts.

    Raises:
        OSError: A text cannot be read.
        ValueError: The text was not prepared and no folder is given, or the text is too short.
    """
    path = prepared_file(text, out)
    if not path.exists():
        prepare(text, corpus, out)
    content = lzma.decompress(path.read_bytes())
    head, _, ids = content.partition(b"\n")
    parts = np.split(np.frombuffer(ids, np.uint16).astype(np.int64), [json.loads(head)["train"]])
    train, valid = (torch.from_numpy(in_blocks(part, length)) for part in parts)
    if not len(train) or len(valid) < 2 * held_out:
        raise ValueError(
            f"{path} holds {len(train)} training sequences of {length} tokens and {len(valid)} others, but must hold "
            f"1 and {2 * held_out}: prepare a longer text by --corpus DIR --prepare."
        )
    order = torch.randperm(len(valid), generator=torch.Generator().manual_seed(0))
    fingerprint = hashlib.sha256(content).hexdigest()[:12]
    return TokenData(train, valid[order[:held_out]], valid[order[held_out : 2 * held_out]], fingerprint)
