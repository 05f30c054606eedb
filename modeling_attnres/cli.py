"""The command line, `attnres COMMAND`. Exit status: 0 done, 1 failed (one line on stderr), 2 bad usage, 130 stopped."""

import sys
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


@app.callback()
def _commands() -> None:
    """Makes typer keep the name of a single command."""


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
    """Train a small standard model, retrofit it into Block AttnRes exactly, continue both, and compare."""
    from attnres.training.demo import run_demo

    run_demo(out, minutes=minutes, checkpoint=checkpoint, text=text, seed=seed, overwrite=overwrite)


def main() -> None:
    """Run the command line; errors of the work itself end in one line."""
    try:
        app()
    except (OSError, RuntimeError, ValueError) as error:
        print(f"attnres: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)
