"""The text of a model card in parts: those that this package writes stand between marks, the rest is a person's.

A mark has a digest of what was written. A part that no longer fits its digest was edited by hand, and stays as it is.
"""

import hashlib
import re

from huggingface_hub.repocard import REGEX_YAML_BLOCK

ORDER = ("summary", "origin", "use", "results", "files")
_PART = re.compile(r"<!-- attnres:(\w+) ([0-9a-f]{12}) -->\n(.*?)\n<!-- /attnres:\1 -->\n?", re.DOTALL)
_PUSHED = re.compile(r"\n?<!-- attnres pushed ([0-9a-f]{12}) of ([0-9a-f]{12}) -->\n?")


def digest(text: str) -> str:
    """12 hexadecimal digits that stand for a text, whatever its line ends and the space around it."""
    lines = [line.rstrip() for line in text.strip().splitlines()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def part(text: str, name: str) -> str | None:
    """What a card says in the part `name`; `None` if it has none."""
    match = _find(text, name)
    return match and match[3]


def is_edited(text: str, name: str) -> bool:
    """Whether a person has changed the part `name`."""
    match = _find(text, name)
    return match is not None and digest(match[3]) != match[2]


def put(text: str, name: str, content: str) -> str:
    """The card with `content` as its part `name`, in the order of `ORDER`; one that a person has changed stays.

    Empty, the part goes. A card without any parts, which others have written, gets no second `summary`.
    """
    match, content = _find(text, name), content.strip()
    block = f"<!-- attnres:{name} {digest(content)} -->\n{content}\n<!-- /attnres:{name} -->\n" if content else ""
    if match is not None:
        return text if is_edited(text, name) else text[: match.start()] + block + text[match.end() :]
    if not block or (name == ORDER[0] and text.strip() and not _PART.search(text)):
        return text
    before = [m for m in _PART.finditer(text) if m[1] in ORDER[: ORDER.index(name)]]
    after = next((m for m in _PART.finditer(text) if m[1] in ORDER[ORDER.index(name) :]), None)
    place = before[-1].end() if before else after.start() if after else len(text)
    parts = (text[:place].rstrip("\n"), block, text[place:].lstrip("\n"))
    return "\n\n".join(piece.rstrip("\n") for piece in parts if piece.strip()) + "\n"


def own_text(card: str) -> str:
    """What a person has written below a card's metadata: all but the parts that are as this package wrote them."""
    text = REGEX_YAML_BLOCK.sub("", unmarked(card))
    return _PART.sub(lambda match: match[0] if digest(match[3]) != match[2] else "", text).strip()


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


def _find(text: str, name: str) -> re.Match[str] | None:
    return next((match for match in _PART.finditer(text) if match[1] == name), None)


__all__ = ["ORDER", "digest", "is_edited", "marked", "merge", "own_text", "part", "put", "unmarked"]
