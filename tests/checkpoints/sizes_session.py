"""Convert every directory below the first argument in little memory and processor time, and write `seen.json`."""

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from conversion.checkpoints import convert

MEMORY = 2**30
MOST = 200  # times the processor time of a sound conversion


def size() -> int:
    """Return the bytes of this process's address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def too_long(number: int, frame: object) -> None:
    """Stop a conversion that exceeds its processor time."""
    raise SystemExit("too long")


def main(folder: Path) -> None:
    seen = {}
    # The first conversion imports all modules before memory is limited. The second tells how fast this machine is.
    for name in ("first", "second"):
        begun = time.process_time()
        convert(folder / "sound", folder / "results" / name, "--no-verify")
    limit = MOST * (time.process_time() - begun)
    resource.setrlimit(resource.RLIMIT_AS, (size() + MEMORY,) * 2)
    for source in sorted(folder.iterdir()):
        if source.name == "results":
            continue
        # Processor time: on a busy machine, the clock also counts the time of other processes.
        signal.signal(signal.SIGPROF, too_long)
        signal.setitimer(signal.ITIMER_PROF, limit)
        try:
            run = convert(source, folder / "results" / source.name, "--no-verify")
            code, error = run.code, run.err
        except MemoryError:
            code, error = None, "out of memory"
        signal.setitimer(signal.ITIMER_PROF, 0)
        seen[source.name] = {"code": code, "error": error}
        (folder / "seen.json").write_text(json.dumps(seen))


main(Path(sys.argv[1]))
