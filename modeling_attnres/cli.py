"""The command line, `attnres COMMAND`.

Exit status: 0 done, 1 failed (one line on stderr), 2 bad usage, 130 interrupted, 143 terminated.
"""

import signal
import sys
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Attention Residuals for Transformers.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Directory to write the model, figures and results to.")] = Path(
        "attnres-demo"
    ),
    minutes: Annotated[float, typer.Option(min=0.01, help="Training time to aim at, on 2 CPU cores.")] = 4.0,
    checkpoint: Annotated[
        str | None, typer.Option(help="Start from this model (directory or Hub id) instead of training one.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Train on this file instead of the Python sources.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same numbers.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what an earlier demo wrote.")] = False,
) -> None:
    """Train, retrofit, continue and compare a small model.

    A standard model is trained for a moment, retrofitted into Block AttnRes exactly, and both are continued.
    """
    from attnres.training.demo import run_demo

    run_demo(out, minutes=minutes, checkpoint=checkpoint, text=text, seed=seed, overwrite=overwrite)


class Scale(StrEnum):
    """`attn_res_scale` of a retrofit."""

    sum = "sum"
    mean = "mean"


class Residual(StrEnum):
    """The residual connection that a conversion leads to."""

    attn_res = "attn_res"
    standard = "standard"


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Directory or Hub id of the model.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Directory to write.")],
    block_size: Annotated[int | None, typer.Option(min=1, help="Block size S in sublayers.")] = None,
    num_blocks: Annotated[int | None, typer.Option(min=1, help="Number of blocks.  [default: about 8]")] = None,
    full: Annotated[bool, typer.Option("--full", help="Full AttnRes: every sublayer a block.")] = False,
    scale: Annotated[Scale, typer.Option(help="`sum` is exact; `mean` only up to the norms' epsilons.")] = Scale.sum,
    to: Annotated[Residual, typer.Option(help="`standard` undoes a retrofit that is not trained yet.")] = (
        Residual.attn_res
    ),
    set_block_size: Annotated[
        int | None, typer.Option(min=1, help="Regroup an AttnRes model, where its function stays the same.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")] = None,
    verify: Annotated[
        bool | None,
        typer.Option(
            "--verify/--no-verify", help="Compare the logits of both.  [default: if the model fits in memory]"
        ),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Compare on this file, not on built-in prompts.")
    ] = None,
    hard_link: Annotated[bool, typer.Option("--hard-link", help="Link the weights instead of copying them.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a model at DST.")] = False,
) -> None:
    """Retrofit a pretrained decoder exactly, or the way back.

    The AttnRes model computes the same function as the decoder, from the same weights, and is ready to be trained.
    """
    from attnres.conversion.command import run_convert
    from attnres.conversion.convert import plan_block_size, plan_retrofit, plan_standard

    blocks = {"--block-size": block_size, "--num-blocks": num_blocks, "--full": full or None}
    kinds = {"--set-block-size": set_block_size, "--to standard": to == Residual.standard or None}
    given = [name for name, value in (blocks | kinds).items() if value is not None]
    if len(given) > 1:
        raise typer.BadParameter(f"{' and '.join(given)} exclude each other.")
    if scale != Scale.sum and kinds.keys() & given:
        raise typer.BadParameter(f"--scale and {given[0]} exclude each other.")
    if set_block_size is not None:
        plan = partial(plan_block_size, block_size=set_block_size)
    elif to == Residual.standard:
        plan = plan_standard
    else:
        plan = partial(plan_retrofit, block_size=block_size, num_blocks=num_blocks, full=full, scale=scale)
    run_convert(
        source,
        target,
        plan,
        revision=revision,
        verify=verify,
        text=text,
        hard_link=hard_link,
        overwrite=overwrite,
    )


@app.command(name="eval")
def evaluate(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Directory or Hub id of the model.")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for results; a run that was stopped goes on there.")] = (
        None
    ),
    baseline: Annotated[
        str | None, typer.Option(metavar="MODEL", help="A second model, compared with the first item by item.")
    ] = None,
    tasks: Annotated[
        str, typer.Option(metavar="paper|NAME,...", help="`paper` for all 15, or some of them: mmlu,gsm8k.")
    ] = "paper",
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Read the data sets from DIR/ORG/NAME, not from the Hub.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many items of each task.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences at a time; halved when memory runs out.")] = 8,
    allow_code_execution: Annotated[
        bool, typer.Option("--allow-code-execution", help="Run the programs that HumanEval and MBPP ask for.")
    ] = False,
    print_task_path: Annotated[
        bool, typer.Option("--print-task-path", help="Print the directory for lm_eval's --include_path, and exit.")
    ] = False,
) -> None:
    """Evaluate on the paper's 15 benchmarks.

    With lm-evaluation-harness, which runs the same tasks by itself as well: `--print-task-path`.
    """
    from attnres.eval.benchmarks import pick, task_path

    if print_task_path:
        print(task_path())
        return
    if missing := " and ".join(name for name, value in (("MODEL", model), ("--out", out)) if value is None):
        raise typer.BadParameter(f"{missing} missing.")
    try:
        benchmarks = pick(tasks)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        from attnres.eval.command import run_eval
    except ModuleNotFoundError as error:
        package = error.name.partition(".")[0]
        raise RuntimeError(f"attnres eval needs the package {package}: pip install 'attnres[eval]'.") from error

    run_eval(
        model,
        out,
        baseline=baseline,
        benchmarks=benchmarks,
        data=data,
        limit=limit,
        batch_size=batch_size,
        allow_code_execution=allow_code_execution,
    )


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A YAML file, or one of: finetune, heal, lora, pretrain, sft.")],
    changes: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="Changes to it.")] = None,
) -> None:
    """Pre-train, heal or fine-tune by a recipe.

    In one process; over several: accelerate launch -m attnres.training.train RECIPE [key=value]...
    """
    from attnres.training.recipe import read_recipe

    try:
        read = read_recipe(recipe, changes or ())
    except (FileNotFoundError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    from attnres.training.train import run_train

    run_train(read)


class Part(StrEnum):
    """What `bench` measures."""

    ops = "ops"
    phases = "phases"
    models = "models"
    kda = "kda"
    memory = "memory"
    scaling = "scaling"


class Device(StrEnum):
    """Where `bench` measures."""

    cpu = "cpu"
    cuda = "cuda"


@app.command()
def bench(
    only: Annotated[list[Part] | None, typer.Option(help="Measure this part; may be repeated.  [default: all]")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of PyTorch on the CPU.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="Times that all ways take their turn.")] = 5,
    device: Annotated[Device, typer.Option(help="Measure on the CPU or on a GPU.")] = Device.cpu,
    out: Annotated[
        Path | None, typer.Option(help="Folder for results.  [default: benchmarks/results; nowhere with --quick]")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes, to see that it runs; no measurement.")] = False,
) -> None:
    """Measure speed and memory against peers.

    From a checkout of the repository, where `python -m benchmarks` is the same.
    """
    checkout = Path(__file__).resolve().parents[1]
    if (checkout / "benchmarks" / "command.py").is_file():
        sys.path.insert(0, str(checkout))
    try:
        from benchmarks.command import HERE, PARTS, run_bench
        from benchmarks.timing import Setting
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "benchmarks":
            raise
        raise RuntimeError(
            "attnres bench needs a checkout of the repository, installed with pip install -e, "
            "because benchmarks are not part of the package."
        ) from error
    import torch

    if device == Device.cuda and not torch.cuda.is_available():
        raise RuntimeError("--device cuda, but PyTorch sees no GPU.")
    if out is None and not quick:
        out = HERE / "results"
    run_bench([part for part in PARTS if not only or part in only], Setting(threads, repeats, quick, device.value), out)


def main() -> None:
    """Run the command line; errors of the work itself end in one line."""
    # As an exception, so that what a command has begun to write goes.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        app()
    except (ArithmeticError, ImportError, OSError, RuntimeError, ValueError) as error:
        print(f"attnres: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)
