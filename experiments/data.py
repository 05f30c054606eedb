"""Text as packed token ids: a corpus is tokenised once, into a small file that travels to machines without the text.

The file holds the stream of each part, in the order of the text, compressed; every document ends with the end-of-text
token. Parts are `train` and `valid`, of which one half chooses settings and the other half is reported.
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

PREPARED = Path(__file__).parent / "prepared"  # ignored by git
VOCABULARIES = range(258, 2**16 + 1)  # the bytes and two special tokens at least; ids are stored in 16 bits
MOST_PASSES = 1000  # over the text: more is a slip, and their orders would fill the memory


@dataclass(frozen=True)
class Text:
    """Which text: a folder with `train.txt` and `valid.txt`, the tokens of a BPE trained on the former.

    Attributes:
        corpus: name of the folder.
        vocab_size: of the tokenizer.
        characters: how much of `train.txt` is read, in whole documents.

    Raises:
        ValueError: a tokenizer cannot have this vocabulary, or a prepared file not its ids.
    """

    corpus: str
    vocab_size: int
    characters: int

    def __post_init__(self):
        if type(self.vocab_size) is not int or self.vocab_size not in VOCABULARIES:
            least, most = VOCABULARIES[0], VOCABULARIES[-1]
            raise ValueError(f"vocab_size of the text is {self.vocab_size!r}, no whole number from {least} to {most}.")

    @property
    def name(self) -> str:
        return f"{self.corpus}-{self.vocab_size}-{self.characters}"


@dataclass(frozen=True)
class Data:
    """Packed tokens `[n, length]`: to train on, to choose settings by, and to report.

    `fingerprint`: the first digits of the SHA-256 of a prepared text, which tells texts of one name apart.
    """

    train: Tensor
    selection: Tensor
    valid: Tensor
    fingerprint: str = ""

    def held_out(self, selecting: bool) -> Tensor:
        """What a run is measured on that settings are chosen by, or that is reported."""
        return self.selection if selecting else self.valid

    def order(self, seed: int, wanted: int) -> Tensor:
        """The `wanted` training sequences of a seed: all of them in a shuffled order, then all in another, ...

        Raises:
            ValueError: as [`check`].
        """
        self.check(wanted)
        generator = torch.Generator().manual_seed(seed)
        epochs = -(-wanted // len(self.train))
        order = torch.cat([torch.randperm(len(self.train), generator=generator) for _ in range(epochs)])
        return self.train[order[:wanted]]

    def check(self, wanted: int) -> None:
        """Raises ValueError: so many training sequences are more than [`MOST_PASSES`] over the text."""
        if wanted > MOST_PASSES * len(self.train):
            raise ValueError(
                f"{wanted:,} sequences are more than {MOST_PASSES:,} passes over the {len(self.train):,} of the text: "
                "train on fewer tokens, or on a longer text."
            )


def prepared_file(text: Text, out: Path = PREPARED) -> Path:
    return out / f"{text.name}.xz"


def tokenizer_folder(text: Text, out: Path = PREPARED) -> Path:
    return out / f"{text.name}-tokenizer"


def check_corpus(text: Text, folder: Path) -> None:
    """Raises ValueError: the folder is of another corpus, which would go by the name of this one."""
    if folder.resolve().name != text.corpus:
        raise ValueError(f"--corpus: this is declared for {text.corpus}, not {folder}.")


def prepare(text: Text, folder: Path, out: Path = PREPARED) -> Path:
    """Tokenise the corpus in `folder` and write its token ids to a file of `out`, the tokenizer to a folder beside it.

    Raises:
        OSError: a text cannot be read.
        ValueError: one holds no text, or the folder is of another corpus.
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
    path.unlink(missing_ok=True)  # it says that a text is prepared: no older one stands beside a newer tokenizer
    tokenizer.save_pretrained(tokenizer_folder(text, out))
    atomic_write(path, compressed)
    return path


def load(text: Text, length: int, held_out: int, out: Path = PREPARED) -> Data:
    """The prepared tokens in sequences of `length`, `held_out` of them in each half of the text that is not trained on.

    Raises:
        FileNotFoundError: it was not prepared.
        ValueError: the file is damaged, or a text too short.
    """
    path = prepared_file(text, out)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: name the folder of the text by --corpus, which prepares it.")
    try:
        prepared = lzma.decompress(path.read_bytes())
        streams = _streams(prepared, text.vocab_size)
    except (lzma.LZMAError, EOFError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}): prepare it anew by --corpus DIR --prepare.") from error
    train, valid = (torch.from_numpy(in_blocks(stream.astype(np.int64), length)) for stream in streams)
    for name, part, least in (("train", train, 1), ("valid", valid, 2 * held_out)):
        if len(part) < least:
            raise ValueError(
                f"{name}.txt of {text.corpus} gives {len(part)} sequences of {length} tokens, not {least}: "
                "prepare a longer one by --corpus DIR --prepare."
            )
    order = torch.randperm(len(valid), generator=torch.Generator().manual_seed(0))
    fingerprint = hashlib.sha256(prepared).hexdigest()[:12]
    return Data(train, valid[order[:held_out]], valid[order[held_out : 2 * held_out]], fingerprint)


def _streams(prepared: bytes, vocab_size: int) -> list[np.ndarray]:
    """The ids of `train` and of `valid`. Raises ValueError: they are not as many as the file says, or not its own."""
    head, _, content = prepared.partition(b"\n")
    counts, stream = json.loads(head), np.frombuffer(content, np.uint16)
    if not isinstance(counts, dict) or list(counts) != ["train", "valid"]:
        raise ValueError("it begins with no counts of train and valid")
    if any(type(count) is not int or count < 0 for count in counts.values()) or sum(counts.values()) != len(stream):
        raise ValueError(f"it holds {len(stream)} tokens, and its counts are {counts}")
    if stream.max(initial=0) >= vocab_size:
        raise ValueError(f"it has the id {stream.max()}, and a vocabulary of {vocab_size}")
    return np.split(stream, [counts["train"]])
