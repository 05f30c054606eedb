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
    "commands",
    "configuration",
    "conversion",
    "eval",
    "modeling_attnres",
    "training",
    "utils",
)
_LEAST = 30  # letters of a message that are the same in every instance of it


@cache
def patterns() -> tuple[re.Pattern, ...]:
    """Return a pattern for each longer text in the code; values that a text inserts match anything."""
    files = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    return tuple(re.compile(pattern) for path in files for pattern in _patterns_of(path))


def _patterns_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        texts = [
            part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else None for part in parts
        ]
        if sum(len(text or "") for text in texts) >= _LEAST:
            yield "".join(r".+" if text is None else re.escape(" ".join(text.split(" "))) for text in texts)


def is_of_the_code(message: str) -> bool:
    """Return whether a message, in one line, holds a text of the code."""
    return any(pattern.search(message) for pattern in patterns())
