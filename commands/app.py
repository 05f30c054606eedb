"""The options of all commands; what they do is imported when one is run."""

import sys
from enum import StrEnum
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from .guard import loading, show_tracebacks

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Debug = Annotated[
    bool,
    typer.Option("--debug", help="Show the traceback of an error.", callback=show_tracebacks, expose_value=False),
]


@app.callback()
def attnres(debug: Debug = False) -> None:
    """Attention Residuals for Transformers."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Directory to write the model, figures and results to.")] = Path(
        "attnres-demo"
    ),
    minutes: Annotated[float, typer.Option(min=0.01, help="Time to aim at, on 2 idle CPU cores.")] = 4.0,
    checkpoint: Annotated[
        str | None, typer.Option(help="Retrofit this model (directory or Hub id) and train it on, not new ones.")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Use this file's text, not the Python sources; an empty line ends a document.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="The first of three; the same seed and text give the same numbers.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what an earlier demo wrote.")] = False,
    debug: Debug = False,
) -> None:
    """Compare attention residuals with the residual stream in small models, and retrofit one.

    Both train from the same weights on the same batches, three times; then the standard model is retrofitted exactly.
    """
    with loading():
        from attnres.training.demo import run_demo
    run_demo(out, minutes=minutes, checkpoint=checkpoint, text=text, seed=seed, overwrite=overwrite)


class Undone(StrEnum):
    """What a conversion may lead back to."""

    standard = "standard"


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Directory or Hub id of the model.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Directory to write.")],
    residual: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Residual connection to put in.  [default: attention residuals]"),
    ] = None,
    block_size: Annotated[int | None, typer.Option(min=1, help="Block size S in sublayers.")] = None,
    num_blocks: Annotated[int | None, typer.Option(min=1, help="Number of blocks.  [default: about 8]")] = None,
    full: Annotated[bool, typer.Option("--full", help="Full AttnRes: every sublayer a block.")] = False,
    scale: Annotated[
        str | None, typer.Option(help="`sum` is exact; `mean` only up to the norms' epsilons.  [default: sum]")
    ] = None,
    streams: Annotated[int | None, typer.Option(min=1, help="Number of residual streams.")] = None,
    to: Annotated[Undone | None, typer.Option(help="`standard` undoes a retrofit that is not trained yet.")] = None,
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
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Take code along that came with SRC, as for its tokenizer.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Retrofit a pretrained decoder exactly, or the way back.

    The result computes the same function as the decoder, from the same weights, and is ready to be trained. Each
    residual connection has options of its own.
    """
    values = {
        "block_size": block_size,
        "num_blocks": num_blocks,
        "full": full or None,
        "scale": scale,
        "streams": streams,
    }
    options = {name: value for name, value in values.items() if value is not None}
    if residual is not None:
        options["residual"] = residual
    kinds = {"--set-block-size": set_block_size, "--to": to}
    given = [name for name, value in kinds.items() if value is not None]
    flags = [f"--{name.replace('_', '-')}" for name in options]
    if len(given) + bool(flags) > 1:
        raise typer.BadParameter(f"{' and '.join([*given, *flags])} exclude each other.")
    with loading():
        from attnres.conversion.convert import plan_change, plan_retrofit, plan_standard
        from attnres.conversion.family import check_options

        from .convert import run_convert

    if set_block_size is not None:
        plan = partial(plan_change, block_size=set_block_size)
    elif to is not None:
        plan = plan_standard
    else:
        try:
            check_options(**options)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint=flags) from error
        plan = partial(plan_retrofit, **options)
    run_convert(
        source,
        target,
        plan,
        revision=revision,
        verify=verify,
        text=text,
        hard_link=hard_link,
        overwrite=overwrite,
        trust_remote_code=trust_remote_code,
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
        str,
        typer.Option(
            metavar="paper|NAME,...", help="`paper` for all 15, some of them: mmlu,gsm8k, or tasks by lm_eval's names."
        ),
    ] = "paper",
    include_path: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of task files of your own, for --tasks."),
    ] = None,
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
    debug: Debug = False,
) -> None:
    """Evaluate on the paper's 15 benchmarks.

    With lm-evaluation-harness, which runs the same tasks by itself as well: `--print-task-path`.
    """
    with loading():
        from attnres.eval.benchmarks import pick, task_path

    if print_task_path:
        print(task_path())
        return
    if missing := " and ".join(name for name, value in (("MODEL", model), ("--out", out)) if value is None):
        raise typer.BadParameter(f"{missing} missing.")
    try:
        benchmarks = pick(tasks, include_path)
        with loading():
            from .eval import run_eval
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
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
    debug: Debug = False,
) -> None:
    """Pre-train, heal or fine-tune by a recipe.

    In one process; over several: accelerate launch -m attnres train RECIPE [key=value]...
    """
    with loading():
        from attnres.training.recipe import read_recipe

        from .train import train_in_this_process

    try:
        read = read_recipe(recipe, changes or ())
    except (FileNotFoundError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    train_in_this_process(read)


class Part(StrEnum):
    """What `bench` measures."""

    ops = "ops"
    phases = "phases"
    models = "models"
    layers = "layers"
    kda = "kda"
    memory = "memory"
    scaling = "scaling"


class Device(StrEnum):
    """Where `bench` measures."""

    cpu = "cpu"
    cuda = "cuda"


@app.command()
def bench(
    context: typer.Context,
    only: Annotated[list[Part] | None, typer.Option(help="Measure this part; may be repeated.  [default: all]")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of PyTorch on the CPU.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="Times that all ways take their turn, on the CPU.")] = 5,
    device: Annotated[Device, typer.Option(help="Measure on the CPU, or the parts of their own that GPUs have.")] = (
        Device.cpu
    ),
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for results.  [default: benchmarks/results; nowhere with --quick or on a GPU]"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes, to see that it runs; no measurement.")] = False,
    debug: Debug = False,
) -> None:
    """Measure speed and memory against peers.

    From a checkout of the repository, where `python -m benchmarks` is the same.
    """
    checkout = Path(__file__).resolve().parents[1]
    if (checkout / "benchmarks" / "run.py").is_file():
        sys.path.insert(0, str(checkout))
    of_the_cpu = [
        f"--{name}"
        for name in ("only", "threads", "repeats")
        if context.get_parameter_source(name).name == "COMMANDLINE"
    ]
    if device == Device.cuda and of_the_cpu:
        raise typer.BadParameter(f"{' and '.join(of_the_cpu)} and --device cuda exclude each other.")
    try:
        with loading():
            if device == Device.cuda:
                from benchmarks.gpu import main as on_gpu
            else:
                from benchmarks.run import HERE, PARTS, run_bench
                from benchmarks.timing import Setting
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "benchmarks":
            raise
        raise RuntimeError(
            "attnres bench needs a checkout of the repository, installed with pip install -e, "
            "because benchmarks are not part of the package."
        ) from error
    if device == Device.cuda:
        raise typer.Exit(on_gpu([*(["--out", str(out)] if out else []), *(["--quick"] if quick else [])]))
    if find_spec("numba") is None:
        raise ModuleNotFoundError(
            "attnres bench measures the compiled loops, which need the package numba: pip install 'attnres[cpu]'."
        )
    if out is None and not quick:
        out = HERE / "results"
    run_bench([part for part in PARTS if not only or part in only], Setting(threads, repeats, quick), out)
