"""What pages hold: blocks of code, commands, links."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Of folders without a README, such as what is built, and templates nothing is a page.
_FOLDERS = [path.parent for path in ROOT.glob("*/README.md") if not path.parent.name.startswith(".")]
_FOUND = {
    ROOT / "README.md",
    *(ROOT / "docs").rglob("*.md"),
    *(page for folder in _FOLDERS for page in folder.rglob("*.md")),
}
PAGES = sorted(page for page in _FOUND if page.parent.name != "templates")
_FENCE = re.compile(
    r'^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<code>.*?)^```$', re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its code, and the file that it is where it has a title."""

    language: str
    code: str
    title: str | None

    def commands(self) -> Iterator[str]:
        """Of a block of bash: lines, joined where they go on, without comments."""
        for line in self.code.replace("\\\n", " ").splitlines():
            if command := re.sub(r"\s+#.*$", "", line).strip():
                yield re.sub(r"\s+", " ", command)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path) -> list[Block]:
    found = _FENCE.finditer(page.read_text(encoding="utf-8"))
    return [Block(block["language"], block["code"], block["title"]) for block in found]


def commands_of(page: Path) -> list[str]:
    return [command for block in blocks_of(page) if block.language == "bash" for command in block.commands()]


def inline_commands_of(page: Path) -> list[list[str]]:
    """The words of each `attnres COMMAND ...` in running text."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return [shlex.split(code.replace("\n", " ")) for code in re.findall(r"`(attnres [a-z][^`]*)`", text)]


def links_of(page: Path) -> list[str]:
    """Links to other places of the repository."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return re.findall(r'(?:\]\(|src=")(?!https?:)([^)"\s]+)', text)
