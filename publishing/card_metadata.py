"""Read the metadata of a model card, and add values without touching what a person has written.

The metadata is the YAML at the head of `README.md`. It is edited as text, so that comments and order stay.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from huggingface_hub.utils import yaml_dump

from attnres.utils.yaml_files import load_yaml

_ITEM = re.compile(r"^(\s*)- .*\n", re.MULTILINE)


def split(card: str) -> tuple[str, str]:
    """Split a card into its metadata, as YAML, and the text below it."""
    match = REGEX_YAML_BLOCK.match(card)
    return (match[2], card[match.end() :]) if match else ("", card)


def joined(metadata: str, text: str) -> str:
    """Join metadata and text to a card, the inverse of [`split`]."""
    return f"---\n{metadata.strip(chr(10))}\n---\n\n{text.lstrip(chr(10))}" if metadata.strip() else text


def read(card: str) -> dict[str, Any]:
    """Return the metadata of a card as a mapping.

    Raises:
        ValueError: It is damaged. The message is one line.
    """
    try:
        metadata = load_yaml(split(card)[0])
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"its metadata, the YAML between `---` and `---`, is damaged: {reason}") from error
    if not isinstance(metadata, dict | None):
        raise ValueError("its metadata, the YAML between `---` and `---`, must be a mapping of names to values")
    return metadata or {}


def filled(card: str, values: Mapping[str, Any], items: Mapping[str, Sequence[str]]) -> str:
    """Add values to the metadata of a card. Everything that it has stays, comments too.

    Args:
        card: The card.
        values: Values for fields that the card does not have.
        items: Items for fields that are lists. They are appended if the list lacks them, and if it is empty or has one
            item a line. Another list stays as it is.

    Returns:
        The new card.

    Raises:
        ValueError: The metadata is damaged.
    """
    fields, (metadata, text) = read(card), split(card)
    new = {name: value for name, value in values.items() if name not in fields}
    for name, wanted_items in items.items():
        present = fields.get(name)
        present_items = present if isinstance(present, list) else [present]
        lacking = [item for item in dict.fromkeys(wanted_items) if item not in present_items]
        if lacking and name not in fields:
            new[name] = lacking
        elif lacking and present == []:
            # `re.sub` reads a backslash in the new text as an escape.
            field = dumped({name: lacking}).replace("\\", r"\\")
            metadata = re.sub(rf"^{re.escape(name)}:.*$", field, metadata, flags=re.MULTILINE)
        elif lacking and isinstance(present, list):
            metadata = _with_items(metadata, name, lacking)
    if new:
        metadata = f"{metadata.rstrip(chr(10))}\n{dumped(new)}".strip("\n")
    return joined(metadata, text)


def dumped(values: Mapping[str, Any] | Sequence[str]) -> str:
    """Return metadata as YAML that reads as the same values, in their order."""
    text = yaml_dump(values, sort_keys=False).strip()
    # PyYAML writes the control character U+0085 as it is, and reads it as a line break. Escaped, it stays.
    return yaml_dump(values, sort_keys=False, allow_unicode=False).strip() if "\x85" in text else text


def _with_items(metadata: str, name: str, items: Sequence[str]) -> str:
    """Append items to a list that has one item a line. A list in another form stays as it is."""
    start = re.search(rf"^{re.escape(name)}:[ \t]*\n", metadata, re.MULTILINE)
    place, indent = start.end() if start else 0, None
    while start and (item := _ITEM.match(f"{metadata}\n", place)):
        place, indent = item.end(), item[1]
    if indent is None:
        return metadata
    # `dumped` quotes an item with characters that have a meaning in YAML, such as `: `.
    added = "".join(f"{indent}{dumped([item])}\n" for item in items)
    return f"{metadata}\n"[:place] + added + f"{metadata}\n"[place:]


__all__ = ["dumped", "filled", "joined", "read", "split"]
