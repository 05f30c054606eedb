"""Check and measure everything on a GPU, with one command, in a few minutes.

    python -m benchmarks --device cuda --out DIR [--minutes 9] [--quick]

1. `check`: every implementation of depth attention against the readable form;
2. `tests`: the tests of the kernels, if pytest is installed;
3. `ops`: one aggregation against a copy of the memory that it moves;
4. `models`: models against the standard residual stream, for prefill, a training step and decoding;
5. `libraries`: one aggregation by the kernels of libraries, which may spend all remaining time on tuning themselves.

It needs Python, torch, triton, transformers and the checkout (`pip install --no-deps --no-build-isolation -e .`). Every
row is stored as soon as it is measured, so a run that is cut off keeps its rows. If time is short, there are fewer
repeats, and then fewer rows. `--quick` takes tiny sizes, to see that everything runs, also without a GPU.
"""

import argparse
import json
import sys
import warnings
from pathlib import Path
from types import ModuleType

import torch

from attnres.utils.files import atomic_write
from attnres.utils.quiet import quiet_transformers

from . import gpu_check, gpu_libraries, gpu_models, gpu_ops, gpu_tests
from .clock import Clock, OutOfTime
from .machine import describe
from .stored import markdown_table

# Part -> its module, and its share of the time that is left when it begins.
PARTS: dict[str, tuple[ModuleType, float]] = {
    "check": (gpu_check, 0.1),
    "tests": (gpu_tests, 0.3),
    "ops": (gpu_ops, 0.15),
    "models": (gpu_models, 0.75),
    "libraries": (gpu_libraries, 1.0),
}
MINUTES = 9.0  # time limit of a whole run
MARGIN = 10  # seconds kept free at the end, for stopping


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line.

    Args:
        arguments: arguments of the command line; by default those of the process.

    Returns:
        The exit status: 1 if there is no GPU or an implementation or a test is wrong. Bad usage exits with 2.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks --device cuda", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=["cuda"], default="cuda", help="selects the GPU run")
    parser.add_argument("--out", type=Path, help="folder for gpu.json and gpu.md; without it nothing is written")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="time limit of the whole run (default: 9)")
    parser.add_argument("--only", choices=list(PARTS), action="append", help="run only this part; may be repeated")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs; no measurement")
    options = parser.parse_args(arguments)
    if not options.minutes > 0:
        parser.error(f"--minutes must be more than 0, not {options.minutes:g}.")
    return run_gpu(options.only, options.out, options.minutes, options.quick)


def run_gpu(parts: list[str] | None, out: Path | None, minutes: float = MINUTES, quick: bool = False) -> int:
    """Measure the parts, print a table of each, and store every row.

    Args:
        parts: names of `PARTS`, in the order in which they run; `None` for all.
        out: folder for the results; nothing is written if `None`.
        minutes: time limit of the whole run.
        quick: take tiny sizes.

    Returns:
        The exit status: 1 if there is no GPU, or an implementation or a test is wrong.
    """
    if not torch.cuda.is_available() and not quick:
        print("benchmarks: PyTorch finds no GPU. Add --quick to run tiny sizes without one.", file=sys.stderr)
        return 1
    parts = parts or [*PARTS]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    clock = Clock(max(1.0, 60 * minutes - MARGIN))
    results = Results(describe(device) | {"minutes": minutes, "quick": quick}, out)
    try:
        with clock.stops(), quiet_transformers(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in parts:
                module, share = PARTS[name]
                clock.begin_part(share)
                for row in module.measure(device, quick, clock):
                    results.add(name, row)
                print(results.table(name), end="\n\n", flush=True)
    except OutOfTime:
        print(f"The {minutes:g} minutes are over.", file=sys.stderr)
        results.is_cut_off = True
        results.store()
    return 0 if results.are_right() else 1


class Results:
    """The rows of all parts and the two files that hold them. Every new row rewrites both files.

    Args:
        about: machine, versions and commit.
        out: folder of the files; nothing is written if `None`.
    """

    def __init__(self, about: dict, out: Path | None):
        self._about, self._out = about, out
        self._rows: dict[str, list[dict]] = {}
        self.is_cut_off = False
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)

    def add(self, part: str, row: dict) -> None:
        """Add a row to a part and write the files."""
        self._rows.setdefault(part, []).append(row)
        self.store()

    def table(self, part: str) -> str:
        """Return the table of a part in Markdown."""
        return markdown_table(*PARTS[part][0].table(self._rows.get(part, [])))

    def are_right(self) -> bool:
        """Return whether no row reports a wrong implementation or test."""
        return all(row.get("is_right", True) for rows in self._rows.values() for row in rows)

    def store(self) -> None:
        """Write `gpu.json` and `gpu.md`, each as a whole."""
        if self._out is None:
            return
        content = self._about | {"is_cut_off": self.is_cut_off, "parts": self._rows}
        atomic_write(self._out / "gpu.json", json.dumps(content, indent=1) + "\n")
        machine = self._about["machine"]
        head = f"{machine.get('gpu') or machine['processor']}, torch {torch.__version__}: median [quartiles]"
        tables = "\n\n".join(self.table(part) for part in self._rows)
        atomic_write(self._out / "gpu.md", f"{head}\n\n{tables}\n")


if __name__ == "__main__":
    sys.exit(main())
