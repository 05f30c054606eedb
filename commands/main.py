"""Run the command line, `attnres COMMAND`.

The exit status is 0 for success, 1 for failure (with one line on stderr), 2 for wrong usage, 130 after Ctrl-C and 143
after SIGTERM.
"""

from .guard import guarded


def main(command: str | None = None) -> None:
    """Run the command line and raise `SystemExit`.

    Args:
        command: The only command, whose options `sys.argv` holds; `None` for the whole command line.
    """
    with guarded():
        # Imported within the guard, so that a signal during the import gives one line too.
        from typer.main import get_command

        from .app import app

        commands = get_command(app)
        (commands.commands[command] if command else commands)()
