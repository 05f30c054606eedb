"""The entry point of the console script `attnres`.

The import of the package `attnres` registers the model family, which takes seconds. Help texts and errors in arguments
do not need the family. So this file lies outside the package and sets `is_running` first. Then the package does not
register the family, and a command that needs it does.
"""

is_running = False


def main() -> None:
    """Run the command line, and leave by `SystemExit` with the command's exit status."""
    global is_running
    is_running = True
    from attnres.commands.main import main as run  # not before the flag is set

    run()


if __name__ == "__main__":
    import attnres_cli  # the package looks for a module of this name, but this one is called `__main__`

    attnres_cli.main()
