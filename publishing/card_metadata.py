"""Read the metadata of a model card, and add values to it. `huggingface_hub` reads and writes the YAML."""

from collections.abc import Mapping, Sequence
from typing import Any

from huggingface_hub import RepoCard
from huggingface_hub.repocard import REGEX_YAML_BLOCK


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
        raise ValueError(f"its metadata, the YAML between `---` and `---`, is damaged: {reason}") from error
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


__all__ = ["add_metadata", "read_model_card", "split_card"]
