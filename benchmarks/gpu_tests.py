"""Run the tests of the kernels on this device within the time that is left, if pytest is installed."""

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from attnres.accelerated.triton import tested

from .clock import Clock

ROOT = Path(__file__).parents[1]
TESTS = "tests/accelerated"
LEAST = 20  # seconds that must be left for a run to begin


def measure(device: str, quick: bool, clock: Clock) -> Iterator[dict]:
    """Yield one row: how many tests passed, failed and were skipped."""
    seconds = min(clock.left() - 5, clock.row(1) or 0)
    if find_spec("pytest") is None or not (ROOT / TESTS).is_dir():
        yield {"missing": "pytest or the tests are not installed"}
    elif seconds < LEAST:
        yield {"missing": "out of time"}
    else:
        yield run(seconds, quick)


def run(seconds: float, quick: bool) -> dict:
    """Run pytest for at most `seconds` and return its counts and the end of its output; `quick` only collects."""
    options = ["-m", "gpu", "-p", "no:cacheprovider", "--maxfail", "20", "--tb", "short"]
    if quick:
        options += ["--collect-only"]
    elif find_spec("xdist") is not None:
        options += ["--numprocesses", "8"]  # the compiler, which runs on the CPU, takes most of the time
    command = [sys.executable, "-m", "pytest", TESTS, *options]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode(errors="replace") if error.stdout else ""
        return {"missing": "out of time", "output": output[-4000:]}
    counts = {name: int(number) for number, name in re.findall(r"(\d+) (passed|failed|skipped|errors?)", done.stdout)}
    # pytest exits with 5 if it collects no test, as without Triton.
    if done.returncode == 0 and counts.get("passed") and not quick:
        tested.record()  # from now on `auto` takes the paths that only these tests have seen on a GPU
    return {"counts": counts, "output": done.stdout[-4000:], "is_right": done.returncode in (0, 5)}


def table(rows: list[dict]) -> tuple[str, list[str], list[list[str]], str]:
    """Return title, columns, cells and note of the table."""
    cells = [[name, str(number)] for row in rows for name, number in row.get("counts", {}).items()]
    notes = [row["missing"] for row in rows if "missing" in row]
    notes += [row["output"][-1500:] for row in rows if not row.get("is_right", True)]
    return "Tests of the kernels", ["outcome", "tests"], cells, "\n".join(notes)
