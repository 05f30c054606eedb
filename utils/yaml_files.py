"""Read YAML so that any fault of a file is an error of one line."""

from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, ScalarNode


class UniqueKeys(yaml.SafeLoader):
    """Refuses a mapping that has a key twice. By YAML the last one counts, so that one of two lines has no effect."""

    def compose_mapping_node(self, anchor: str | None) -> MappingNode:
        """Return a mapping. Raise `yaml.YAMLError` if two of its keys are the same text."""
        # pyrefly: ignore[bad-argument-type]  # the stub has the type of another attribute
        node = super().compose_mapping_node(anchor)
        keys = set()
        for key in (key for key, _ in node.value if isinstance(key, ScalarNode)):
            if key.value in keys:
                problem = f"the key {key.value!r} stands here a second time: remove one"
                raise ConstructorError(problem=problem, problem_mark=key.start_mark)
            keys.add(key.value)
        return node


class TextScalars(UniqueKeys):
    """Keeps values as they are written, such as `on`, `007` and `3.10`. Only `null` is not text."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith((":null", ":merge"))]
        for first, resolvers in UniqueKeys.yaml_implicit_resolvers.items()
    }


def load_yaml(text: str, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> Any:
    """Return the value of one YAML document.

    Args:
        text: The document.
        loader: The class that constructs the values; a subclass can read more tags.

    Returns:
        The value of the document, None if it is empty.

    Raises:
        yaml.YAMLError: The text is not YAML. The error has a `problem` and a `problem_mark`.
        ValueError: It is nested too deeply, or a value does not fit its tag. The message is one line that does not name
            the file.
    """
    try:
        return yaml.load(text, loader)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        # PyYAML's constructors raise these for `!!int ''`, `!!timestamp x` or `!!bool x`.
        raise ValueError(f"a value does not fit its tag ({error!r})") from error


def parse_yaml(text: str, place: str | Path, loader: type[yaml.SafeLoader] = UniqueKeys) -> Any:
    """Return the value of YAML that a user wrote.

    Args:
        text: The YAML.
        place: Where it stands, for the error message.
        loader: As in [`load_yaml`].

    Raises:
        ValueError: It is not YAML. The message is one line that names the place.
    """
    try:
        return load_yaml(text, loader)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{place} is broken YAML: {' '.join(str(error).split())}") from error


def read_yaml(path: Path, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> Any:
    """Return the value of a YAML file.

    Args:
        path: The file.
        loader: As in [`load_yaml`].

    Returns:
        The value, None if the file is empty.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not YAML in UTF-8, or [`load_yaml`] refuses it. The message is one line that names the file.
    """
    try:
        return load_yaml(Path(path).read_text(encoding="utf-8-sig"), loader)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from error


def load_card_metadata(path: Path) -> dict[str, Any] | None:
    """Return the metadata at the head of a card (`README.md`), or None if it has none.

    It does the same as `huggingface_hub.metadata_load`, with errors of one line.

    Raises:
        yaml.YAMLError, ValueError: [`load_yaml`] refuses it, the metadata is not a mapping, or the file is not UTF-8.
    """
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    block = REGEX_YAML_BLOCK.search(Path(path).read_text(encoding="utf-8-sig"))
    metadata = load_yaml(block[2]) if block else None
    if not isinstance(metadata, dict | None):
        raise ValueError("the metadata between `---` and `---` must be a mapping of names to values")
    return metadata


__all__ = ["TextScalars", "UniqueKeys", "load_card_metadata", "load_yaml", "parse_yaml", "read_yaml"]
