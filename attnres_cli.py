"""Entry of the console script `attnres`.

It lies outside the package `attnres`, whose import takes seconds because it registers the model family. Help texts and
wrong arguments need no model: the package sees `is_running` and leaves the registration to the command that needs it.
"""

is_running = False


def main() -> None:
    """Run the command line, and leave by `SystemExit` with the command's exit status."""
    global is_running
    is_running = True
    from attnres.commands.main import main as run  # not before the flag is set

    run()


if __name__ == "__main__":
    import attnres_cli  # the package looks for the module by this name, and here it is called `__main__`

    attnres_cli.main()
