"""The text of a model card in parts: those that this package writes stand between marks, the rest is a person's.

A mark has a digest of what was written. A part that no longer fits its digest was edited by hand, and stays as it is.
"""

import hashlib
import re
from dataclasses import dataclass

from .card_metadata import split

ORDER = ("summary", "origin", "use", "results", "files")
_BEGINS = re.compile(r"<!-- attnres:(\w+) ([0-9a-f]{12}) -->\n")
_PUSHED = re.compile(r"\n?<!-- attnres pushed ([0-9a-f]{12}) of ([0-9a-f]{12}) -->\n?")


@dataclass(frozen=True)
class CardPart:
    """A part of a text: it is `text[start:end]` with its marks; `digest` is of what was written."""

    name: str
    digest: str
    content: str
    start: int
    end: int

    @property
    def is_edited(self) -> bool:
        return digest(self.content) != self.digest


def parts(text: str) -> list[CardPart]:
    """The parts in a text, in order; a mark without its end is text like any other."""
    found, begun, place = [], None, 0
    for line in text.splitlines(keepends=True):
        if begins := _BEGINS.fullmatch(line):
            begun = place, begins
        elif begun and line.rstrip("\n") == f"<!-- /attnres:{begun[1][1]} -->":
            start, begins = begun
            content = text[start + len(begins[0]) : place].removesuffix("\n")
            found.append(CardPart(begins[1], begins[2], content, start, place + len(line)))
            begun = None
        place += len(line)
    return found


def digest(text: str) -> str:
    """12 hexadecimal digits that stand for a text, whatever its line ends and the space around it."""
    lines = [line.rstrip() for line in text.strip().splitlines()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def part(text: str, name: str) -> CardPart | None:
    """The part `name` of a card; `None` if it has none."""
    return next((found for found in parts(text) if found.name == name), None)


def put(text: str, name: str, content: str) -> str:
    """The card with `content` as its part `name`, in the order of `ORDER`; one that a person has changed stays.

    Empty, the part goes. A card without any parts, which others have written, gets no second `summary`.
    """
    there, content = parts(text), content.strip()
    block = f"<!-- attnres:{name} {digest(content)} -->\n{content}\n<!-- /attnres:{name} -->\n" if content else ""
    if match := next((found for found in there if found.name == name), None):
        return text if match.is_edited else text[: match.start] + block + text[match.end :]
    if not block or (name == ORDER[0] and text.strip() and not there):
        return text
    before = [found for found in there if found.name in ORDER[: ORDER.index(name)]]
    after = [found for found in there if found.name in ORDER[ORDER.index(name) :]]
    place = before[-1].end if before else after[0].start if after else len(text)
    pieces = (text[:place].rstrip("\n"), block, text[place:].lstrip("\n"))
    return "\n\n".join(piece.rstrip("\n") for piece in pieces if piece.strip()) + "\n"


def appended(text: str, name: str, content: str) -> str:
    """The card with `content` at the end of its part `name`, also where a person has changed that."""
    match = part(text, name)
    if match is None or not match.is_edited:
        return put(text, name, f"{match.content}\n\n{content}" if match else content)
    ends = match.end - len(text[match.start : match.end].splitlines(keepends=True)[-1])
    return f"{text[:ends].rstrip()}\n\n{content}\n{text[ends:]}"


def own_text(card: str) -> str:
    """What a person has written below a card's metadata: all but the parts that are as this package wrote them."""
    text, own, place = split(unmarked(card))[1], [], 0
    for found in parts(text):
        if not found.is_edited:
            own.append(text[place : found.start])
            place = found.end
    return "".join([*own, text[place:]]).strip()


def marked(text: str, local: str, completed: str) -> str:
    """The card `text` as it is uploaded.

    Args:
        local: the card that lies here; `completed`: what that is for the Hub. Where a person has edited the card on
            the Hub, `text` is another one.
    """
    return f"{unmarked(text).rstrip()}\n\n<!-- attnres pushed {digest(completed)} of {digest(local)} -->\n"


def unmarked(text: str) -> str:
    """The card without what [`marked`] adds."""
    return _PUSHED.sub("\n", text)


def merge(local: str, uploaded: str | None, *, overwrite: bool = False) -> str:
    """Which of two cards to go on with: the one here, or the one on the Hub, where a person may have edited each.

    Args:
        overwrite: take the local one, whatever was written on the Hub.

    Raises:
        ValueError: a person has edited both since the last upload.
    """
    if uploaded is None or overwrite:
        return local
    last, there = _PUSHED.search(uploaded), unmarked(uploaded)
    if last is not None and digest(there) == last[1]:
        return local
    if (last is not None and digest(local) == last[2]) or own_text(local) in ("", own_text(there)):
        return there
    raise ValueError(
        "README.md was edited on the Hub, and the one to be pushed was edited too. Bring what it says there into the "
        "one here, then push with --overwrite-card."
    )


__all__ = ["ORDER", "appended", "digest", "marked", "merge", "own_text", "part", "put", "unmarked"]
