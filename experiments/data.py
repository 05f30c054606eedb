"""Text as packed token ids. A corpus is tokenised once, into a small file that travels to machines without the text.

The file holds the token ids of `train` and of `valid`, compressed. Every document ends with the end-of-text token. One
half of `valid` chooses settings, and the other half is reported.
"""

import hashlib
import json
import lzma
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from attnres.training.packing import in_blocks
from attnres.utils.files import atomic_write

from .declared import Corpus

PREPARED = Path(__file__).parent / "prepared"  # ignored by git
MOST_PASSES = 1000  # over the text: more is a slip, and the orders of so many would fill the memory


@dataclass(frozen=True)
class TokenData:
    """Packed token ids.

    Attributes:
        train: to train on, `[sequences, length]`.
        selection: to choose settings by, `[held out, length]`.
        valid: to report, `[held out, length]`.
        fingerprint: the first digits of the SHA-256 of the text, which tells texts of one name apart.
    """

    train: Tensor
    selection: Tensor
    valid: Tensor
    fingerprint: str = ""

    def held_out(self, selecting: bool) -> Tensor:
        """Return the sequences that a run is measured on: one that chooses settings, or one that is reported."""
        return self.selection if selecting else self.valid

    def order(self, seed: int, count: int) -> Tensor:
        """Return the training sequences of a seed: all of them in a shuffled order, then all in another, and so on.

        Args:
            seed: of the shuffling.
            count: how many sequences.

        Returns:
            `[count, length]`.

        Raises:
            ValueError: the text would be passed over too often.
        """
        self.check(count)
        generator = torch.Generator().manual_seed(seed)
        passes = -(-count // len(self.train))
        order = torch.cat([torch.randperm(len(self.train), generator=generator) for _ in range(passes)])
        return self.train[order[:count]]

    def check(self, count: int) -> None:
        """Raise ValueError if `count` training sequences are more than `MOST_PASSES` passes over the text."""
        if count > MOST_PASSES * len(self.train):
            raise ValueError(
                f"{count:,} sequences are more than {MOST_PASSES:,} passes over the {len(self.train):,} of the text: "
                "train on fewer tokens, or on a longer text."
            )


def prepared_file(text: Corpus, out: Path = PREPARED) -> Path:
    """Return the file of the token ids of a text."""
    return out / f"{text.name}.xz"


def tokenizer_folder(text: Corpus, out: Path = PREPARED) -> Path:
    """Return the folder of the tokenizer of a text."""
    return out / f"{text.name}-tokenizer"


def check_corpus(text: Corpus, folder: Path) -> None:
    """Raise ValueError if the folder has another name than the corpus, since its runs would be stored under that."""
    if folder.resolve().name != text.corpus:
        raise ValueError(f"--corpus must be the folder of {text.corpus}, which is declared; got {folder}.")


def prepare(text: Corpus, folder: Path, out: Path = PREPARED) -> Path:
    """Tokenise a corpus: write its token ids to a file, and the tokenizer to a folder beside it.

    Args:
        text: which text.
        folder: holds `train.txt` and `valid.txt`.
        out: where the file and the folder go.

    Returns:
        The file.

    Raises:
        OSError: a text cannot be read.
        ValueError: a text is empty, or the folder is that of another corpus.
    """
    check_corpus(text, folder)
    from attnres.training.text import read_documents, token_stream, train_tokenizer

    documents = read_documents(folder / "train.txt", text.characters)
    tokenizer = train_tokenizer(documents, text.vocab_size)
    parts = {"train": documents, "valid": read_documents(folder / "valid.txt")}
    streams = {name: token_stream(part, tokenizer).astype(np.uint16) for name, part in parts.items()}
    head = {name: len(stream) for name, stream in streams.items()}
    content = json.dumps(head).encode() + b"\n" + b"".join(stream.tobytes() for stream in streams.values())
    compressed = lzma.compress(content, preset=1)
    out.mkdir(parents=True, exist_ok=True)
    path = prepared_file(text, out)
    # The file says that a text is prepared. It goes first and comes last: so it never lies beside another tokenizer.
    path.unlink(missing_ok=True)
    tokenizer.save_pretrained(tokenizer_folder(text, out))
    atomic_write(path, compressed)
    return path


def load(text: Corpus, length: int, held_out: int, out: Path = PREPARED) -> TokenData:
    """Load the prepared token ids.

    Args:
        text: which text.
        length: tokens of a sequence.
        held_out: sequences in each half of the text that is not trained on.
        out: where the text was prepared.

    Raises:
        FileNotFoundError: the text was not prepared.
        ValueError: the file is damaged, or the text is too short.
    """
    path = prepared_file(text, out)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: name the folder of the text by --corpus, which prepares it.")
    try:
        prepared = lzma.decompress(path.read_bytes())
        head, _, content = prepared.partition(b"\n")
        counts, stream = json.loads(head), np.frombuffer(content, np.uint16)
        if list(counts) != ["train", "valid"] or min(counts.values()) < 0 or sum(counts.values()) != len(stream):
            raise ValueError(f"it holds {len(stream)} tokens, and its counts are {counts}")
        if stream.max(initial=0) >= text.vocab_size:
            raise ValueError(f"it has the id {stream.max()}, and a vocabulary of {text.vocab_size}")
        parts = np.split(stream, [counts["train"]])
    except (lzma.LZMAError, AttributeError, EOFError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}): prepare it anew by --corpus DIR --prepare.") from error
    train, valid = (torch.from_numpy(in_blocks(part.astype(np.int64), length)) for part in parts)
    for name, part, least in (("train", train, 1), ("valid", valid, 2 * held_out)):
        if len(part) < least:
            raise ValueError(
                f"{name}.txt of {text.corpus} gives {len(part)} sequences of {length} tokens, not {least}: "
                "prepare a longer one by --corpus DIR --prepare."
            )
    order = torch.randperm(len(valid), generator=torch.Generator().manual_seed(0))
    fingerprint = hashlib.sha256(prepared).hexdigest()[:12]
    return TokenData(train, valid[order[:held_out]], valid[order[held_out : 2 * held_out]], fingerprint)
