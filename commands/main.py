"""Run the command line, `attnres COMMAND`.

The exit status is 0 for done, 1 for failed (with one line on stderr), 2 for bad usage, 130 for interrupted and 143 for
terminated.
"""

from .guard import guarded


def main(command: str | None = None) -> None:
    """Run the command line, or only its given `command`, and leave by `SystemExit`."""
    with guarded():
        # Imported within the guard, so that a signal during the import ends in one line too.
        from typer.main import get_command

        from .app import app

        commands = get_command(app)
        (commands.commands[command] if command else commands)()
