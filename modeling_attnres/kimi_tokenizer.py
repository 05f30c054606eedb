"""Read the tokenizer of a Kimi release into a fast tokenizer, without running code from the release.

Kimi K3, Kimi K2 and Kimi Linear are released with `tiktoken.model`, a table of byte sequences and their ranks, and with
Python code that hands it to the package `tiktoken`. The fast tokenizer gives the same ids, needs neither, and is saved
as `tokenizer.json`, which every engine reads.
"""

import base64
import os
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils import CHAT_TEMPLATE_FILE, cached_file

RANKS = "tiktoken.model"
K3_CHAT_TEMPLATE = Path(__file__).parent / "templates" / "kimi_k3_chat_template.jinja"
# After the ranks follow this many control tokens. Those that `tokenizer_config.json` does not name are reserved.
CONTROL_TOKENS = 256
_OF_THE_RELEASED_CLASS = {"added_tokens_decoder", "auto_map", "tokenizer_class"}
_HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
_NO_FIELDS = {*_HUB_OPTIONS, "code_revision", "proxies", "resume_download", "trust_remote_code", "use_fast"}
_IF_THERE = {"_raise_exceptions_for_missing_entries": False}
# Words as the release splits text before it merges bytes: Chinese characters apart from other letters, letters with the
# character before them and an English ending, up to three digits, punctuation, line breaks, spaces.
_LETTERS = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_WORDS = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_LETTERS}]*[\p{{Ll}}{_LETTERS}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_LETTERS}]+[\p{{Ll}}{_LETTERS}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
# The release cuts long text before it splits words: after each 400,000 characters, and after each 25,000 that are all
# white space or all not, as Python's `str.isspace` has it. A regular expression may repeat 100,000 times at most.
# `\G` is the place of the last cut: a search from any other would take a time that grows with the square of the length.
_PIECES = r"\G(?:[\s\S]{100000}){4}"
_SPACE, _NO_SPACE = r"[\s\x1c-\x1f]", r"[^\s\x1c-\x1f]"
_RUNS = "|".join(rf"(?:(?<!{kind})|\G){kind}{{25000}}(?={kind})" for kind in (_SPACE, _NO_SPACE))


class _KimiConverter(TikTokenConverter):
    """The converter of `transformers`, which reads the table without the package `tiktoken`."""

    @staticmethod
    def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
        return read_ranks(Path(tiktoken_url))


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read a table of ranks: a line for each byte sequence, in base64, and its rank.

    Args:
        path: The file.

    Returns:
        The ranks from 0 by byte sequence, in their order. All single bytes are among them.

    Raises:
        ValueError: A line is damaged, or ranks or single bytes are missing: text would become other tokens.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}, must hold base64 and a rank. Copy the file again.") from error
    ordered = dict(sorted(ranks.items(), key=lambda item: item[1]))
    if list(ordered.values()) != list(range(len(ordered))):
        expected = next(i for i, rank in enumerate(ordered.values()) if i != rank)
        raise ValueError(f"{path} must hold each rank once: {expected} is missing. Copy the file again.")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ordered]:
        raise ValueError(f"{path} must hold all single bytes: {missing[0]:#04x} is missing. Copy the file again.")
    return ordered


def read_kimi_tokenizer(
    source: str | os.PathLike, config: dict[str, Any], **options: Any
) -> PreTrainedTokenizerFast | None:
    """Read the tokenizer of a release.

    Its ids are those of the released code. Only a text that is longer than 400,000 characters and holds control tokens
    may be cut elsewhere, since a fast tokenizer begins to count anew after each control token.

    Args:
        source: The folder or Hub id of the release.
        config: The content of its `tokenizer_config.json`.
        options: Arguments of `cached_file`, such as `revision`.

    Returns:
        A fast tokenizer; None if the source is not a release of Kimi. Kimi K3 has no chat template: its format is code.
        Its tokenizer gets a template that renders the same text.

    Raises:
        ValueError: The table of ranks is damaged, or two control tokens have one name.
    """
    if config.get("tokenizer_class") != TikTokenTokenizer.__name__:
        return None
    path, template = (cached_file(source, name, **options, **_IF_THERE) for name in (RANKS, CHAT_TEMPLATE_FILE))
    if path is None:
        return None
    tokenizer = _KimiConverter(path).converted()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.Split(Regex(_RUNS), behavior="merged_with_previous"),
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    first = tokenizer.get_vocab_size()
    end = first + CONTROL_TOKENS
    # Decoding may leave out tokens that are special, and keeps the others.
    control = [AddedToken(f"<|reserved_token_{i}|>", normalized=False, special=True) for i in range(first, end)]
    for key, token in config.get("added_tokens_decoder", {}).items():
        if not key.isdecimal() or not isinstance(token, dict) or not isinstance(token.get("content"), str):
            raise ValueError(
                f"`added_tokens_decoder` of the tokenizer_config.json beside {path} must have an id and a `content` "
                f"for each token, but has {key!r}: {token!r}. Copy it again."
            )
        if (i := int(key)) not in range(first, end):
            raise ValueError(
                f"{path} holds {first} ranks, and {token['content']} of tokenizer_config.json has the id {i}, which "
                f"must be one of the {CONTROL_TOKENS} behind them. Copy both files again."
            )
        control[i - first] = AddedToken(token["content"], normalized=False, special=token.get("special", True))
    tokenizer.add_tokens(control)
    if [tokenizer.token_to_id(token.content) for token in control] != list(range(first, end)):
        raise ValueError(f"{path}: the control tokens beside it must have names of their own. Copy both files again.")
    fields = {"bos_token": "[BOS]", "eos_token": "[EOS]"}
    fields |= {key: value for key, value in config.items() if key not in _OF_THE_RELEASED_CLASS}
    if template is not None:
        fields["chat_template"] = Path(template).read_text(encoding="utf-8")
    elif "chat_template" not in fields and "<|end_of_msg|>" in tokenizer.get_vocab():
        fields["chat_template"] = K3_CHAT_TEMPLATE.read_text(encoding="utf-8")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **fields)


class TikTokenTokenizer:
    """The name that releases have for their tokenizer; `AutoTokenizer` finds [`from_pretrained`] by it."""

    @classmethod
    def from_pretrained(cls, source: str | os.PathLike, *inputs: Any, **options: Any) -> PreTrainedTokenizerBase:
        """Load the tokenizer of a release without running its code.

        Args:
            source: The folder or Hub id.
            inputs: Other arguments of `PreTrainedTokenizerFast.from_pretrained`.
            options: Others by name, such as `revision` or `padding_side`.

        Returns:
            A fast tokenizer: of the table of ranks or, where the source has none, of its `tokenizer.json`.

        Raises:
            ValueError: As [`read_kimi_tokenizer`].
        """
        hub = {key: options[key] for key in _HUB_OPTIONS if options.get(key) is not None}
        others = {key: value for key, value in options.items() if key not in _NO_FIELDS and not key.startswith("_")}
        released = read_kimi_tokenizer(source, get_tokenizer_config(source, **hub) | others, **hub)
        return PreTrainedTokenizerFast.from_pretrained(source, *inputs, **options) if released is None else released


__all__ = ["K3_CHAT_TEMPLATE", "RANKS", "TikTokenTokenizer", "read_kimi_tokenizer", "read_ranks"]
