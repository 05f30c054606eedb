"""Find the messages of the code, as patterns, to check that a page quotes a message that the code has."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from .reading import ROOT

FOLDERS = (
    "accelerated",
    "analysis",
    "checkpoints",
    "commands",
    "conversion",
    "eval",
    "modeling_attnres",
    "planning",
    "publishing",
    "training",
    "utils",
)
_LEAST = 30  # letters that are the same in every instance of a message


@cache
def texts() -> tuple[tuple[str | None, ...], ...]:
    """Return each longer text in the code by its parts, with `None` where it inserts a value."""
    files = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    return tuple(text for path in files for text in _texts_of(path))


def _texts_of(path: Path) -> Iterator[tuple[str | None, ...]]:
    nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    inner = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr | ast.Constant) and id(node) not in inner:
            values = [getattr(part, "value", None) for part in getattr(node, "values", [node])]
            parts = tuple(value if isinstance(value, str) else None for value in values)
            if sum(len(part or "") for part in parts) >= _LEAST:
                yield parts


def is_of_the_code(message: str) -> bool:
    """Return whether a message, in one line, holds a whole text of the code, with any values in it."""
    return any(
        re.search("".join(".+" if part is None else re.escape(part) for part in parts), message)
        for parts in texts()
        if all(part in message for part in parts if part)
    )
