"""Assemble the command line from its commands.

`options_NAME.py` declares the options of a command and checks paths and names without PyTorch, whose import takes
seconds. Then it imports `NAME.py`, which does the work.
"""

from typing import Annotated

import typer

from attnres import __version__

from .choices import Command, CommandGroup, Debug
from .listing import list_names
from .options_convert import convert
from .options_demo import demo
from .options_eval import evaluate
from .options_inspect import inspect
from .options_plan import plan
from .options_push import push
from .options_train import train

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _show_version(is_given: bool) -> None:
    if is_given:
        print(f"attnres {__version__}")
        raise typer.Exit


@app.callback()
def attnres(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True, expose_value=False),
    ] = False,
    debug: Debug = False,
) -> None:
    """Attention Residuals for Transformers.

    attnres list                        names of recipes, connections, ...
    attnres convert MODEL my-attnres    retrofit a pretrained model exactly
    attnres train heal model=my-attnres train=text.jsonl out=runs/heal
    attnres eval my-attnres --baseline MODEL --out scores
    attnres inspect MODEL --compare my-attnres --serve
    attnres push my-attnres me/my-attnres --dry-run

    attnres COMMAND --help shows the options of a command.
    """


# The help lists the commands in this order.
app.command(cls=Command, short_help="Compare attention residuals with the residual stream, in minutes.")(demo)
app.command(cls=Command)(convert)
app.command(cls=Command)(train)
app.command("eval", cls=Command)(evaluate)
app.command(cls=Command, short_help="Show how a model uses its depth, as a page with figures.")(inspect)
app.command(cls=Command, short_help="Publish a model on the Hub, with a card.")(push)
app.command(cls=Command, short_help="Plan how to shard a model among devices.")(plan)
app.command("list", cls=Command, short_help="List the names that you can give to commands.")(list_names)
