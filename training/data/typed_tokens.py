"""Encode special tokens that a message names, such as `<|im_end|>`, as ordinary text.

A tokenizer makes a special token of its name wherever the name stands, so the text of a message would become control
tokens. `transformers` can turn this off for a whole text only. Here the special tokens that the template writes get
other names before the conversation is encoded, and a copy of the tokenizer knows only these names. All else is as in
the tokenizer, so text has the tokens that it has anywhere in a conversation.
"""

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from attnres.checkpoints.tokenizers import is_plain_fast

# Noncharacters of Unicode, which hardly any text holds: within a name that a message holds, and around another name.
_TYPED, _BEGIN, _END = "\ufdd0", "\ufdd1", "\ufdd2"
_BYTE = re.compile("<0x[0-9A-F]{2}>")


def special_tokens_of(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the names of a tokenizer's special tokens, the longest first, as the tokenizer looks for them."""
    names = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    # A name of one character cannot be marked. Tokens of single bytes are what text is made of.
    names = {name for name in names | {*tokenizer.all_special_tokens} if len(name) > 1 and not _BYTE.fullmatch(name)}
    return tuple(sorted(names, key=lambda name: (-len(name), name)))


def mark_typed(value: Any, names: Sequence[str]) -> Any:
    """Return a value of JSON, with a mark in each name of a special token that a text in it holds."""
    if isinstance(value, str):
        return _pattern(names).sub(lambda match: f"{match[0][0]}{_TYPED}{match[0][1:]}", value) if names else value
    if isinstance(value, dict):
        return {mark_typed(key, names): mark_typed(item, names) for key, item in value.items()}
    return [mark_typed(item, names) for item in value] if isinstance(value, list) else value


def holds_marks(text: str) -> bool:
    """Return whether a text holds a noncharacter that this file uses."""
    return any(mark in text for mark in (_TYPED, _BEGIN, _END))


def without_marks(text: str) -> str:
    """Return a rendered text without the marks of [`mark_typed`]."""
    return text.replace(_TYPED, "")


def rename_special(text: str, names: Sequence[str]) -> str:
    """Return a rendered text, with its special tokens by the names of [`text_tokenizer`], and without marks."""
    return without_marks(_pattern(names).sub(lambda match: _renamed(match[0], names), text))


@lru_cache(maxsize=1)
def text_tokenizer(tokenizer: PreTrainedTokenizerBase, names: Sequence[str]) -> Tokenizer:
    """Return a copy of a tokenizer that knows special tokens only by the names that [`rename_special`] gives them.

    Raises:
        ValueError: The tokenizer is one in Python, of which there is no such copy.
    """
    if not is_plain_fast(tokenizer):
        raise ValueError(
            "a message holds the name of a special token, which only a fast tokenizer can encode as text: save a "
            "`tokenizer.json`, or leave such rows out by bad_rows=skip."
        )
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["padding"] = state["truncation"] = None  # calls of the tokenizer leave their settings here
    known = {*names}

    def rename(name: str) -> str:
        return _renamed(name, names) if name in known else name

    for token in state["added_tokens"]:
        token["content"] = rename(token["content"])
    model = state["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {rename(name): number for name, number in model["vocab"].items()}
    else:  # of a Unigram, `[name, score]` by number
        model["vocab"] = [[rename(name), *score] for name, *score in model["vocab"]]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = rename(model["unk_token"])
    if "merges" in model:
        # Tokenizers made from SentencePiece may merge text to the name of a special token.
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        model["merges"] = [pair for pair in pairs if not known.intersection([*pair, "".join(pair)])]
    return Tokenizer.from_str(json.dumps(state))


@lru_cache(maxsize=8)
def _pattern(names: Sequence[str]) -> re.Pattern:
    return re.compile("|".join(map(re.escape, names)))


def _renamed(name: str, names: Sequence[str]) -> str:
    return f"{_BEGIN}{names.index(name)}{_END}"


__all__ = ["holds_marks", "mark_typed", "rename_special", "special_tokens_of", "text_tokenizer", "without_marks"]
