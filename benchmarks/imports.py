"""Compare the time of `import attnres` with that of importing Kimi Linear, on which it builds, from `transformers`.

Each import runs in a fresh process, which measures the import alone and not the start of Python. The two take turns.
"""

import os
import subprocess
import sys
from collections.abc import Iterator

from rich.table import Table

from .report import cell, make_table, verdict
from .timing import Setting, Times, compare

OURS, STOCK = "attnres", "Kimi Linear"
IMPORTS = {OURS: "import attnres", STOCK: "from transformers import KimiLinearForCausalLM"}
RATIO = f"{OURS} / {STOCK}"
TARGET = 1.15


def measure(setting: Setting) -> Iterator[dict]:
    """Yield one row with the times of both imports."""
    times = {name: Times(calls=1) for name in IMPORTS}
    for statement in IMPORTS.values():
        seconds(statement)  # writes the bytecode of modules that were never imported, and reads their files from disk
    for repeat in range(setting.repeats if setting.quick else 3 * setting.repeats):
        for name in sorted(IMPORTS, reverse=repeat % 2 == 1):  # each is the first of every second turn
            wall, cpu = seconds(IMPORTS[name])
            times[name].wall.append(wall)
            times[name].cpu.append(cpu)
    yield compare(times, {RATIO: (OURS, STOCK)})


def seconds(statement: str) -> tuple[float, float]:
    """Run an import in a fresh process; return its seconds by the clock and of the processor."""
    program = (
        "import time\n"
        "wall, cpu = time.perf_counter(), time.process_time()\n"
        f"{statement}\n"
        "print(time.perf_counter() - wall, time.process_time() - cpu)"
    )
    # With `-P` the current folder is not on the path, so no folder of the checkout hides an installed module.
    command = [sys.executable, "-P", "-c", program]
    # The processes must be able to keep bytecode. Otherwise every import would compile the files of the checkout again.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    wall, cpu = map(float, done.stdout.split())
    return wall, cpu


def tables(rows: list[dict]) -> dict[str, Table]:
    """Return the table of all rows, by its name in the README."""
    return {
        "imports": make_table(
            "Import in a fresh process",
            [f"{RATIO}, by the clock", "target", f"{RATIO}, time of the processor"],
            [
                [
                    cell(row, RATIO, 3),
                    verdict(row["ratios"][RATIO]["median"], TARGET),
                    cell({"ratios": row["processor_ratios"]}, RATIO, 3),
                ]
                for row in rows
            ],
        )
    }
