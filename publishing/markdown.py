"""Escape texts of unknown origin for a model card: names of models, tasks and data sets, notes, paths.

Such a text may contain Markdown or HTML. The functions here return one line, which is shown literally in a sentence, a
heading, a cell of a table or a line of code.
"""

import json
import re
import shlex
from pathlib import Path

from attnres.utils.hub import is_hub_id
from attnres.utils.wording import printable

# These become entities: in some renderers a backslash does not stop `|` from ending a cell, or `<` from opening a tag.
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "&#124;"}
# The characters of Markdown. An `_` within a word is not markup.
_ESCAPED = re.compile(r"[\\`*\[\]{}()#!$~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
# Addresses that renderers link without any markup.
_LINKED = re.compile(r"(?i)(https?|ftp|mailto|xmpp):|(www)\.")
_HUB = "https://huggingface.co"


def escape(value: object) -> str:
    """Return a text as one line of Markdown that is shown literally, without markup and links.

    Characters without a glyph, such as those that change the direction of writing, are shown by their codes.
    """
    line = _ESCAPED.sub(r"\\\g<0>", _one_line(str(value)))
    for character, entity in _ENTITIES.items():
        line = line.replace(character, entity)
    return _LINKED.sub(lambda match: f"{match[1]}&#58;" if match[1] else f"{match[2]}&#46;", line)


def code(value: object) -> str:
    """Return a name as inline code, or as escaped text if inline code cannot hold it."""
    line = _one_line(str(value))
    return escape(line) if not line or re.search(r"[`|\\]", line) else f"`{line}`"


def link(repo: str, kind: str = "", commit: str | None = None) -> str:
    """Return a link to a repository on the Hub.

    Args:
        repo: Its id, as `org/name`. Any other text becomes inline code without a link.
        kind: `datasets/` for a data set.
        commit: A commit; a link to its files is added.

    Returns:
        The Markdown.
    """
    if not is_hub_id(repo):
        return code(repo)
    at = f" at revision [`{commit[:10]}`]({_HUB}/{kind}{repo}/tree/{commit})" if commit and commit.isalnum() else ""
    return f"[{escape(repo)}]({_HUB}/{kind}{repo}){at}"


def link_model(hub_id: str | None, name: str, commit: str | None = None) -> str:
    """Return the Markdown that names a model.

    Args:
        hub_id: Its id, if it is on the Hub.
        name: Its name or path otherwise. Only the last part of a path is shown.
        commit: Its commit on the Hub.

    Returns:
        A link to the Hub, or the name as code.
    """
    return code(Path(name).name) if hub_id is None else link(hub_id, commit=commit)


def python_text(value: str) -> str:
    """Return a text as a Python string literal."""
    return json.dumps(value, ensure_ascii=False) if value.isprintable() else ascii(value)


def shell_word(value: str) -> str:
    """Return a text as one word of a shell command, quoted if necessary."""
    return shlex.quote(printable(value))


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))


__all__ = ["code", "escape", "link", "link_model", "python_text", "shell_word"]
