"""Read untrusted YAML in bounded time and memory.

An alias (`*name`) repeats a value in a few characters, and the repeated value may hold aliases itself. Nine levels of
nine aliases, in less than 1 KB, stand for 387 million values. PyYAML parses them quickly, because it shares repeated
values, but code that walks, copies or prints the result never ends. So the size is computed before values are built.
"""

from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.nodes import CollectionNode, MappingNode, Node, ScalarNode

# Far more than a recipe, a card or a task file needs. Visiting this many values takes about a second.
MAX_REPEATED = 1_000_000


class UnboundedYaml(ValueError):
    """Raised for YAML that grows without bound: its aliases multiply, a value contains itself, or it is too deep."""


class UniqueKeys(yaml.SafeLoader):
    """Refuses a mapping that has a key twice. By YAML the last one counts, so that one of two lines has no effect."""

    def compose_mapping_node(self, anchor: str | None) -> MappingNode:
        """Return a mapping. Raise `yaml.YAMLError` if two of its keys are the same text."""
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
        UnboundedYaml: Its aliases repeat more than `MAX_REPEATED` values and characters, a value contains itself, or it
            is nested too deeply. The message is one line that does not name the file.
        ValueError: A value does not fit its tag. The message is one line that does not name the file.
    """
    parser = loader(text)
    try:
        node = parser.get_single_node()
        if node is None:
            return None
        _check_size(node)
        return parser.construct_document(node)
    except RecursionError:
        raise UnboundedYaml("its values are nested too deeply") from None
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        # PyYAML's constructors raise these for `!!int ''`, `!!timestamp x` or `!!bool x`.
        raise ValueError(f"a value does not fit its tag ({error!r})") from error
    finally:
        parser.dispose()


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

    It does the same as `huggingface_hub.metadata_load`, in bounded time.

    Raises:
        yaml.YAMLError, ValueError: [`load_yaml`] refuses it, the metadata is not a mapping, or the file is not UTF-8.
    """
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    block = REGEX_YAML_BLOCK.search(Path(path).read_text(encoding="utf-8-sig"))
    metadata = load_yaml(block[2]) if block else None
    if not isinstance(metadata, dict | None):
        raise ValueError("the metadata between `---` and `---` must be a mapping of names to values")
    return metadata


def _check_size(root: Node) -> None:
    """Raise UnboundedYaml if aliases repeat more than `MAX_REPEATED` values and characters, or a value holds itself."""
    sizes: dict[int, int | None] = {}  # id of a node -> its size with aliases written out; None while it is computed

    def size(node: Node) -> int:
        if id(node) in sizes:
            if (known := sizes[id(node)]) is None:
                line = node.start_mark.line + 1
                raise UnboundedYaml(f"the value in line {line} contains itself: remove the alias to its own anchor")
            return known
        sizes[id(node)] = None
        sizes[id(node)] = total = _size_alone(node) + sum(map(size, _children(node)))
        return total

    nodes: dict[int, Node] = {}
    pending = [root]
    while pending:
        if id(node := pending.pop()) not in nodes:
            nodes[id(node)] = node
            pending += _children(node)
    repeated = size(root) - sum(map(_size_alone, nodes.values()))
    if repeated > MAX_REPEATED:
        raise UnboundedYaml(
            f"its aliases (`*name`) repeat more than {MAX_REPEATED:,} values and characters: write out what is needed"
        )


def _size_alone(node: Node) -> int:
    """Return the number of values and characters of a node without its children."""
    return 1 if isinstance(node, CollectionNode) else 1 + len(node.value)


def _children(node: Node) -> list[Node]:
    if isinstance(node, MappingNode):
        return [child for pair in node.value for child in pair]
    return node.value if isinstance(node, CollectionNode) else []


__all__ = ["MAX_REPEATED", "TextScalars", "UnboundedYaml", "UniqueKeys", "load_card_metadata", "load_yaml", "read_yaml"]
