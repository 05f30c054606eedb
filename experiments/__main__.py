"""`python -m experiments`: errors that a person can mend, and Ctrl-C from the first import on, end in one line."""

import sys

try:
    from .command import main

    main()
except (OSError, ValueError) as error:
    sys.exit(f"error: {error}")
except KeyboardInterrupt:
    print("Stopped: the same command goes on from what is stored and from its checkpoints.", file=sys.stderr)
    sys.exit(130)
