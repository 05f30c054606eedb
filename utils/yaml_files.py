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


def parse_yaml(text: str, place: str | Path, loader: type[yaml.SafeLoader] = UniqueKeys) -> Any:
    """Return the value of YAML that a user wrote.

    Args:
        text: The YAML.
        place: Where it stands, for the error message.
        loader: The class that constructs the values.

    Returns:
        The value, None if the text is empty.

    Raises:
        ValueError: It is not YAML. The message is one line that names the place.
    """
    try:
        return yaml.load(text, loader)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{place} is broken YAML: {' '.join(str(error).split())}") from error


def read_yaml(path: Path, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> Any:
    """Return the value of a YAML file.

    Args:
        path: The file.
        loader: The class that constructs the values; a subclass can read more tags.

    Returns:
        The value, None if the file is empty.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not YAML in UTF-8. The message is one line that names the file.
    """
    try:
        return yaml.load(Path(path).read_text(encoding="utf-8-sig"), loader)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from error


__all__ = ["TextScalars", "UniqueKeys", "parse_yaml", "read_yaml"]
