"""The command line of the benchmarks on a CPU: `python -m benchmarks --only models --threads 1`."""

import argparse
import signal
from pathlib import Path

# The modules that each measure a part. They import PyTorch, which `--help` need not wait for.
PARTS = ("ops", "phases", "models", "connections", "memory", "kimi_k3", "drafts", "host")
RESULTS = Path(__file__).parent / "results"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure speed and memory against peers. With --device cuda, the separate benchmark of GPUs runs.",
    )
    option = parser.add_argument
    option("--only", choices=PARTS, action="append", help="measure this part; may be repeated; default all")
    option("--threads", type=_count, default=2, help="threads of PyTorch; default 2")
    option("--repeats", type=_count, default=5, help="repeats of each measurement, interleaved; default 5")
    option("--device", choices=["cpu", "cuda"], default="cpu", help="`cuda` has options of its own")
    option("--out", type=Path, help="folder for results; default benchmarks/results, and none with --quick")
    option("--quick", action="store_true", help="tiny sizes, to test the benchmark; the numbers mean nothing")
    return parser.parse_args(arguments)


def _count(text: str) -> int:
    if (count := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {count}")
    return count


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line. A signal ends the run by an exception, so that rows measured so far are stored.

    Args:
        arguments: arguments of the command line; by default those of the process.

    Returns:
        The exit status.
    """
    options = parse(arguments)
    from .run import run_bench
    from .timing import Setting

    signal.signal(signal.SIGTERM, lambda number, frame: exit(128 + number))
    out = options.out if options.out or options.quick else RESULTS
    setting = Setting(options.threads, options.repeats, options.quick)
    try:
        run_bench([part for part in PARTS if not options.only or part in options.only], setting, out)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0
