"""Edit the text of a model card in parts. This package writes parts between marks; a person writes the rest.

A mark holds a digest of the part that was written. If the part no longer has this digest, a person has edited it. Then
it is not rewritten.
"""

import hashlib
import re
from dataclasses import dataclass

from .card_metadata import split_card

ORDER = ("summary", "origin", "use", "results", "files")
_BEGINS = re.compile(r"<!-- attnres:(\w+) ([0-9a-f]{12}) -->\n")
_PUSHED = re.compile(r"\n?<!-- attnres pushed ([0-9a-f]{12}) of ([0-9a-f]{12}) -->\n?")


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


def parts(text: str) -> list[CardPart]:
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


def part(text: str, name: str) -> CardPart | None:
    """Return the part `name` of a card, or None if the card has none."""
    return next((candidate for candidate in parts(text) if candidate.name == name), None)


def put(text: str, name: str, content: str) -> str:
    """Write a part of a card, in its place by `ORDER`. A part that a person has edited stays as it is.

    Args:
        text: The card without its metadata.
        name: The name of the part, one of `ORDER`.
        content: The content. An empty one removes the part.

    Returns:
        The new text.
    """
    existing, content = parts(text), content.strip()
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


def appended(text: str, name: str, content: str) -> str:
    """Append to a part of a card, also to one that a person has edited.

    Args:
        text: The card without its metadata.
        name: The name of the part, one of `ORDER`. The part is made if the card has none.
        content: What to append, as a paragraph.

    Returns:
        The new text.
    """
    match = part(text, name)
    if match is None or not match.is_edited:
        return put(text, name, f"{match.content}\n\n{content}" if match else content)
    # An edited part keeps its digest, so that it stays edited: the content goes before its end mark.
    end_mark = match.end - len(text[match.start : match.end].splitlines(keepends=True)[-1])
    return f"{text[:end_mark].rstrip()}\n\n{content}\n{text[end_mark:]}"


def text_by_hand(card: str) -> str:
    """Return the text below the metadata without the unedited parts of this package: a person has written it."""
    text, written, place = split_card(unmarked(card))[1], [], 0
    for candidate in parts(text):
        if not candidate.is_edited:
            written.append(text[place : candidate.start])
            place = candidate.end
    return "".join([*written, text[place:]]).strip()


def marked(text: str, local: str, completed: str) -> str:
    """Mark a card for its upload, so that the next upload can tell which card was edited meanwhile.

    Args:
        text: The card to upload. It continues the card on the Hub if a person has edited that one.
        local: The card in the model's directory.
        completed: The card in the model's directory, completed for the Hub.

    Returns:
        The card with the mark at its end.
    """
    return f"{unmarked(text).rstrip()}\n\n<!-- attnres pushed {digest(completed)} of {digest(local)} -->\n"


def unmarked(text: str) -> str:
    """Return the card without the mark that [`marked`] adds."""
    return _PUSHED.sub("\n", text)


def merge(local: str, uploaded: str | None, *, overwrite: bool = False) -> str:
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
    mark, on_hub = _PUSHED.search(uploaded), unmarked(uploaded)
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


__all__ = ["ORDER", "appended", "digest", "marked", "merge", "text_by_hand", "part", "put", "unmarked"]
