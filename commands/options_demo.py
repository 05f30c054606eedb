"""The options of `attnres demo`, and the checks of them that need no PyTorch."""

from pathlib import Path
from typing import Annotated

import typer

from attnres.utils.hub import check_source
from attnres.utils.model_files import WRITTEN_DEMO

from .choices import Debug, check_out
from .guard import loading


def demo(
    out: Annotated[Path, typer.Option(help="Directory to write the model, figures and results to.")] = Path(
        "attnres-demo"
    ),
    minutes: Annotated[float, typer.Option(min=0.01, help="Approximate time on 2 idle CPU cores.")] = 4.0,
    checkpoint: Annotated[
        str | None,
        typer.Option(help="Retrofit and train this model (directory or Hub id) instead of training new ones."),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Train on this file instead of Python sources; an empty line ends a document.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="The first of three seeds; equal seeds and texts give equal numbers.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what an earlier demo wrote.")] = False,
    debug: Debug = False,
) -> None:
    """Compare attention residuals with the residual stream in a small Llama, and retrofit it.

    The demo trains both models from the same weights on the same batches, with three seeds. Then it retrofits the
    standard model exactly.

    attnres demo
    attnres demo --checkpoint MODEL --text FILE --out attnres-demo-2
    """
    if checkpoint is not None:
        check_source(checkpoint)
    check_out(out, WRITTEN_DEMO, overwrite)
    with loading():
        from attnres.training.demo import run_demo
    run_demo(out, minutes=minutes, checkpoint=checkpoint, text=text, seed=seed, overwrite=overwrite)
