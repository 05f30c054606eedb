"""Make a table of ranks from texts, and write the tokenizer files of a Kimi release with it."""

import base64
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import bytes_to_unicode

# Control tokens of Kimi K3, by their place behind the table. The others are reserved.
NAMES = {0: "[BOS]", 1: "[EOS]", 2: "<|end_of_msg|>", 3: "<|open|>", 4: "<|close|>", 5: "<|sep|>"} | {
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    254: "[UNK]",
    255: "[PAD]",
}
BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}


def train_vocabulary(texts: Iterable[str], size: int) -> dict[str, int]:
    """A byte-level vocabulary of texts, split at white space. No control token becomes one of its words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}|\s*[^\s]+|\s+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator((text.replace("<|", "< |") for text in texts), trainer)
    return tokenizer.get_vocab()


def ranks_of(vocabulary: Mapping[str, int]) -> dict[bytes, int]:
    """The ranks of byte sequences, from a byte-level vocabulary of `tokenizers`."""
    return {bytes(BYTE_OF[c] for c in token): rank for token, rank in vocabulary.items()}


def write_tokenizer(vocabulary: Mapping[str, int], folder: Path) -> Path:
    """Write the table, the configuration, and code that must not run; return the folder."""
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks_of(vocabulary).items()]
    (folder / "tiktoken.model").write_text("".join(lines))
    tokens = {str(len(vocabulary) + i): {"content": name, "special": True} for i, name in NAMES.items()}
    roles = {"bos_token": "[BOS]", "eos_token": "[EOS]", "unk_token": "[UNK]", "pad_token": "[PAD]"}
    code = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": tokens} | roles | code
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "tokenization_kimi.py").write_text("raise SystemExit('this code must not run')\n")
    return folder
