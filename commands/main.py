"""Run the command line, `attnres COMMAND`.

The exit status is 0 for success, 1 for failure (with one line on stderr), 2 for wrong usage, 130 after Ctrl-C and 143
after SIGTERM.
"""

import io
import os
import sys

from .guard import guarded


def main(command: str | None = None) -> None:
    """Run the command line and raise `SystemExit`.

    Args:
        command: The only command, whose options `sys.argv` holds; `None` for the whole command line.
    """
    if os.environ.get("COLUMNS") == "0":  # of a terminal without a known width; `rich` would print nothing
        del os.environ["COLUMNS"]
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # A terminal that is not UTF-8 has no characters for spinners. (stderr is never strict.)
        sys.stdout.reconfigure(errors="replace")
    with guarded():
        # Imported within the guard, so that a signal during the import gives one line too.
        from typer.main import get_command

        from .app import app

        commands = get_command(app)
        # pyrefly: ignore[missing-attribute]  # an app of several commands is a group
        (commands.commands[command] if command else commands)()
