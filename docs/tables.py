"""Write into their pages the tables and lists of connections and backbones, from what the files of these declare.

    python docs/tables.py    # or `make tables`

The first line of a file's docstring says what the connection is. Its class declares the rest, and the class of its
fields says what each of them sets. The pages of the reference get a line for each entry, from its docstring, and the
help of every command.
"""

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path

from connection_facts import TITLES, run_rows  # beside this file
from entries import PAGES, with_entries
from typer.main import get_command
from typer.testing import CliRunner

from attnres import BACKBONES, CONNECTIONS
from attnres.commands.app import app
from attnres.utils.declared import DeclaredConnection, declared_connections, presets

ROOT = Path(__file__).parents[1]
MODELS = ROOT / "modeling_attnres"


def own_connections() -> dict[str, tuple[DeclaredConnection, Path]]:
    """Return the connections of this package by name, with their files, without presets."""
    return {
        name: (declared, MODELS / f"{declared.module.rpartition('.')[2]}.py")
        for name, declared in declared_connections().items()
        if declared.module.startswith("attnres.") and name not in presets()
    }


def connections_table() -> str:
    """Return the table of the connections."""
    titles = ("name", "what it is", "state, in tensors `[tokens, d]`", "starts as the standard model", "used by")
    rows = []
    for name, (declared, path) in own_connections().items():
        link = f"[`{name}`](../../modeling_attnres/{path.name})"
        what = (ast.get_docstring(_parse(path)) or declared.summary).partition("\n")[0]
        rows.append((link, what, declared.state_size, declared.exact, declared.used_by or "-"))
    return _table(titles, rows)


def runs_table() -> str:
    """Return the table of how each connection starts and runs."""
    return _table(TITLES, run_rows(iter(own_connections())))


def fields_table() -> str:
    """Return the table of the fields that belong to other connections than the default."""
    (default, _), *others = own_connections().values()
    names = {field for declared, _ in others for field in declared.fields} - {*default.fields}
    rows = [row for path in sorted(MODELS.glob("*_attnres.py")) for row in _fields(path, names)]
    return _table(("field", "default", "what it sets"), rows)


def float32_list() -> str:
    """Return the names of the connections whose tensors stay in float32."""
    names = [name for name in own_connections() if CONNECTIONS[name].float32]
    return "\n" + ", ".join(f"`{name}`" for name in names) + "\n\n"


def names_table() -> str:
    """Return a table with the names of the backbones and of the connections."""
    listed = {"backbones": BACKBONES, "connections": own_connections(), "presets of `attn_res`": presets()}
    return _table(("", "names"), ((kind, ", ".join(f"`{name}`" for name in names)) for kind, names in listed.items()))


def commands_help() -> str:
    """Return the output of `attnres COMMAND --help` for all commands."""
    runner = CliRunner(env={"COLUMNS": "80", "TERM": "dumb"})
    parts = []
    for name in ("", *get_command(app).commands):
        text = runner.invoke(app, [*name.split(), "--help"], prog_name="attnres").output.strip()
        parts.append(f"\n## `{f'attnres {name}'.strip()}`\n\n```text\n{text}\n```\n")
    return "".join(parts) + "\n"


# Page -> the parts that are made, by the names of their marks.
PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"names": names_table},
    "docs/guides/connections.md": {"connections": connections_table, "runs": runs_table, "fields": fields_table},
    "docs/concepts/exactness.md": {"float32": float32_list},
    "docs/reference/command_line.md": {"commands": commands_help},
}


def with_parts(page: str, text: str) -> str:
    """Return the text of a page with new parts between their marks."""
    for name, make in PARTS[page].items():
        begin, end = f"<!-- {name}: made by docs/tables.py -->\n", f"<!-- /{name} -->"
        between = re.compile(f"(?<={re.escape(begin)}).*(?={re.escape(end)})", re.DOTALL)
        text = between.sub(lambda _, make=make: make(), text)
    return text


def _table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [titles, ["---" for _ in titles], *rows]
    # Without the empty lines, the site would not see a table.
    return "\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n"


def _fields(path: Path, names: set[str]) -> Iterator[tuple[str, str, str]]:
    """Yield the fields of these names that the classes of a file declare: name, default and docstring."""
    for node in _parse(path).body:
        body = node.body if isinstance(node, ast.ClassDef) else []
        for field, docstring in pairwise(map(ast.unparse, body)):
            name, _, default = re.sub(r": .* = ", " = ", field).partition(" = ")
            if name in names:
                meaning = " ".join(ast.literal_eval(docstring).split())
                yield f"`{name}`", f"`{default}`".replace("'", '"'), meaning


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    for page in PARTS:
        path = ROOT / page
        path.write_text(with_parts(page, path.read_text(encoding="utf-8")), encoding="utf-8")
    for path in PAGES:
        path.write_text(with_entries(path, path.read_text(encoding="utf-8")), encoding="utf-8")
