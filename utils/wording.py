"""Word parts of messages: numbers with nouns, sizes, escaped text, proposals for misspelt names, install commands."""

from collections.abc import Collection
from difflib import get_close_matches
from importlib.metadata import metadata, requires
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_PACKAGES = {"yaml": "pyyaml"}  # module -> package, where the names differ


def counted(number: int, noun: str) -> str:
    """Return a number with its noun in the singular or plural.

    Args:
        number: The number.
        noun: The noun in the singular, whose plural ends in `s`.

    Returns:
        A text such as `1 file` or `2,048 files`.
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def show_bytes(number: int) -> str:
    """Return a number of bytes for people to read, such as `1.5 GB`."""
    return f"{number / 1e9:.1f} GB" if number >= 1e8 else f"{number / 1e6:.2f} MB"


def printable(text: str) -> str:
    """Replace control characters and line ends in a text by their escape codes."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def did_you_mean(name: str, known: Collection[str], *, otherwise_all: bool = True, alike: float = 0.6) -> str:
    """Return the end of a message on an unknown name, with a leading space.

    Args:
        name: The unknown name.
        known: The known names.
        otherwise_all: Whether to list all known names if none is similar.
        alike: How similar the proposed name must be, from 0 to 1 as in `difflib`.

    Returns:
        A sentence that proposes the most similar name, a list of all names, or an empty string.
    """
    if similar := get_close_matches(name, known, n=1, cutoff=alike):
        return f" Did you mean `{similar[0]}`?"
    return f" There is {', '.join(known)}." if otherwise_all else ""


def install_command(extra: str) -> str:
    """Return the `pip install` command for the packages of an extra.

    It lists the packages, so that it works however `attnres` was installed.
    """
    packages = []
    for requirement in _requirements():
        if requirement.marker is not None and requirement.marker.evaluate({"extra": extra}):
            requirement.marker = None
            packages.append(f"'{requirement}'")
    return f"pip install {' '.join(packages)}" if packages else f"pip install 'attnres[{extra}]'"


def extras_with(module: str) -> list[str]:
    """Return the extras that install a missing top-level module, such as `train` for `peft`; may be empty."""
    from packaging.utils import canonicalize_name

    package = canonicalize_name(_PACKAGES.get(module, module))
    extras = metadata("attnres").get_all("Provides-Extra") or ()
    return [
        extra
        for extra in extras
        if any(
            canonicalize_name(requirement.name) == package
            and requirement.marker is not None
            and requirement.marker.evaluate({"extra": extra})
            for requirement in _requirements()
        )
    ]


def _requirements() -> "list[Requirement]":
    from packaging.requirements import Requirement

    return [Requirement(requirement) for requirement in requires("attnres") or ()]


__all__ = ["counted", "did_you_mean", "extras_with", "install_command", "printable", "show_bytes"]
