"""Chat data: a conversation through the tokenizer's own template, with the loss on the assistant's part alone.

The assistant's part is what the model has to write: the text of each of its turns, and the token that ends the turn.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

IGNORED = -100  # the label that the loss leaves out

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def encode_chat(tokenizer: PreTrainedTokenizerBase, column: str = "messages") -> Callable[[dict], dict]:
    """A function that turns rows of conversations into tokens and labels.

    A row holds, in the `column`, a list of messages `{"role": ..., "content": ...}`, in whatever else the template
    reads too (`tool_calls`, `reasoning_content`), and may have `tools`. The function gives `input_ids` and `labels` of
    the whole conversation, where labels are -100 outside of the assistant's part.

    A template that marks the assistant's part by `{% generation %}` is taken at its word, and the end-of-turn token
    that follows the mark is counted in. Otherwise the part is found by rendering the conversation up to each turn of
    the assistant's, which needs a template that renders messages alike whatever follows.

    Raises:
        ValueError: the tokenizer has no chat template; and, from the function, a row that cannot be used.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "The tokenizer has no chat template: set its `chat_template`, or add a `chat_template.jinja` to its files."
        )
    return _ChatEncoder(tokenizer, column, frozenset([*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids]))


@dataclass(frozen=True)
class _ChatEncoder:
    """A class and not a closure: worker processes can be sent it."""

    tokenizer: PreTrainedTokenizerBase
    column: str
    added_tokens: frozenset[int]  # control tokens: one of them ends a turn

    def __call__(self, row: dict[str, Any]) -> dict[str, list[int]]:
        messages, tools = _messages(row, self.column), _tools(row)
        try:
            template = self.tokenizer.get_chat_template(tools=tools)
            if self.tokenizer.is_fast and _GENERATION.search(template):
                ids, spans = self._marked(messages, tools)
            else:
                ids, spans = self._rendered(messages, tools)
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the chat template refuses the conversation: {' '.join(str(error).split())}") from error
        labels = [IGNORED] * len(ids)
        for start, end in spans:
            labels[start:end] = ids[start:end]
        if not any(label != IGNORED for label in labels):
            raise ValueError("the assistant's turns are empty in what the chat template makes of them.")
        return {"input_ids": ids, "labels": labels}

    def _marked(self, messages: list[dict], tools: list | None) -> tuple[list[int], list[tuple[int, int]]]:
        """All tokens, and the spans that the template marks."""
        encoding = self.tokenizer.apply_chat_template(
            messages,
            tools=tools,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"return_offsets_mapping": True},
        )
        ids, mask, offsets = list(encoding["input_ids"]), encoding["assistant_masks"], encoding["offset_mapping"]
        spans, end = [], 0
        while 1 in mask[end:]:
            start = mask.index(1, end)
            end = mask.index(0, start) if 0 in mask[start:] else len(ids)
            # The mask ends with the first token of the last character, which may have more.
            while end < len(ids) and offsets[end][0] < offsets[end - 1][1]:
                end += 1
            spans.append((start, end))
        ends_turn = self.added_tokens - {self._opening(messages, tools)}
        return ids, [(start, end + (not ends_turn.isdisjoint(ids[end : end + 1]))) for start, end in spans]

    def _rendered(self, messages: list[dict], tools: list | None) -> tuple[list[int], list[tuple[int, int]]]:
        """All tokens, and the spans between the prompt of each of the assistant's turns and its end."""
        text = self._render(messages, tools)
        ids, spans = self._tokens(text), []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._render(messages[:i], tools, add_generation_prompt=True)
            turn = self._without_trailing_space(self._tokens(self._render(messages[: i + 1], tools)))
            start, end = _shared(self._tokens(prompt), ids), _shared(turn, ids)
            # At the end one token may be merged with what follows. Anything more is another rendering.
            if not text.startswith(prompt) or end < len(turn) - 1:
                raise ValueError(_UNSTABLE)
            spans.append((start, end))
        return ids, spans

    def _render(self, messages: list[dict], tools: list | None, add_generation_prompt: bool = False) -> str:
        return self.tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
        )

    def _tokens(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]

    def _opening(self, messages: list[dict], tools: list | None) -> int | None:
        """The token that opens a turn, which the next turn may begin with where none ends the one before."""
        first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
        prompt = self._tokens(self._render(messages[:first], tools, add_generation_prompt=True))
        before = self._tokens(self._render(messages[:first], tools))
        return next(iter(prompt[_shared(prompt, before) :]), None)

    def _without_trailing_space(self, ids: list[int]) -> list[int]:
        """Up to the last added token, which ends the turn, if only white space follows it."""
        last = next((i for i in range(len(ids) - 1, -1, -1) if ids[i] in self.added_tokens), None)
        if last is None or self.tokenizer.decode(ids[last + 1 :]).strip():
            return ids
        return ids[: last + 1]


_UNSTABLE = (
    "the chat template renders earlier messages differently once others follow, as templates do that drop earlier "
    "thinking, so the assistant's part cannot be told: mark it in the template by {% generation %} and "
    "{% endgeneration %}, or make each of the assistant's turns the last of a row of its own."
)


def _messages(row: dict[str, Any], column: str) -> list[dict[str, Any]]:
    """The conversation of a row.

    Raises:
        ValueError: it is no list of messages, or the assistant has no turn or the first one.
    """
    messages = row.get(column)
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"`{column}` holds no messages.")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {i} of `{column}` is no object with a `role` and a `content`.")
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise ValueError(f"`{column}` has no turn of the assistant's, only of {', '.join(dict.fromkeys(roles))}.")
    if roles[0] == "assistant":
        raise ValueError(f"`{column}` begins with a turn of the assistant's: there is nothing that it answers.")
    return messages


def _tools(row: dict[str, Any]) -> list | None:
    tools = row.get("tools")
    if isinstance(tools, str) and tools:
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise ValueError(f"`tools` is broken JSON: {error}.") from error
    return tools or None


def _shared(first: list[int], second: list[int]) -> int:
    """The length of what two lists begin with alike."""
    pairs = zip(first, second)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


__all__ = ["IGNORED", "encode_chat"]
