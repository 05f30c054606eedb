"""On a GPU, in one command and a few minutes: right first, then as fast as the targets say.

    python -m benchmarks --device cuda --out DIR [--minutes 9] [--quick]

1. check: every implementation of depth attention against the readable form;
2. the tests of the kernels, where pytest is installed;
3. one aggregation against a copy of what it moves;
4. models against the standard residual stream: prefill, a training step, decoding;
5. one aggregation by the kernels of libraries, which may spend all time that is left on tuning themselves;
6. asked for by `--only tiles`: other tiles of our kernels than the chosen ones.

Needs Python, torch, triton, transformers and the checkout (`pip install --no-deps --no-build-isolation -e .`). Every
row is stored when it is measured, so that a run that is cut off leaves what it has. Where time is short there are fewer
repeats, and then fewer rows. With `--quick` everything is tiny, to see that it runs, also without a GPU.
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

from . import gpu_check, gpu_libraries, gpu_models, gpu_ops, gpu_tests, gpu_tiles
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
    "tiles": (gpu_tiles, 1.0),
}
ON_REQUEST = ("tiles",)
MARGIN = 10  # seconds before the end, to stop in


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line; the exit status is 1 where an implementation is wrong, and 2 for bad usage."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks --device cuda", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=["cuda"], default="cuda", help="this is what runs on a GPU")
    parser.add_argument("--out", type=Path, help="folder for gpu.json and gpu.md; without it nothing is written")
    parser.add_argument("--minutes", type=float, default=9.0, help="that all may take (default: 9)")
    parser.add_argument("--only", choices=list(PARTS), action="append", help="this part; may be repeated")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs; no measurement")
    options = parser.parse_args(arguments)
    if not options.minutes > 0:
        parser.error(f"--minutes is {options.minutes:g}, but must be more than 0.")
    if not torch.cuda.is_available() and not options.quick:
        print("benchmarks: PyTorch sees no GPU; --quick runs without one.", file=sys.stderr)
        return 1
    return run_gpu(
        options.only or [part for part in PARTS if part not in ON_REQUEST], options.out, options.minutes, options.quick
    )


def run_gpu(parts: list[str], out: Path | None, minutes: float, quick: bool) -> int:
    """Measure the parts, print a table of each, and store every row; 1 if an implementation or a test is wrong."""
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
    """Rows of the parts, and the two files that hold them: written anew with every row, each at once.

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
        self._rows.setdefault(part, []).append(row)
        self.store()

    def table(self, part: str) -> str:
        return markdown_table(*PARTS[part][0].table(self._rows.get(part, [])))

    def are_right(self) -> bool:
        return all(row.get("is_right", True) for rows in self._rows.values() for row in rows)

    def store(self) -> None:
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
