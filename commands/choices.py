"""Common parts of the commands: `--debug`, help texts, safe printing.

Every help text imports this file, so it does not import PyTorch.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from attnres.checkpoints.source import ModelSource
from attnres.utils.declared import import_files
from attnres.utils.files import Written, check_replaceable, check_writable
from attnres.utils.wording import counted, did_you_mean, printable

from .guard import show_tracebacks

MAX_NAMED = 10  # the largest number of tensors that a message names

Debug = Annotated[
    bool,
    typer.Option("--debug", help="Show the traceback of an error.", callback=show_tracebacks, expose_value=False),
]


def _import_files(paths: list[Path] | None) -> None:
    """Make the residual connections in files known, before the other options are read."""
    try:
        import_files(paths or ())
    except (FileNotFoundError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error


Imports = Annotated[
    list[Path] | None,
    typer.Option(
        "--import",
        metavar="FILE",
        help="Python file with residual connections of your own; may be repeated.",
        callback=_import_files,
        is_eager=True,
        expose_value=False,
    ),
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


def check_revision(source: ModelSource, option: str = "--revision") -> None:
    """Raise an error if a revision is given for a model that is not on the Hub.

    Args:
        source: The model.
        option: The option that gives the revision, for the message.

    Raises:
        typer.BadParameter: The model is a directory or a named configuration, which has no revisions.
    """
    if source.revision is not None and source.hub_id is None:
        kind = "directory" if source.is_folder else "named configuration"
        raise typer.BadParameter(f"{option} belongs to models on the Hub, and {source.name} is a {kind}. Leave it out.")


def check_out(out: Path, written: Written, overwrite: bool, option: str = "--out") -> None:
    """Raise an error if a directory that a command writes must not be replaced, or cannot be written.

    Args:
        out: The directory.
        written: What the command writes.
        overwrite: Whether the user has given `--overwrite`.
        option: The option that gives the directory, for the message.

    Raises:
        OSError: The directory must not be replaced, or cannot be written.
    """
    check_replaceable(out, written, overwrite)
    check_writable(Path(os.path.abspath(out)).parent, f"{option} {out}")  # a new directory takes its place


def check_apart(folder: Path, target: Path, source: str) -> None:
    """Raise an error if the directory of a source and that of its result lie in each other.

    Args:
        folder: The source's directory.
        target: The result's directory.
        source: The name of the source, for the message.

    Raises:
        ValueError: One is the other, or lies in it.
    """
    for inner, outer in ((folder, target), (target, folder)):
        if inner.resolve().is_relative_to(outer.resolve()):
            raise ValueError(f"{target} and {source} lie in each other. Choose another directory for the result.")


def given_options(context: typer.Context) -> list[str]:
    """Return the Python names of the options and arguments on the command line, without those left at a default."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
