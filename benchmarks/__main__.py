"""Run `python -m benchmarks`: `command` on a CPU, and `benchmarks.gpu`, which needs fewer packages, on a GPU."""

import sys

if __name__ == "__main__":
    if "--device=cuda" in sys.argv or ("--device", "cuda") in zip(sys.argv, sys.argv[1:]):
        from .gpu import main
    else:
        from .command import main

    sys.exit(main())
