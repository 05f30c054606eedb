"""Search files for secrets before they are published, by the rules of Kingfisher, MongoDB's scanner.

A password has no form that rules describe, so the search finds many leaks, but not all. Kingfisher runs on this machine
and sends nothing: it would only check secrets with their services if it were asked to.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kingfisher_sdk import Scanner

_SAFETENSORS = ".safetensors"
_MAX_HEADER = 100 * 10**6  # bytes, the limit of safetensors


@dataclass(frozen=True)
class Secret:
    """The place and the kind of a secret in a file. Its value is not kept, because it must not reach a message.

    Attributes:
        path: The file.
        line: The line, counted from 1.
        kind: The kind: "your Hub token", or the name of Kingfisher's rule.
    """

    path: Path
    line: int
    kind: str

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}, holds a secret ({self.kind})"


def find_secrets(path: Path, token: str | None = None) -> Iterator[Secret]:
    """Find the secrets in a file. In a file of weights only the header is searched, since the rest is numbers.

    Args:
        path: The file.
        token: The user's Hub token. It is found in any form.

    Yields:
        One secret for each line that has any, in the order of the lines.
    """
    content = _read(path)
    # Kingfisher also returns parts of secrets, such as the name of an account, which are not "visible".
    kinds = {finding.location["line"]: finding.rule_id for finding in _scanner().scan(content) if finding.visible}
    if token:
        # Without NUL bytes, ASCII text in UTF-16 reads like UTF-8.
        lines = enumerate(content.replace(b"\0", b"").split(b"\n"), start=1)
        kinds |= {number: "your Hub token" for number, line in lines if token.encode() in line}
    for line, kind in sorted(kinds.items()):
        yield Secret(path, line, kind)


@cache
def _scanner() -> Scanner:
    """Return the scanner with all its rules. Its first use on a machine compiles them, which takes some seconds."""
    return Scanner()


def _read(path: Path) -> bytes:
    """Return the bytes of a file, or of the header of a file of weights."""
    with path.open("rb") as file:
        if path.suffix != _SAFETENSORS:
            return file.read()
        return file.read(min(int.from_bytes(file.read(8), "little"), _MAX_HEADER))


__all__ = ["find_secrets"]
