"""Chat data: encode conversations by the tokenizer's own template, with the loss on the assistant's part alone.

The assistant's part is the text that the model has to write: each of its turns, and the token that ends the turn.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from attnres.utils.wording import counted

from . import IGNORED
from .typed_tokens import holds_marks, mark_typed, rename_special, special_tokens_of, text_tokenizer, without_marks

# Types of parts of a message that no model here reads. A template may leave them out, or write a mark in their place.
_UNREAD = ("audio", "input_audio", "video", "video_url")
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def encode_chat(
    tokenizer: PreTrainedTokenizerBase, column: str = "messages", processor: Any = None
) -> Callable[[dict], dict]:
    """Return a function that encodes a row with a conversation.

    Two kinds of templates work. One kind marks the assistant's part by `{% generation %}`: the marked text is learned,
    and the end-of-turn token after it. Any other template must render a message the same way whatever follows it: the
    assistant's part is then the text that each of its turns adds to the prompt for that turn.

    The text of messages and tools is text: if it holds the name of a special token, such as `<|im_end|>`, the tokens of
    this text stand there. All special tokens of a conversation are the template's.

    Args:
        tokenizer: A tokenizer with a chat template.
        column: The column of the messages.
        processor: The processor of a model that reads images, `AttnResKimiK3Processor`. In the content of a message,
            `{"type": "image", "size": [width, height]}` then stands for an image of this size in pixels.

    Returns:
        A function of a row. The row has, in `column`, a list of messages `{"role": ..., "content": ...}`, with
        any other keys that the template reads (`tool_calls`, `reasoning_content`), and may have `tools`. The function
        returns `input_ids` and `labels` of the whole conversation; labels outside the assistant's part are -100. It
        raises ValueError for a row that cannot be used.

    Raises:
        ValueError: The tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "The tokenizer has no chat template: set its `chat_template`, or add a `chat_template.jinja` to its files."
        )
    added = frozenset([*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids])
    special = special_tokens_of(tokenizer)
    # The placeholder is no token, but in the text of a message it must not stand for an image.
    special = special if processor is None else (processor.image_token, *special)
    return _ChatEncoder(tokenizer, column, added, special, processor)


@dataclass(frozen=True)
class _ChatEncoder:
    """The function that [`encode_chat`] returns. A class can be sent to worker processes, and a closure cannot."""

    tokenizer: PreTrainedTokenizerBase
    column: str
    added_tokens: frozenset[int]  # control tokens: one of them ends a turn
    special_tokens: tuple[str, ...]  # their names, of those that are not text
    processor: Any = None

    def __call__(self, row: dict[str, Any]) -> dict[str, list[int]]:
        messages, tools = _messages(row, self.column), _tools(row)
        if self.processor is None and any(image_parts(message) for message in messages):
            raise ValueError(f"`{self.column}` holds an image. Give images=true, and a model that reads images.")
        typed = mark_typed([messages, tools], self.special_tokens)
        if typed == [messages, tools]:
            return self._encode(messages, tools)
        return _TypedEncoder(**vars(self)).encode_typed(messages, tools, *typed)

    def _encode(self, messages: list[dict], tools: list | None) -> dict[str, list[int]]:
        """Return the tokens and labels of a conversation."""
        try:
            template = self.tokenizer.get_chat_template(tools=tools)
            marked = _GENERATION.search(template) is not None
            text, parts = self._marked(template, messages, tools) if marked else self._unmarked(messages, tools)
            ending = self._ending(template, messages, tools) if marked else None
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the chat template refuses the conversation: {' '.join(str(error).split())}") from error
        ids = self._tokens(text)
        labels = [IGNORED] * len(ids)
        for part in parts:
            start, end = self._token_span(text, ids, *part)
            # Marks usually end before the token that ends the turn, which the model has to write too.
            if ending is not None and ids[end : end + 1] == [ending]:
                end += 1
            else:
                end = self._without_trailing_space(ids, start, end)
            labels[start:end] = ids[start:end]
        if self.processor is not None:
            image = self.processor.image_token_id
            labels = [IGNORED if label == image else label for label in labels]
        if all(label == IGNORED for label in labels):
            raise ValueError("the chat template renders no text of the assistant's turns.")
        return {"input_ids": ids, "labels": labels}

    def _marked(self, template: str, messages: list[dict], tools: list | None) -> tuple[str, list[tuple[int, int]]]:
        """Return the conversation as text, and the start and end of each part that the template marks."""
        # `apply_chat_template` finds the tokens of a part by their offsets. Many tokenizers give no offset for a space,
        # so it would stop at the first part that begins with a space. Like it, this leaves out keys without a value.
        messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
        special: dict[str, Any] = self.tokenizer.special_tokens_map
        rendered: Any = render_jinja_template(
            [messages], tools=tools, chat_template=template, return_assistant_tokens_mask=True, **special
        )
        (text,), (parts,) = rendered
        return self._with_images(text, messages, [(start, end) for start, end in parts if start < end])

    def _unmarked(self, messages: list[dict], tools: list | None) -> tuple[str, list[tuple[int, int]]]:
        """Return the conversation as text, and the start and end of what each assistant turn adds to its prompt."""
        if any(map(image_parts, messages)):
            raise ValueError("conversations with images need a chat template that marks answers by {% generation %}.")
        text, parts = self._render(messages, tools), []
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = self._render(messages[:i], tools, add_generation_prompt=True)
                turn = self._render(messages[: i + 1], tools)
                if not (turn.startswith(prompt) and text.startswith(turn)):
                    raise ValueError(_UNSTABLE)
                parts.append((len(prompt), len(turn)))
        return text, parts

    def _token_span(self, text: str, ids: list[int], start: int, end: int) -> tuple[int, int]:
        """Return the start and end of the tokens of `text[start:end]`, with tokens that reach beyond it.

        The offsets of tokens would be simpler, but some tokens have none: see `_marked`.
        """
        first = _common_prefix(self._tokens(text[:start]), ids)
        until = self._tokens(text[:end])
        last = _common_prefix(until, ids)
        if last < len(until):  # a token spans `end`: the tokens of the text after `end` show where this token ends
            last = max(last, len(ids) - _common_prefix(self._tokens(text[end:])[::-1], ids[::-1]))
        return first, last

    def _without_trailing_space(self, ids: list[int], start: int, end: int) -> int:
        """Return the end of a part without the white space after its end-of-turn token."""
        last = next((i for i in range(end - 1, start - 1, -1) if ids[i] in self.added_tokens), None)
        if last is None or str(self.tokenizer.decode(ids[last + 1 : end])).strip():
            return end
        return last + 1

    def _ending(self, template: str, messages: list[dict], tools: list | None) -> int | None:
        """Return the control token that ends a turn behind the marked part, or `None`.

        It is the token behind the part in a conversation that ends with this turn. In a longer one, the token behind a
        part may begin the next turn: where the marks include the end, or where turns have no end.
        """
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                text, parts = self._marked(template, messages[: i + 1], tools)
                if parts:
                    ids = self._tokens(text)
                    _, end = self._token_span(text, ids, *parts[-1])
                    return next((token for token in ids[end : end + 1] if token in self.added_tokens), None)
        return None

    def _render(self, messages: list[dict], tools: list | None, add_generation_prompt: bool = False) -> str:
        text: Any = self.tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return text  # a text since `tokenize` is false

    def _with_images(
        self, text: str, messages: list[dict], parts: list[tuple[int, int]]
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return a text with the prompts of images in place of placeholders, and the parts at their new places."""
        images = [part for message in messages for part in image_parts(message)]
        if self.processor is None or not images:
            return text, parts
        placeholder = self.processor.image_token
        pieces = text.split(placeholder)
        if len(pieces) != len(images) + 1:
            raise ValueError(f"the chat template renders {len(pieces) - 1} of {counted(len(images), 'image')}.")
        prompts = [self.processor.image_prompt(*part["size"]) for part in images]
        joined = "".join(piece + prompt for piece, prompt in zip(pieces, [*prompts, ""]))

        def moved(place: int) -> int:
            before = prompts[: text.count(placeholder, 0, place)]
            return place + sum(len(prompt) - len(placeholder) for prompt in before)

        return joined, [(moved(start), moved(end)) for start, end in parts]

    def _tokens(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]


@dataclass(frozen=True)
class _TypedEncoder(_ChatEncoder):
    """The encoder of a conversation whose messages hold names of special tokens, which [`mark_typed`] has marked."""

    def encode_typed(self, messages: list[dict], tools: list | None, *typed: Any) -> dict[str, list[int]]:
        """Return the tokens and labels of a conversation, given without and with marks."""
        encoded, text = self._encode(*typed), super()._render(messages, tools)
        if holds_marks(text):  # they could form the new name of a special token
            raise ValueError("a message holds the name of a special token, and one of U+FDD0 to U+FDD2: remove these.")
        if without_marks(super()._render(*typed)) != text:
            raise ValueError(
                "the chat template reads special tokens in messages, as it does for thinking, so they cannot be "
                "encoded as text: leave them out, or give thinking as `reasoning_content`."
            )
        return encoded

    def _marked(self, template: str, messages: list[dict], tools: list | None) -> tuple[str, list[tuple[int, int]]]:
        text, parts = super()._marked(template, messages, tools)
        lengths = [[len(self._rename(text[:place])) for place in part] for part in parts]
        return self._rename(text), [(start, end) for start, end in lengths]

    def _render(self, *arguments: Any, **options: Any) -> str:
        return self._rename(super()._render(*arguments, **options))

    def _rename(self, text: str) -> str:
        return rename_special(text, self.special_tokens)

    def _tokens(self, text: str) -> list[int]:
        return text_tokenizer(self.tokenizer, self.special_tokens).encode(text, add_special_tokens=False).ids


_UNSTABLE = (
    "the chat template renders earlier messages differently once others follow, for example without their thinking, so "
    "the assistant's part cannot be found: mark it in the template by {% generation %} and {% endgeneration %}, or "
    "give each assistant turn its own row, which ends with that turn."
)


def _messages(row: dict[str, Any], column: str) -> list[dict[str, Any]]:
    """Return the messages of a row.

    Raises:
        ValueError: The row has no list of messages, no assistant turn, or an assistant turn first.
    """
    messages = row.get(column)
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"`{column}` holds no messages.")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {i} of `{column}` must be an object with a `role` and a `content`.")
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and (kind := part.get("type")) in _UNREAD:
                raise ValueError(f"message {i} of `{column}` has a part of type {kind!r}. Give text or images instead.")
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise ValueError(f"`{column}` has no assistant turn, only turns of {', '.join(dict.fromkeys(roles))}.")
    if roles[0] == "assistant":
        raise ValueError(f"`{column}` begins with an assistant turn, which has nothing to answer.")
    return messages


def _tools(row: dict[str, Any]) -> list | None:
    """Return the tools of a row, which may be JSON text; `None` if there are none."""
    tools = row.get("tools")
    if isinstance(tools, str) and tools:
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise ValueError(f"`tools` is broken JSON: {error}.") from error
    return tools or None


def is_image(part: Any) -> bool:
    """Return whether a part of a message's content is an image."""
    return isinstance(part, dict) and part.get("type") in ("image", "image_url")


def image_parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of a message's content that are images."""
    content = message.get("content")
    return [*filter(is_image, content)] if isinstance(content, list) else []


def _common_prefix(first: list[int], second: list[int]) -> int:
    """Return the length of the longest common prefix of two lists."""
    pairs = zip(first, second)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


__all__ = ["IGNORED", "encode_chat", "image_parts", "is_image"]
