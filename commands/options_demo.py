"""The options of `attnres demo`."""

from pathlib import Path
from typing import Annotated

import typer

from attnres.utils.hub import check_source

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

    attnres demo
    attnres demo --checkpoint MODEL --text FILE --out attnres-demo-2
    """
    if checkpoint is not None:
        check_source(checkpoint)
    with loading():
        from attnres.training.demo import run_demo
    run_demo(out, minutes=minutes, checkpoint=checkpoint, text=text, seed=seed, overwrite=overwrite)
