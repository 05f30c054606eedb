"""What options choose from by name, known before PyTorch is imported; tests hold it against the registries."""

from collections.abc import Collection, Mapping
from enum import StrEnum

import typer

# How a directory shows that `convert` may replace it, as for `attnres.files.atomic_directory`.
WRITTEN_MODEL = {"marker": "config.json", "content": '"model_type"'}


class Residual(StrEnum):
    """Residual connections that `convert` puts in: the keys of `attnres.CONNECTIONS`."""

    attn_res = "attn_res"
    standard = "standard"
    denseformer = "denseformer"
    identity_hc = "identity_hc"


# What each is, and which options of `convert` it has.
CONNECTIONS: dict[Residual, tuple[str, tuple[str, ...]]] = {
    Residual.attn_res: ("attention residuals, Full or in blocks", ("block_size", "scale", "num_blocks", "full")),
    Residual.standard: ("the residual stream", ()),
    Residual.denseformer: ("DenseFormer's averages over depth", ()),
    Residual.identity_hc: ("Identity Hyper-Connections", ("streams",)),
}


class Scale(StrEnum):
    """How attention residuals scale what they read."""

    sum = "sum"
    mean = "mean"


class Listed(StrEnum):
    """What `list` lists."""

    configurations = "configurations"
    recipes = "recipes"
    connections = "connections"
    tasks = "tasks"
    backbones = "backbones"


def flag(option: str) -> str:
    """The option of the command line for an argument of a function: `--num-blocks`."""
    return f"--{option.replace('_', '-')}"


def describe_connections() -> str:
    """Each connection with its meaning and its options, for a help text."""
    return "; ".join(
        f"{name} ({meaning}; {', '.join(map(flag, options)) or 'no options'})"
        for name, (meaning, options) in CONNECTIONS.items()
    )


def refuse_options(residual: Residual, options: Collection[str], others: Mapping[str, object], is_named: bool) -> None:
    """Check which options of `convert` are given together.

    Args:
        residual: the connection; `is_named`: by the user.
        options: the arguments of it that are given.
        others: options that do something else than a retrofit, with their values.

    Raises:
        typer.BadParameter: some exclude each other, or belong to another connection.
    """
    given = [name for name, value in others.items() if value is not None]
    flags = [*(["--residual"] if is_named else []), *map(flag, options)]
    if len(given) + bool(flags) > 1:
        raise typer.BadParameter(f"{' and '.join([*given, *flags])} exclude each other.")
    for option in options:
        if option not in CONNECTIONS[residual][1]:
            owner = next(name for name, (_, its) in CONNECTIONS.items() if option in its)
            raise typer.BadParameter(f"{flag(option)} belongs to --residual {owner}, not to {residual}.")
    sizes = [flag(option) for option in ("block_size", "num_blocks", "full") if option in options]
    if len(sizes) > 1:
        raise typer.BadParameter(f"{' and '.join(sizes)} exclude each other.")
