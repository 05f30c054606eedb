"""Numbers with their nouns, for messages, and what to install where an extra is missing."""

from importlib.metadata import requires


def counted(number: int, noun: str) -> str:
    """The number and its noun in the singular or plural: `1 file`, `2,048 files`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def install_command(extra: str) -> str:
    """The `pip install` command for what an extra of this package adds, wherever the package was installed from."""
    from packaging.requirements import Requirement

    needed = []
    for requirement in map(Requirement, requires("attnres") or ()):
        if requirement.marker is not None and requirement.marker.evaluate({"extra": extra}):
            requirement.marker = None
            needed.append(f"'{requirement}'")
    return f"pip install {' '.join(needed)}"


__all__ = ["counted", "install_command"]
