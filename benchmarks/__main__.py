"""`python -m benchmarks`: the same as `attnres bench`."""

import sys

from attnres.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench"]
    main()
