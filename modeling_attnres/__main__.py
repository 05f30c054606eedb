"""`python -m attnres` is the command `attnres`."""

from attnres.commands.main import main

main()
