"""The command-line options of the long-running commands: `attnres demo`, `train` and `eval`.

Each function checks its options before it imports the packages that take seconds. The docstrings are the help texts.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from attnres.utils.hub import check_source
from attnres.utils.packaged import configuration_names, recipe_names
from attnres.utils.wording import install_command

from .choices import Debug
from .guard import loading


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

    \b
    attnres demo
    attnres demo --checkpoint MODEL --text FILE --out attnres-demo-2
    """
    if checkpoint is not None:
        check_source(checkpoint)
    with loading():
        from attnres.training.demo import run_demo
    run_demo(out, minutes=minutes, checkpoint=checkpoint, text=text, seed=seed, overwrite=overwrite)


def train(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help=f"A YAML file, or one of: {', '.join(recipe_names())}.",
            autocompletion=recipe_names,
        ),
    ],
    changes: Annotated[list[str] | None, typer.Argument(metavar="key=value", help="Changes to it.")] = None,
    debug: Debug = False,
) -> None:
    """Pre-train, heal or fine-tune by a recipe.

    A recipe is a YAML file with the defaults of a run; each key=value changes one of them. In one process; over
    several: accelerate launch -m attnres train RECIPE [key=value]...

    \b
    attnres train heal model=my-attnres train=text.jsonl out=runs/heal
    attnres train finetune model=my-attnres train=ORG/DATA out=runs/more steps=500
    attnres train pretrain model=attnres-194m tokenizer=ORG/NAME train=ORG/DATA out=runs/new
    """
    if find_spec("yaml") is None:
        raise RuntimeError(f"attnres train needs the package yaml: {install_command('train')}")
    from attnres.training.recipe import read_recipe
    from attnres.training.run_folder import check_folder

    try:
        checked = read_recipe(recipe, changes or ())
    except (FileNotFoundError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    check_folder(Path(checked.out))
    if checked.model not in configuration_names():
        check_source(checked.model, configuration_names())
    with loading():
        from .train import train_in_this_process

    train_in_this_process(checked, name=recipe)


def _print_task_path(is_given: bool) -> None:
    """Print the directory of the tasks and exit, if the option is given."""
    if is_given:
        from attnres.eval.benchmarks import task_path

        print(task_path())
        raise typer.Exit


def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Directory or Hub id of the model.")],
    out: Annotated[Path, typer.Option(help="Directory for results; a run that was stopped goes on there.")],
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
        typer.Option(
            metavar="DIR",
            help="Folder of your own task files, for --tasks. Code that they name by `!function` runs: trust it first.",
        ),
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
        bool,
        typer.Option(
            "--print-task-path",
            help="Print the directory for lm_eval's --include_path, and exit.",
            callback=_print_task_path,
            is_eager=True,
            expose_value=False,
        ),
    ] = False,
    debug: Debug = False,
) -> None:
    """Evaluate on the paper's 15 benchmarks.

    With lm-evaluation-harness, which runs the same tasks by itself as well: `--print-task-path`.

    \b
    attnres eval my-attnres --out scores --tasks mmlu,gsm8k --limit 100
    attnres eval my-attnres --baseline meta-llama/Llama-3.2-1B --out scores
    """
    if missing := next((name for name in ("yaml", "lm_eval", "scipy") if find_spec(name) is None), None):
        raise RuntimeError(f"attnres eval needs the package {missing}: {install_command('eval')}")
    from attnres.eval.benchmarks import pick
    from attnres.eval.options import EvalOptions
    from attnres.eval.start import check_run

    from .left_out import stop_without_data

    try:
        benchmarks = pick(tasks, include_path)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    options = EvalOptions(
        model,
        out,
        benchmarks,
        baseline=baseline,
        data=data,
        limit=limit,
        batch_size=batch_size,
        allow_code_execution=allow_code_execution,
    )
    check_run(options)
    stop_without_data(benchmarks, data, allow_code_execution)
    with loading():
        from .eval import run_eval

    run_eval(options)
