"""What the options of commands share: names to choose from, known before PyTorch is imported; checks; `--debug`."""

from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Annotated

import typer
from rich.markup import escape
from typer.core import TyperCommand

from attnres.commands.connections import CONNECTIONS, flag, owners

from .guard import show_tracebacks

# How a directory shows that `convert` may replace it, as for `attnres.utils.files.atomic_directory`.
WRITTEN_MODEL = {"marker": "config.json", "content": '"model_type"'}
WRITTEN_REPORT = {"marker": "inspection.json", "content": '"written_by": "attnres inspect"'}

Residual = StrEnum("Residual", [(name, name) for name in CONNECTIONS])
DEFAULT_RESIDUAL = next(iter(Residual))

Debug = Annotated[
    bool,
    typer.Option("--debug", help="Show the traceback of an error.", callback=show_tracebacks, expose_value=False),
]


class Command(TyperCommand):
    """A command that tells of a wrong value without what pydantic says first: `Value error, `."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            raise


class Scale(StrEnum):
    """How attention residuals scale what they read."""

    sum = "sum"
    mean = "mean"


class Listed(StrEnum):
    """What `list` lists, in its order: the last two need PyTorch."""

    recipes = "recipes"
    connections = "connections"
    tasks = "tasks"
    configurations = "configurations"
    backbones = "backbones"


def help_of(option: str, text: str) -> str:
    """The help of an option, with the connections that have it."""
    return f"{owners(option)}: {text}"


def shown(text: str) -> str:
    """The text as it is, in one line: neither markup nor control characters, which a name may have, do anything."""
    return escape(printable(text))


def printable(text: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def read_fields(settings: Collection[str]) -> dict[str, object]:
    """Fields of a configuration from `name=value`, with values in YAML.

    Raises:
        typer.BadParameter: one is not of this form, or is given twice.
    """
    from attnres.training.recipe import read_yaml

    fields = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not (name and equals and value.strip()) or name in fields:
            raise typer.BadParameter(f"--set {setting}: give FIELD=VALUE, each field once.")
        try:
            fields[name] = read_yaml(value, setting)
        except ValueError:
            raise typer.BadParameter(f"--set {setting[:100]}: the value is no YAML.") from None
    return fields


def given(context: typer.Context) -> list[str]:
    """The options and arguments that the user has named, by their names in Python."""
    return [name for name in context.params if context.get_parameter_source(name).name == "COMMANDLINE"]


def refuse_options(
    residual: str, options: Collection[str], others: Mapping[str, object], is_named: bool, has_fields: bool
) -> None:
    """Check which options of `convert` are given together.

    Args:
        residual: the connection; `is_named`: by the user.
        options: the arguments of it that are given.
        others: options that do something else than a retrofit, with their values.
        has_fields: fields are set by name.

    Raises:
        typer.BadParameter: some exclude each other, or belong to another connection.
    """
    given = [name for name, value in others.items() if value is not None]
    flags = [*(["--residual"] if is_named else []), *(["--set"] if has_fields else []), *map(flag, options)]
    if len(given) + bool(flags) > 1:
        raise typer.BadParameter(f"{' and '.join([*given, *flags])} exclude each other.")
    for option in options:
        if option not in CONNECTIONS[residual][1]:
            raise typer.BadParameter(f"{flag(option)} belongs to --residual {owners(option)}, not to {residual}.")
    sizes = [flag(option) for option in ("block_size", "num_blocks", "full") if option in options]
    if len(sizes) > 1:
        raise typer.BadParameter(f"{' and '.join(sizes)} exclude each other.")
