"""The options of `attnres eval`, and the checks of them that need no PyTorch."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from attnres.utils.wording import install_command

from .choices import Debug, Imports
from .guard import loading


def _print_task_path(is_given: bool) -> None:
    """Print the directory of the tasks and exit, if the option is given."""
    if is_given:
        from attnres.eval.benchmarks import task_path

        print(task_path())
        raise typer.Exit


def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Directory or Hub id of the model.")],
    out: Annotated[Path, typer.Option(help="Directory for results; a stopped run continues from it.")],
    baseline: Annotated[
        str | None, typer.Option(metavar="MODEL", help="A second model, compared with the first item by item.")
    ] = None,
    tasks: Annotated[
        str,
        typer.Option(
            metavar="paper|NAME,...",
            help="`paper` for all 15; or names of some, such as mmlu,gsm8k; or names of other lm_eval tasks.",
        ),
    ] = "paper",
    include_path: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of your own task files for --tasks. Code that they name by `!function` runs: trust it first.",
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Read the data sets from DIR/ORG/NAME, not from the Hub.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use only this number of items of each task, the first ones.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences at a time; halved when memory runs out.")] = 8,
    allow_code_execution: Annotated[
        bool,
        typer.Option("--allow-code-execution", help="Run the programs that the model writes for HumanEval and MBPP."),
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with a tokenizer, never a model's.")
    ] = False,
    print_task_path: Annotated[
        bool,
        typer.Option(
            "--print-task-path",
            help="Print the directory of the tasks, for lm_eval's --include_path, and exit.",
            callback=_print_task_path,
            is_eager=True,
            expose_value=False,
        ),
    ] = False,
    imports: Imports = None,
    debug: Debug = False,
) -> None:
    """Evaluate on the paper's 15 benchmarks.

    This uses lm-evaluation-harness. To run the same tasks with lm_eval alone, see --print-task-path.

    attnres eval my-attnres --out scores --tasks mmlu,gsm8k --limit 100
    attnres eval my-attnres --baseline meta-llama/Llama-3.2-1B --out scores
    """
    if missing := next(
        (name for name in ("yaml", "lm_eval", "scipy", "datasets", "matplotlib") if find_spec(name) is None), None
    ):
        raise RuntimeError(f"attnres eval needs the package {missing}: {install_command('eval')}")
    from attnres.eval.benchmarks import pick
    from attnres.eval.start import EvalOptions, check_run

    from .missing_results import stop_without_data

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
        trust_remote_code=trust_remote_code,
    )
    check_run(options)
    stop_without_data(benchmarks, data, allow_code_execution)
    with loading():
        from .eval import run_eval

    run_eval(options)
