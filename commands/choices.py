"""Common parts of the commands: `--debug`, help texts, marks of written directories, safe printing.

Every help text imports this file, so it does not import PyTorch.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from attnres.utils.wording import counted, printable

from .guard import show_tracebacks

# `--overwrite` may replace a directory that has a file `marker` with this `content`; see
# `attnres.utils.files.atomic_directory`.
WRITTEN_MODEL = {"marker": "config.json", "content": '"model_type"'}
WRITTEN_REPORT = {"marker": "inspection.json", "content": '"written_by": "attnres inspect"'}

MAX_NAMED = 10  # the largest number of tensors that a message names

Debug = Annotated[
    bool,
    typer.Option("--debug", help="Show the traceback of an error.", callback=show_tracebacks, expose_value=False),
]


def _keep_examples(text: str | None) -> str | None:
    """Mark the examples in a help text, which are paragraphs that begin with `attnres `, to keep their line breaks."""
    # click rewraps a paragraph unless its first line is a backspace character.
    return text and text.replace("\n\nattnres ", "\n\n\b\nattnres ")


class CommandGroup(TyperGroup):
    """A group of commands. Its help text keeps the line breaks of examples."""

    def __init__(self, *, help: str | None = None, **options: Any):
        super().__init__(help=_keep_examples(help), **options)


class Command(TyperCommand):
    """A command. Its help text keeps the line breaks of examples, and its errors lose the prefix of pydantic."""

    def __init__(self, name: str | None, *, help: str | None = None, **options: Any):
        super().__init__(name, help=_keep_examples(help), **options)

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        """Parse arguments as typer does, but raise errors without pydantic's prefix `Value error, `."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            raise


def shown(text: str) -> str:
    """Escape a text, so that `rich` prints it literally: neither as markup nor with control characters."""
    return escape(printable(text))


def describe_unread(names: Sequence[str], place: str) -> str:
    """Return the beginning of a warning that a model does not read some tensors of its source.

    Args:
        names: The names of the tensors.
        place: The words for the source.
    """
    first = ", ".join(f"`{shown(name)}`" for name in names[:MAX_NAMED])
    more = f" and {len(names) - MAX_NAMED:,} more" if len(names) > MAX_NAMED else ""
    return f"Warning: the model does not read {counted(len(names), 'tensor')} of {place}: {first}{more}."


def given_options(context: typer.Context) -> list[str]:
    """Return the Python names of the options and arguments on the command line, without those left at a default."""
    return [name for name in context.params if context.get_parameter_source(name).name == "COMMANDLINE"]
