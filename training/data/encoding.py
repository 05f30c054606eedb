"""Encode documents as tokens, in batches: texts by the tokenizer, or whole rows by a function of the caller."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from attnres.checkpoints.tokenizers import is_plain_fast
from attnres.utils.extras import require_extra

from .documents import Documents
from .loaders import Document
from .packing import Place, Tokens

with require_extra("train"):
    from datasets.fingerprint import Hasher

# A function that returns the `input_ids` and `labels` of a row, and raises ValueError for a row that it cannot use.
Encode = Callable[[dict[str, Any]], dict[str, Any]]

_CHARACTERS_AT_ONCE, _DOCUMENTS_AT_ONCE = 1 << 20, 1024


@dataclass(frozen=True)
class Encoder:
    """An encoder of documents.

    Args:
        tokenizer: The tokenizer.
        encode: A function that encodes a row. Without it, text is tokenised with the tokenizer's own special tokens,
            and ends with its end-of-text token.

    Raises:
        ValueError: There is no `encode`, and the tokenizer has no end-of-text token.
    """

    tokenizer: PreTrainedTokenizerBase
    encode: Encode | None = None

    def __post_init__(self) -> None:
        if self.encode is None and self.tokenizer.eos_token_id is None:
            raise ValueError("The tokenizer has no end-of-text token: set its `eos_token`.")

    def key(self) -> str:
        """Return a digest for the name of a cache folder. It changes if the same documents may give other tokens."""
        if self.encode is not None:
            return Hasher.hash((self.tokenizer.chat_template, self.encode))
        if not is_plain_fast(self.tokenizer):
            return Hasher.hash(self.tokenizer)
        state = json.loads(self.tokenizer.backend_tokenizer.to_str())
        # Calls of the tokenizer leave their settings here. `_encode_texts` resets them.
        for setting in ("padding", "truncation"):
            state.pop(setting, None)
        return key_of(state, self.tokenizer.eos_token_id, self.tokenizer.split_special_tokens)

    def batches(self, documents: Documents) -> Iterator[Tokens]:
        """Yield the tokens of all documents. `bad_rows` of `documents` decides about rows that cannot be encoded."""
        for batch in _batched(documents, documents.spec.column):
            if self.encode is None:
                tokens = self._encode_texts(batch, documents.spec.column)
            else:
                tokens = _encode_rows(self.encode, batch, documents)
            if tokens.places:
                yield tokens

    def _encode_texts(self, batch: list[Document], column: str) -> Tokens:
        texts = [document.row[column] for document in batch]
        if is_plain_fast(self.tokenizer):
            # A call resets the padding and truncation that an earlier call may have left in the backend.
            self.tokenizer("")
            # This gives the tokens of a call in half the time, since it computes no offsets.
            ids = [encoding.ids for encoding in self.tokenizer.backend_tokenizer.encode_batch_fast(texts)]
        else:
            ids = self.tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]
        end = self.tokenizer.eos_token_id
        return _join([text if text[-1:] == [end] else [*text, end] for text in ids], None, batch)


def _encode_rows(encode: Encode, batch: list[Document], documents: Documents) -> Tokens:
    ids, labels, encoded = [], [], []
    for document in batch:
        try:
            row = encode(document.row)
            if len(row["input_ids"]) != len(row["labels"]):
                raise ValueError(f"{len(row['input_ids'])} tokens, but {len(row['labels'])} labels.")
        except ValueError as error:
            documents.skip_row(ValueError(f"{document.source}:{document.first}: {error}"))
            continue
        if len(row["input_ids"]):
            ids.append(row["input_ids"])
            labels.append(row["labels"])
            encoded.append(document)
    return _join(ids, labels, encoded)


def key_of(*parts: Any) -> str:
    """Return a name of 24 hexadecimal digits for values that JSON can hold, the same in every process."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _batched(documents: Iterable[Document], column: str) -> Iterator[list[Document]]:
    """Yield batches that are limited in documents and in characters, so that they fit into memory."""
    batch, characters = [], 0
    for document in documents:
        batch.append(document)
        value = document.row[column]
        characters += len(value) if isinstance(value, str) else 0
        if characters >= _CHARACTERS_AT_ONCE or len(batch) >= _DOCUMENTS_AT_ONCE:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _join(ids: list, labels: list | None, batch: list[Document]) -> Tokens:
    """Join the tokens `ids` and the `labels` of the documents of a batch, one list for each document."""
    lengths = np.array([len(document) for document in ids], dtype=np.int64)

    def flat(part: list) -> np.ndarray:
        return np.fromiter(chain.from_iterable(part), np.int32, lengths.sum())

    places = [Place(document.source, document.first, document.last) for document in batch]
    return Tokens(flat(ids), None if labels is None else flat(labels), lengths, places)
