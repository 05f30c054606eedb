"""Handle special tokens at the ends of a text: those that a tokenizer adds, and BOS where a prompt is cut."""

from collections.abc import Collection

from transformers import PreTrainedTokenizerBase


def check_special_tokens(tokenizer: PreTrainedTokenizerBase, source: str, generates: bool = False) -> None:
    """Raise if a tokenizer does not name the special tokens that an evaluation needs.

    The harness begins a text without context with BOS or, without one, EOS. It ends an answer at EOS.

    Args:
        tokenizer: The tokenizer.
        source: The name of the model, for the message.
        generates: Whether the model generates answers. Otherwise it only scores texts.

    Raises:
        ValueError: It names neither BOS nor EOS, or lacks EOS and the model generates answers.
    """
    if tokenizer.eos_token_id is None and (generates or tokenizer.bos_token_id is None):
        lacks = "no EOS token, at which an answer ends" if generates else "neither a BOS nor an EOS token"
        raise ValueError(
            f"The tokenizer of {source} names {lacks}. Name the token that ends a text as `eos_token` in its "
            "tokenizer_config.json."
        )


def count_appended(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of tokens that a tokenizer appends to a text.

    Args:
        tokenizer: The tokenizer.
    """
    # Encode one letter without and with special tokens, and count the tokens after it (0 if it is not found).
    bare, whole = (tokenizer.encode("a", add_special_tokens=special) for special in (False, True))
    starts = (i for i in range(len(whole) - len(bare) + 1) if whole[i : i + len(bare)] == bare)
    return len(whole) - len(bare) - next(starts, len(whole) - len(bare))


def cut_left(tokens: list[int], length: int, starts: Collection[int]) -> list[int]:
    """Return the last `length` tokens of a text. A start token stays, and one more token after it is cut.

    Many models give useless likelihoods for a text without its BOS token.

    Args:
        tokens: The text.
        length: The greatest number of tokens, at least 1.
        starts: The tokens that begin a text, such as BOS.
    """
    if len(tokens) <= length:
        return tokens
    end = tokens[len(tokens) - length :]
    return [tokens[0], *end[1:]] if tokens[0] in starts else end


__all__ = ["check_special_tokens", "count_appended", "cut_left"]
