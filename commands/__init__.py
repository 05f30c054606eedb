"""The command line: `main` is where it begins, `app` has its options, then one file a command."""
