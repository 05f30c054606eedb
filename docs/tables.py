"""Write the table of residual connections into its page, from what their files declare.

    python docs/tables.py    # or `make tables`

The first line of a file's docstring says what the connection is. Its class declares the rest.
"""

import ast
import re
from pathlib import Path

from attnres.utils.declared import declared_connections, presets

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/guides/connections.md"
BEGIN, END = "<!-- connections: made by docs/tables.py -->", "<!-- /connections -->"
_TITLES = ("name", "what it is", "state, in tensors `[tokens, d]`", "starts as the standard model", "used by")


def connections_table() -> str:
    """Return the table of the connections of this package, as Markdown."""
    rows = [_TITLES, ("---",) * len(_TITLES)]
    for name, declared in declared_connections().items():
        folder, _, module = declared.module.rpartition(".")
        if folder != "attnres" or name in presets():
            continue
        path = ROOT / "modeling_attnres" / f"{module}.py"
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        link = f"[`{name}`](../../modeling_attnres/{path.name})"
        what = docstring.splitlines()[0]
        rows.append((link, what, declared.state_size, declared.exact, declared.used_by or "-"))
    # Without the empty lines, the site would not see a table.
    return "\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows) + "\n"


def with_table(text: str) -> str:
    """Return the text of the page with a new table between the marks."""
    between = re.compile(f"(?<={re.escape(BEGIN)}\n).*(?={re.escape(END)})", re.DOTALL)
    return between.sub(lambda _: connections_table(), text)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
