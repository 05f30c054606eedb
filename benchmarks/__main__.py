"""`python -m benchmarks`: the same as `attnres bench`; on a GPU `benchmarks.gpu`, which needs less to be installed."""

import sys

if __name__ == "__main__":
    if "--device=cuda" in sys.argv or ("--device", "cuda") in zip(sys.argv, sys.argv[1:]):
        from .gpu import main

        sys.exit(main())
    from attnres.commands.main import main

    main("bench")
