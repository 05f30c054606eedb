"""Entry of `python -m experiments`. An expected error or Ctrl-C ends in one line, from the first import on."""

import sys

try:
    from .command import main

    main()
except (OSError, ValueError) as error:
    sys.exit(f"error: {error}")
except KeyboardInterrupt:
    print("Stopped: the same command goes on from what is stored and from its checkpoints.", file=sys.stderr)
    sys.exit(130)
