"""The metadata of a model card: what it says, and what it lacks, put in without touching what a person has written."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from huggingface_hub.utils import yaml_dump

from attnres.utils.yaml_files import load_yaml

_ITEM = re.compile(r"^(\s*)- .*\n", re.MULTILINE)


def split(card: str) -> tuple[str, str]:
    """The metadata, as YAML, and the text below it."""
    match = REGEX_YAML_BLOCK.match(card)
    return (match[2], card[match.end() :]) if match else ("", card)


def joined(metadata: str, text: str) -> str:
    """A card of both, as [`split`] takes it apart."""
    return f"---\n{metadata.strip(chr(10))}\n---\n\n{text.lstrip(chr(10))}" if metadata.strip() else text


def read(card: str) -> dict[str, Any]:
    """What the metadata says.

    Raises:
        ValueError: it is damaged, in one line.
    """
    try:
        said = load_yaml(split(card)[0])
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"its metadata, the YAML between `---` and `---`, is damaged: {reason}") from error
    if not isinstance(said, dict | None):
        raise ValueError("its metadata, the YAML between `---` and `---`, is no list of names and values")
    return said or {}


def filled(card: str, values: Mapping[str, Any], items: Mapping[str, Sequence[str]]) -> str:
    """The card with `values` where it has none, and with the `items` of lists; all else stays, comments too.

    Raises:
        ValueError: as [`read`].
    """
    said, (metadata, text) = read(card), split(card)
    new = {name: value for name, value in values.items() if said.get(name) is None and name not in said}
    for name, wanted in items.items():
        has = said.get(name)
        lacking = [item for item in dict.fromkeys(wanted) if item not in (has if isinstance(has, list) else [has])]
        if lacking and has is None and name not in said:
            new[name] = lacking
        elif lacking and has == []:
            metadata = re.sub(
                rf"^{re.escape(name)}:.*$", yaml_dump({name: lacking}).strip(), metadata, flags=re.MULTILINE
            )
        elif lacking and isinstance(has, list) and has:
            metadata = _longer(metadata, name, lacking)
    if new:
        metadata = f"{metadata.rstrip(chr(10))}\n{yaml_dump(new, sort_keys=False).strip()}".strip("\n")
    return joined(metadata, text)


def _longer(metadata: str, name: str, items: Sequence[str]) -> str:
    """The metadata with more items in a list that is written one item a line; another form stays as it is."""
    start = re.search(rf"^{re.escape(name)}:[ \t]*\n", metadata, re.MULTILINE)
    place, indent = start.end() if start else 0, None
    while start and (item := _ITEM.match(f"{metadata}\n", place)):
        place, indent = item.end(), item[1]
    if indent is None:
        return metadata
    # Through YAML: an item may hold what YAML reads otherwise, such as `: `.
    added = "".join(f"{indent}{yaml_dump([item]).strip()}\n" for item in items)
    return f"{metadata}\n"[:place] + added + f"{metadata}\n"[place:]


__all__ = ["filled", "joined", "read", "split"]
