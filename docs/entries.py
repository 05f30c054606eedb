"""Write into the pages of the reference what each entry is, for readers who see no site.

    <!-- ::: attnres.depth_attention
        options: {...} -->
    [`attnres.depth_attention`](../../modeling_attnres/functional.py): the first line of its docstring
    <!-- end -->

On the site, the hook leaves the first part alone, which mkdocstrings replaces by the whole docstring. `tables.py` calls
[`with_entries`], and `hooks.py` [`directives_of`].
"""

import importlib
import inspect
import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs/reference").glob("*.md"))
_ENTRY = re.compile(r"<!-- (?P<directive>::: (?P<name>\S+)[^>]*?) -->\n(?P<line>.*?)<!-- end -->", re.DOTALL)


def with_entries(page: Path, text: str) -> str:
    """Return the text of a page with a line for each entry: its name, a link to its file, and what it is.

    Args:
        page: the page.
        text: its text.
    """

    def entry(match: re.Match) -> str:
        line = _line(page, match["name"])
        return f"<!-- {match['directive']} -->\n{line}\n<!-- end -->"

    return _ENTRY.sub(entry, text)


def directives_of(text: str) -> str:
    """Return the text of a page with the directives of mkdocstrings in place of the lines."""
    return _ENTRY.sub(r"\g<directive>", text)


def _line(page: Path, name: str) -> str:
    """Return the line of one entry; raise `ValueError` if there is no such object, or it has no docstring."""
    found = _find(name)
    summary = (inspect.getdoc(found) or "").partition("\n\n")[0].replace("\n", " ")
    if not summary:
        raise ValueError(f"{page.name}: {name} must have a docstring.")
    source = Path(inspect.getsourcefile(inspect.unwrap(found)) or "").resolve()
    link = os.path.relpath(source, page.parent).replace(os.sep, "/")
    summary = re.sub(r"\[(`[^`]+`)\]", r"\1", summary)  # brackets around a name make a link on the site
    return f"[`{name}`]({link}): {summary}"


def _find(name: str) -> Any:
    """Return the object of a name with dots; its longest part that is a module is imported."""
    module, _, attribute = name.rpartition(".")
    try:
        # Not an attribute of the package: a function may have the name of its module.
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return getattr(_find(module), attribute)


__all__ = ["PAGES", "directives_of", "with_entries"]
