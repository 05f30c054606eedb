"""`attnres bench`: run the benchmarks of a checkout of the repository."""

import sys
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from attnres.utils.wording import install_command

from .choices import Debug, given_options
from .connections import flag
from .guard import loading


class BenchPart(StrEnum):
    """The parts of the benchmark."""

    ops = "ops"
    phases = "phases"
    models = "models"
    connections = "connections"
    layers = "layers"
    narrow = "narrow"
    kda = "kda"
    kimi_k3 = "kimi_k3"
    memory = "memory"
    prefill = "prefill"
    host = "host"
    imports = "imports"
    scaling = "scaling"


class Device(StrEnum):
    """The devices that `bench` can measure on."""

    cpu = "cpu"
    cuda = "cuda"


def bench(
    context: typer.Context,
    only: Annotated[
        list[BenchPart] | None,
        typer.Option(
            metavar="PART", help=f"Measure this part; may be repeated: {', '.join(BenchPart)}.  [default: all]"
        ),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of PyTorch on the CPU.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats of each measurement on the CPU, interleaved.")] = 5,
    device: Annotated[Device, typer.Option(help="`cpu`, or `cuda` for the separate benchmark of GPUs.")] = Device.cpu,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for results.  [default: benchmarks/results; none with --quick or on a GPU]"),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Use tiny sizes, to test the benchmark; the numbers mean nothing.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Measure speed and memory against peers.

    This needs a checkout of the repository. There, `python -m benchmarks` is the same command.

    attnres bench --quick
    attnres bench --only models --threads 1
    """
    checkout = Path(__file__).resolve().parents[1]
    if (checkout / "benchmarks" / "run.py").is_file():
        sys.path.insert(0, str(checkout))
    cpu_options = [flag(name) for name in ("only", "threads", "repeats") if name in given_options(context)]
    if device == Device.cuda and cpu_options:
        raise typer.BadParameter(f"{' and '.join(cpu_options)} and --device cuda exclude each other.")
    try:
        with loading():
            if device == Device.cuda:
                from benchmarks.gpu import run_gpu
            else:
                from benchmarks.run import HERE, PARTS, run_bench
                from benchmarks.timing import Setting
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "benchmarks":
            raise
        raise RuntimeError(
            "attnres bench needs a checkout of the repository, installed with pip install -e: "
            "benchmarks are not part of the package."
        ) from error
    if device == Device.cuda:
        raise typer.Exit(run_gpu(None, out, quick=quick))
    if find_spec("numba") is None:
        raise ModuleNotFoundError(
            f"attnres bench needs the package numba for the compiled loops: {install_command('cpu')}"
        )
    if out is None and not quick:
        out = HERE / "results"
    run_bench([part for part in PARTS if not only or part in only], Setting(threads, repeats, quick), out)
