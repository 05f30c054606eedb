"""Read the pages of the repository: their blocks of code, commands and links."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Folders without a README, such as build outputs, hold no pages, and neither do folders of templates.
_FOLDERS = [path.parent for path in ROOT.glob("*/README.md") if not path.parent.name.startswith(".")]
_CANDIDATES = {
    ROOT / "README.md",
    *(ROOT / "docs").rglob("*.md"),
    *(page for folder in _FOLDERS for page in folder.rglob("*.md")),
}
PAGES = sorted(page for page in _CANDIDATES if page.parent.name != "templates")
_FENCE = re.compile(
    r'^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<code>.*?)^```$', re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True)
class Block:
    """A fenced block. One with a title is a file of that name."""

    language: str
    code: str
    title: str | None

    def commands(self) -> Iterator[str]:
        """Yield the commands of a block of bash: its lines without comments, joined at backslashes."""
        for line in self.code.replace("\\\n", " ").splitlines():
            if command := re.sub(r"\s+#.*$", "", line).strip():
                yield re.sub(r"\s+", " ", command)


def name_of(page: Path) -> str:
    """Return the path of a page in the repository, with slashes."""
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in their order."""
    fences = _FENCE.finditer(page.read_text(encoding="utf-8"))
    return [Block(fence["language"], fence["code"], fence["title"]) for fence in fences]


def commands_of(page: Path) -> list[str]:
    """Return the commands of all blocks of bash of a page."""
    return [command for block in blocks_of(page) if block.language == "bash" for command in block.commands()]


def inline_commands_of(page: Path) -> list[list[str]]:
    """Return the words of each `attnres COMMAND ...` in the running text of a page."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return [shlex.split(code.replace("\n", " ")) for code in re.findall(r"`(attnres [a-z][^`]*)`", text)]


def links_of(page: Path) -> list[str]:
    """Return the links and images of a page that lead to other places of the repository."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return re.findall(r'(?:\]\(|src=")(?!https?:)([^)"\s]+)', text)
