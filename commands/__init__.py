"""The command line `attnres`: `main` runs it, `app` lists the commands, and each command has its own files."""
