"""The command line, `attnres COMMAND`.

Exit status: 0 done, 1 failed (one line on stderr), 2 bad usage, 130 interrupted, 143 terminated.
"""

from .guard import guarded


def main(command: str | None = None) -> None:
    """Run the command line, or one `command` of it alone, and leave by `SystemExit`."""
    with guarded():
        from typer.main import get_command  # once the guard stands

        from .app import app

        commands = get_command(app)
        (commands.commands[command] if command else commands)()
