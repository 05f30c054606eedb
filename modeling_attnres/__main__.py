"""`python -m attnres` is the command `attnres`."""

from attnres.cli import main

main()
