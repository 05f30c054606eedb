"""Read and edit the text of a model card: its metadata, and the parts that this package writes.

`huggingface_hub` reads and writes the metadata. A person may write anything below it. The parts of this package stand
there between marks. A mark holds a digest of the part as it was written. If the part no longer has this digest, a
person has edited it. Then it is not rewritten.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from huggingface_hub import RepoCard
from huggingface_hub.repocard import REGEX_YAML_BLOCK

ORDER = ("summary", "origin", "use", "results", "files")
_BEGINS = re.compile(r"<!-- attnres:(\w+) ([0-9a-f]{12}) -->\n")
_PUSHED = re.compile(r"\n?<!-- attnres pushed ([0-9a-f]{12}) of ([0-9a-f]{12}) -->\n?")


# --- Metadata -------------------------------------------------------------------------------------------------------


def split_card(text: str) -> tuple[str, str]:
    """Split a card into its metadata, with the lines `---` around it, and the text below."""
    match = REGEX_YAML_BLOCK.match(text)
    end = match.end() if match else 0
    return text[:end], text[end:]


def read_model_card(text: str) -> RepoCard:
    """Return a card with its metadata as `data`.

    A `ModelCard` would keep of `model-index` only the fields that it knows, and join the results of several models.

    Raises:
        ValueError: The metadata is damaged. The message is one line.
    """
    metadata, body = split_card(text)
    try:
        # `RepoCard` logs a warning if there is no metadata.
        card = RepoCard(text if metadata else f"---\n\n---\n\n{body}")
        if not isinstance(card.data.get("model-index", []), list):  # the Hub would refuse it after a repository is made
            raise TypeError("`model-index` must be a list")
    except Exception as error:  # PyYAML's constructors and `CardData` raise many kinds
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"the metadata of the card, the YAML between `---` and `---`, is damaged: {reason}") from error
    card.data["language"] = _languages(card.data.get("language"))
    return card


def _languages(value: Any) -> Any:
    """Return a language or list of languages with `no` for Norwegian, which YAML reads as false."""
    return [_languages(item) for item in value] if isinstance(value, list) else "no" if value is False else value


def add_metadata(text: str, values: Mapping[str, Any], items: Mapping[str, Sequence[str]] | None = None) -> str:
    """Add values to the metadata of a card. Metadata that lacks none of them stays as it is written.

    Args:
        text: The card.
        values: Values for fields that the card does not have.
        items: Items for fields that are lists. They are appended if the list lacks them.

    Returns:
        The new card.

    Raises:
        ValueError: The metadata is damaged.
    """
    card = read_model_card(text)
    before = card.data.to_dict()
    for name, value in values.items():
        if card.data.get(name) is None:
            card.data[name] = value
    for name, wanted in (items or {}).items():
        value = card.data.get(name, [])
        present = value if isinstance(value, list) else [value]
        if lacking := [item for item in dict.fromkeys(wanted) if item not in present]:
            card.data[name] = present + lacking
    return text if card.data.to_dict() == before else str(card)


# --- Parts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CardPart:
    """A part of a card's text.

    Attributes:
        name: One of `ORDER`.
        digest: The digest of the content as this package wrote it.
        content: The content now, without the marks.
        start: The part with its marks is `text[start:end]`.
        end: See `start`.
    """

    name: str
    digest: str
    content: str
    start: int
    end: int

    @property
    def is_edited(self) -> bool:
        """Whether a person has changed the content since this package wrote it."""
        return digest(self.content) != self.digest


def find_parts(text: str) -> list[CardPart]:
    """Return the parts of a text in order. A mark without its end is text like any other."""
    result, opened, place = [], None, 0
    for line in text.splitlines(keepends=True):
        if mark := _BEGINS.fullmatch(line):
            opened = place, mark
        elif opened and line.rstrip("\n") == f"<!-- /attnres:{opened[1][1]} -->":
            start, mark = opened
            content = text[start + len(mark[0]) : place].removesuffix("\n")
            result.append(CardPart(mark[1], mark[2], content, start, place + len(line)))
            opened = None
        place += len(line)
    return result


def digest(text: str) -> str:
    """Return a digest of a text: 12 hexadecimal digits that do not depend on line ends and surrounding space."""
    lines = [line.rstrip() for line in text.strip().splitlines()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def find_part(text: str, name: str) -> CardPart | None:
    """Return the part `name` of a card, or None if the card has none."""
    return next((candidate for candidate in find_parts(text) if candidate.name == name), None)


def put_part(text: str, name: str, content: str) -> str:
    """Write a part of a card, in its place by `ORDER`. A part that a person has edited stays as it is.

    Args:
        text: The card without its metadata.
        name: The name of the part, one of `ORDER`.
        content: The content. An empty one removes the part.

    Returns:
        The new text.
    """
    existing, content = find_parts(text), content.strip()
    block = f"<!-- attnres:{name} {digest(content)} -->\n{content}\n<!-- /attnres:{name} -->\n" if content else ""
    if match := next((candidate for candidate in existing if candidate.name == name), None):
        return text if match.is_edited else text[: match.start] + block + text[match.end :]
    # A card without any parts was written by someone else and has its own summary.
    if not block or (name == ORDER[0] and text.strip() and not existing):
        return text
    before = [candidate for candidate in existing if candidate.name in ORDER[: ORDER.index(name)]]
    after = [candidate for candidate in existing if candidate.name in ORDER[ORDER.index(name) :]]
    place = before[-1].end if before else after[0].start if after else len(text)
    pieces = (text[:place].rstrip("\n"), block, text[place:].lstrip("\n"))
    return "\n\n".join(piece.rstrip("\n") for piece in pieces if piece.strip()) + "\n"


def append_to_part(text: str, name: str, content: str) -> str:
    """Append to a part of a card, also to one that a person has edited.

    Args:
        text: The card without its metadata.
        name: The name of the part, one of `ORDER`. The part is made if the card has none.
        content: What to append, as a paragraph.

    Returns:
        The new text.
    """
    match = find_part(text, name)
    if match is None or not match.is_edited:
        return put_part(text, name, f"{match.content}\n\n{content}" if match else content)
    # An edited part keeps its digest, so that it stays edited: the content goes before its end mark.
    end_mark = match.end - len(text[match.start : match.end].splitlines(keepends=True)[-1])
    return f"{text[:end_mark].rstrip()}\n\n{content}\n{text[end_mark:]}"


def add_step(text: str, step: str) -> str:
    """Add a step to the part on how the model was made, also if a person has edited the other steps.

    Args:
        text: The card.
        step: The step as Markdown.

    Returns:
        The new card.
    """
    is_first = find_part(text, "origin") is None
    return append_to_part(text, "origin", f"## How it was made\n\n{step}" if is_first else step)


def text_by_hand(card: str) -> str:
    """Return the text below the metadata without the unedited parts of this package: a person has written it."""
    text, written, place = split_card(remove_upload_mark(card))[1], [], 0
    for candidate in find_parts(text):
        if not candidate.is_edited:
            written.append(text[place : candidate.start])
            place = candidate.end
    return "".join([*written, text[place:]]).strip()


def mark_upload(text: str, local: str, completed: str) -> str:
    """Mark a card for its upload, so that the next upload can tell which card was edited meanwhile.

    Args:
        text: The card to upload. It continues the card on the Hub if a person has edited that one.
        local: The card in the model's directory.
        completed: The card in the model's directory, completed for the Hub.

    Returns:
        The card with the mark at its end.
    """
    return f"{remove_upload_mark(text).rstrip()}\n\n<!-- attnres pushed {digest(completed)} of {digest(local)} -->\n"


def remove_upload_mark(text: str) -> str:
    """Return the card without the mark that [`mark_upload`] adds."""
    return _PUSHED.sub("\n", text)


def merge_cards(local: str, uploaded: str | None, *, overwrite: bool = False) -> str:
    """Choose the card to continue from: the local one, or the one on the Hub. A person may have edited either.

    Args:
        local: The card in the model's directory.
        uploaded: The card on the Hub, if there is one.
        overwrite: Whether to return the local one in any case.

    Returns:
        One of the two cards.

    Raises:
        ValueError: A person has edited both since the last upload.
    """
    if uploaded is None or overwrite:
        return local
    mark, on_hub = _PUSHED.search(uploaded), remove_upload_mark(uploaded)
    # Nobody has edited the card on the Hub since the last upload.
    if mark is not None and digest(on_hub) == mark[1]:
        return local
    # Nobody has edited the local card since then, or it has no text of a person that the one on the Hub lacks.
    if (mark is not None and digest(local) == mark[2]) or text_by_hand(local) in ("", text_by_hand(on_hub)):
        return on_hub
    raise ValueError(
        "README.md was edited on the Hub, and the local one was edited too. Copy the edits on the Hub into the local "
        "one, then push with --overwrite-card."
    )


__all__ = [
    "ORDER",
    "add_metadata",
    "add_step",
    "append_to_part",
    "digest",
    "find_part",
    "mark_upload",
    "merge_cards",
    "put_part",
    "read_model_card",
    "remove_upload_mark",
    "split_card",
    "text_by_hand",
]
