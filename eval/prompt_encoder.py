"""Turn prompts into tokens: with one BOS token, without tokens after the end, and cut to a model's context."""

from transformers import PreTrainedTokenizerBase


class PromptEncoder:
    """Encode the texts of a benchmark.

    Args:
        tokenizer: The tokenizer.
        add_bos_token: Whether a text begins with BOS. By default the tokenizer decides.
        prefix_token_id: The token that begins a text without context. By default BOS or, without one, EOS.

    Attributes:
        prefix: The token that begins a text without context.

    Raises:
        ValueError: The tokenizer names neither a BOS nor an EOS token.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, add_bos_token: bool | None = None, prefix_token_id: int | None = None
    ) -> None:
        check_special_tokens(tokenizer, tokenizer.name_or_path or "the model")
        self._tokenizer = tokenizer
        self._add_bos_token = add_bos_token
        candidates = (prefix_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
        self.prefix: int = next(token for token in candidates if token is not None)
        # A text may begin with the prefix or BOS.
        self._starts = [self.prefix, tokenizer.bos_token_id]
        self._start_texts = tuple(filter(None, (tokenizer.bos_token, str(tokenizer.decode(self.prefix)))))
        self._num_appended = count_appended(tokenizer)

    def encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Encode a text, with at most one BOS token and without tokens that the tokenizer appends.

        Args:
            text: The text.
            add_special_tokens: Whether the tokenizer adds tokens. By default, `add_bos_token` and the tokenizer decide;
                a text that has its BOS token already, because a chat template wrote it, gets none.
        """
        adds = add_special_tokens
        if adds is None:
            adds = False if text.startswith(self._start_texts) else self._add_bos_token
        tokens = self._tokenizer.encode(text, **({} if adds is None else {"add_special_tokens": adds}))
        return tokens[: -self._num_appended] if self._num_appended and adds is not False else tokens

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Encode a context and its continuation together, and cut where the context ends.

        Spaces at the end of the context belong to the first word of the continuation. An empty context becomes the
        prefix token. A part is empty only if its text is empty.
        """
        words = context.rstrip()
        continuation = context[len(words) :] + continuation
        if not context:
            return [self.prefix], self.encode_after_prefix(continuation)
        context_tokens = self.encode(words)
        continuation_tokens = self.encode(words + continuation)[len(context_tokens) :]
        if not continuation_tokens:  # one token covers the end of the context and the whole continuation
            continuation_tokens = self.encode(continuation, add_special_tokens=False)
        return context_tokens or [self.prefix], continuation_tokens

    def encode_after_prefix(self, text: str) -> list[int]:
        """Encode a text that follows the prefix token. If it contains that token, the token is not repeated."""
        tokens = self.encode(text, add_special_tokens=False)
        return tokens[1:] if tokens[:1] == [self.prefix] else tokens

    def cut(self, prompt: list[int], length: int) -> list[int]:
        """Return the last `length` tokens of a prompt, at least 1. A start token stays, and one more after it is cut.

        Many models give useless likelihoods for a text without its BOS token.
        """
        if len(prompt) <= length:
            return prompt
        end = prompt[len(prompt) - length :]
        return [prompt[0], *end[1:]] if prompt[0] in self._starts else end


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


__all__ = ["PromptEncoder", "check_special_tokens"]
