"""The options of `attnres plan`, and the checks of them that need no PyTorch."""

from enum import StrEnum
from typing import Annotated

import typer

from attnres.checkpoints.source import ModelSource

from .choices import Debug, check_revision, given_options
from .connections import flag
from .guard import loading

CONTEXT = 4096  # tokens
_LARGEST = 10**12
_UNITS = {"": 1e9, "MB": 1e6, "GB": 1e9, "TB": 1e12, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_memory(text: str | float) -> float:
    """Return bytes for a text such as `80`, `80GB` or `80 GiB`."""
    number = str(text).strip()
    unit = number.lstrip("0123456789.")
    try:
        size = float(number.removesuffix(unit)) * _UNITS[unit.strip().upper()]
    except (KeyError, ValueError):
        size = 0.0
    if not 1e6 <= size <= 1e15:
        raise typer.BadParameter(f"must be from 1 MB to 1,000 TB, such as 80, 80GB or 80GiB, got {text!r}.")
    return size


class Optimizer(StrEnum):
    """The optimizers of a recipe."""

    adamw = "adamw"
    muon = "muon"


def plan(
    context_of_click: typer.Context,
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="Name of a configuration, or directory or Hub id of a model.")
    ],
    devices: Annotated[int, typer.Option(min=1, max=2**16, help="Number of devices.")],
    memory: Annotated[
        float,
        typer.Option(parser=parse_memory, metavar="SIZE", help="Memory of a device, such as 80GB or 80GiB."),
    ] = "80GB",  # pyrefly: ignore[bad-function-definition]  # typer parses a default like what a user types
    context: Annotated[
        int | None,
        typer.Option(
            min=1, max=_LARGEST, help=f"Tokens of a sequence.  [default: {CONTEXT}, or the most that the model takes]"
        ),
    ] = None,
    batch_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=_LARGEST,
            help="With --train, tokens of an optimizer step; with --serve, of all sequences that are served at once.  "
            "[default: a sequence for each device]",
        ),
    ] = None,
    train: Annotated[bool, typer.Option("--train", help="Plan a training step. This is the default.")] = False,
    serve: Annotated[bool, typer.Option("--serve", help="Plan serving: prompts, and tokens of all sequences.")] = False,
    optimizer: Annotated[Optimizer, typer.Option(help="The optimizer of --train.")] = Optimizer.adamw,
    lora: Annotated[
        int | None,
        typer.Option(
            min=1, max=10**5, metavar="RANK", help="With --train, train adapters alone, beside frozen weights."
        ),
    ] = None,
    packed: Annotated[
        bool, typer.Option("--packed", help="Keep routed experts packed as MXFP4; with --lora or --serve.")
    ] = False,
    prefill_chunk: Annotated[
        int, typer.Option(min=1, max=_LARGEST, help="Tokens of a prompt that --serve computes at once.")
    ] = 16384,
    tflops: Annotated[float, typer.Option(min=0.001, max=10**6, help="10^12 operations of a device per second.")] = 989,
    efficiency: Annotated[float, typer.Option(min=0.001, max=1, help="Share of --tflops that is reached.")] = 0.4,
    memory_bandwidth: Annotated[float, typer.Option(min=0.001, max=10**6, help="GB/s of a device's memory.")] = 3350,
    link: Annotated[float, typer.Option(min=0.001, max=10**6, help="GB/s between two devices of a node.")] = 450,
    network: Annotated[float, typer.Option(min=0.001, max=10**6, help="GB/s between devices of two nodes.")] = 50,
    per_node: Annotated[int, typer.Option(min=1, max=2**16, help="Devices of a node.")] = 8,
    shown: Annotated[int, typer.Option(min=1, max=10**6, help="Layouts to show.")] = 8,
    runnable: Annotated[
        bool, typer.Option("--runnable", help="Only layouts that `attnres train` runs; with --serve, `generate`.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, with all layouts that fit.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of CONFIG on the Hub.")] = None,
    debug: Debug = False,
) -> None:
    """Plan how to shard a model among devices: memory, communication and time of each layout that fits.

    Nothing is downloaded but the configuration, and no device is needed: memory is counted on tensors without data.

    attnres plan kimi-k3 --devices 1024 --memory 141 --batch-tokens 16777216
    attnres plan kimi-k3 --devices 16 --memory 192 --lora 32 --packed
    attnres plan my-attnres --devices 8 --context 131072 --serve
    """
    given = given_options(context_of_click)
    if train and serve:
        raise typer.BadParameter("--train and --serve exclude each other: give one of them.")
    if packed and not serve and lora is None:
        raise typer.BadParameter("--packed needs --lora or --serve: packed experts cannot be trained.")
    foreign = ("optimizer", "lora") if serve else ("prefill_chunk",)
    if others := [flag(name) for name in foreign if name in given]:
        raise typer.BadParameter(f"{others[0]} needs {'--train' if serve else '--serve'}.")
    if batch_tokens and context and batch_tokens % context:
        raise typer.BadParameter(
            f"--batch-tokens must be a multiple of --context ({context:,}), got {batch_tokens:,}: "
            f"{max(1, batch_tokens // context) * context:,} is one."
        )
    source = ModelSource(config, revision)
    source.check()
    check_revision(source)
    with loading():
        from attnres.planning import Device, Job

        from .plan import run_plan
    device = Device(
        memory=memory,
        flops=tflops * 1e12,
        efficiency=efficiency,
        memory_bandwidth=memory_bandwidth * 1e9,
        link=link * 1e9,
        network=network * 1e9,
        per_node=per_node,
    )

    def make_job(longest: int | None) -> Job:
        # `Costs` refuses a model whose longest context is less than one token.
        length = context or (min(CONTEXT, longest) if longest is not None and longest > 0 else CONTEXT)
        chunk = min(prefill_chunk, length)
        return Job(devices, length, batch_tokens or devices * length, not serve, optimizer.value, chunk, lora, packed)

    run_plan(source, make_job, device, shown=shown, runnable=runnable, as_json=json)
