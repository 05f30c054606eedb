"""Parts of messages: numbers with their nouns, names that were meant, and what to install where an extra is missing."""

from collections.abc import Collection
from difflib import get_close_matches
from importlib.metadata import requires


def counted(number: int, noun: str) -> str:
    """The number and its noun in the singular or plural: `1 file`, `2,048 files`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def did_you_mean(name: str, known: Collection[str], *, otherwise_all: bool = True, alike: float = 0.6) -> str:
    """The end of a message on an unknown name: the one spelt most alike, or all that are known."""
    if similar := get_close_matches(name, known, n=1, cutoff=alike):
        return f" Did you mean `{similar[0]}`?"
    return f" There is {', '.join(known)}." if otherwise_all else ""


def install_command(extra: str) -> str:
    """The `pip install` command for what an extra of this package adds, wherever the package was installed from."""
    from packaging.requirements import Requirement

    needed = []
    for requirement in map(Requirement, requires("attnres") or ()):
        if requirement.marker is not None and requirement.marker.evaluate({"extra": extra}):
            requirement.marker = None
            needed.append(f"'{requirement}'")
    return f"pip install {' '.join(needed)}"


__all__ = ["counted", "did_you_mean", "install_command"]
