"""Describe the residual connections for the command line, without importing PyTorch.

Help texts, options and `attnres list connections` derive from what the classes declare.
"""

import json
from typing import Any

from attnres.utils.declared import DeclaredConnection, declared_connections, presets
from attnres.utils.packaged import configurations

# What sets a preset apart from its connection; the column "exact" and the options are the connection's.
PRESETS: dict[str, dict[str, Any]] = {
    "multi_head": {"summary": "attn_res, 4 heads (MHAR)", "used_by": "", "measured": {}},
    "delta": {
        "summary": "stream, gated attn_res",
        "used_by": "",
        "state_size": "blocks + 2",
        "measured": {"step": "1.04"},
    },
}


def connections() -> dict[str, DeclaredConnection]:
    """Return the connections by name, the default first, and last the presets."""
    declared = declared_connections()
    own = {name: connection for name, connection in declared.items() if name not in presets()}
    return own | {name: declared[name]._replace(**PRESETS[name]) for name in presets()}


def flag(option: str) -> str:
    """Return the command-line option for an argument of a function, such as `--num-blocks` for `num_blocks`."""
    return f"--{option.replace('_', '-')}"


def owners(option: str) -> str:
    """Return the names of the connections that have an option, as `a, b or c`."""
    named = [
        n for n, connection in declared_connections().items() if n not in presets() and option in connection.options
    ]
    *others, last = named
    return f"{', '.join(others)} or {last}" if others else last


def help_of(option: str, text: str) -> str:
    """Return the help of an option that only some connections have, preceded by their names."""
    return f"{owners(option)}: {text}"


def describe_connections() -> str:
    """Return all connections and presets with their meanings and options, for a help text."""
    return "; ".join(
        f"{name} ({connection.summary}; {', '.join(map(flag, connection.options)) or 'no options'})"
        for name, connection in connections().items()
    )


TITLES = ("name", "exact", "state", "step", "used by", "meaning")


def list_connections() -> list[str]:
    """Return a table as lines: the titles of its columns, and a line for each connection and preset."""
    rows = [
        (
            name,
            c.exact,
            c.state_size,
            c.measured.get("step", "-"),
            c.used_by or "-",
            c.summary,
        )
        for name, c in connections().items()
    ]
    widths = [max(map(len, column)) for column in zip(TITLES, *rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in (TITLES, *rows)]


def list_evidence() -> list[str]:
    """Return a line for each connection that experiments of the repository compare with the standard model.

    `python -m experiments report` writes the file that is read here.
    """
    evidence = json.loads((configurations() / "evidence.json").read_text(encoding="utf-8"))
    lines = []
    for name, of in evidence.items():
        counts = ", ".join(f"{word} {of[word]}" for word in ("lower", "tie", "higher") if of[word])
        loss = f" In one of them {of['loss']}." if "loss" in of else ""
        lines.append(f"{name}, experiments: {counts}.{loss}")
    return lines


__all__ = [
    "PRESETS",
    "TITLES",
    "connections",
    "describe_connections",
    "flag",
    "help_of",
    "list_connections",
    "list_evidence",
    "owners",
]
