"""The command line, `attnres COMMAND`.

Exit status: 0 done, 1 failed (one line on stderr), 2 bad usage, 130 interrupted, 143 terminated.
"""

from .guard import guarded


def main() -> None:
    """Run the command line, and leave by `SystemExit`."""
    with guarded():
        from .app import app  # once the guard stands

        app()
