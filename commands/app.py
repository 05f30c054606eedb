"""Assemble the command line from its commands.

`options_NAME.py` declares the options of a command and checks paths and names without PyTorch, whose import takes
seconds. Then it imports `NAME.py`, which does the work.
"""

import os
import re
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from attnres import __version__
from attnres.utils.wording import did_you_mean

from .choices import Debug
from .listing import list_names
from .options_convert import convert
from .options_demo import demo
from .options_eval import evaluate
from .options_inspect import inspect
from .options_plan import plan
from .options_push import push
from .options_train import train


def _keep_examples(text: str | None) -> str | None:
    """Mark the examples in a help text, which are paragraphs that begin with `attnres `, to keep their line breaks."""
    # click rewraps a paragraph unless its first line is a backspace character.
    return text and text.replace("\n\nattnres ", "\n\n\b\nattnres ")


class CommandGroup(TyperGroup):
    """A group of commands. Its help text keeps the line breaks of examples."""

    def __init__(self, *, help: str | None = None, **options: Any):
        super().__init__(help=_keep_examples(help), **options)


class Command(TyperCommand):
    """A command that keeps the line breaks of examples in its help, and proposes a similar name for a misspelt choice.

    It expands a leading `~` of any argument, also where the shell leaves it, as in quotes.
    """

    def __init__(self, name: str | None, *, help: str | None = None, **options: Any):
        super().__init__(name, help=_keep_examples(help), **options)

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        """Parse arguments as typer does, but expand `~` first, and end the messages of errors with a proposal."""
        try:
            return super().parse_args(ctx, [expand_home(arg) for arg in args])
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            if unknown := re.search(r"'(.*)' is not one of ('.*)", error.message):
                choices = re.findall("'(.*?)'", unknown[2])
                error.message += did_you_mean(unknown[1], choices, otherwise_all=False)
            raise


def expand_home(argument: str) -> str:
    """Replace a leading `~` of an argument, or of the value in `--option=value`, by the home directory."""
    if not argument.startswith("--"):
        return os.path.expanduser(argument)
    option, equals, value = argument.partition("=")
    return f"{option}{equals}{os.path.expanduser(value)}"


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
