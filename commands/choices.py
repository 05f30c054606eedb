"""Shared parts of the commands: `--debug`, the error of a wrong value, marks of written directories, safe printing.

This file is imported for every help text, so it imports no PyTorch.
"""

from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from .guard import show_tracebacks

# A directory with such a file may be replaced by `--overwrite`; see `attnres.utils.files.atomic_directory`.
WRITTEN_MODEL = {"marker": "config.json", "content": '"model_type"'}
WRITTEN_REPORT = {"marker": "inspection.json", "content": '"written_by": "attnres inspect"'}

Debug = Annotated[
    bool,
    typer.Option("--debug", help="Show the traceback of an error.", callback=show_tracebacks, expose_value=False),
]


def _keep_examples(text: str | None) -> str | None:
    """Mark the examples in a help text, the paragraphs that begin with `attnres `, so that their lines stay."""
    # click fills every paragraph except those that begin with a line of a backspace character.
    return text and text.replace("\n\nattnres ", "\n\n\b\nattnres ")


class CommandGroup(TyperGroup):
    """A group of commands in whose help text the lines of examples stay."""

    def __init__(self, *, help: str | None = None, **options: Any):
        super().__init__(help=_keep_examples(help), **options)


class Command(TyperCommand):
    """A command in whose help text the lines of examples stay, and whose errors are without a prefix of pydantic."""

    def __init__(self, name: str | None, *, help: str | None = None, **options: Any):
        super().__init__(name, help=_keep_examples(help), **options)

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        """Parse arguments as typer does, and raise its errors without the prefix `Value error, `."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            raise


def shown(text: str) -> str:
    """Return a text for `rich` that shows literally: markup is escaped, and control characters are shown as codes."""
    return escape(printable(text))


def printable(text: str) -> str:
    """Return a text in which control characters and line ends are replaced by their escape codes."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def given(context: typer.Context) -> list[str]:
    """Return the Python names of the options and arguments that the user has given."""
    return [name for name in context.params if context.get_parameter_source(name).name == "COMMANDLINE"]
