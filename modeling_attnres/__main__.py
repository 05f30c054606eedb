"""Run the command `attnres` as `python -m attnres`."""

from attnres.commands.main import main

main()
