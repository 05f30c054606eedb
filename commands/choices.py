"""Common parts of the commands: options, checks of arguments, safe printing.

Every help text imports this file, so it does not import PyTorch.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from attnres.checkpoints.source import ModelSource
from attnres.utils.declared import import_files
from attnres.utils.files import Written, check_replaceable, check_writable
from attnres.utils.wording import counted, printable

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


def given_options(context: typer.Context) -> list[str]:
    """Return the Python names of the options and arguments on the command line, without those left at a default."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
