"""`attnres list`: print the names that the other commands take."""

import json
from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console
from rich.padding import Padding

from attnres.utils.declared import backbones
from attnres.utils.packaged import configuration_names, configurations, recipe_names, recipe_path

from .choices import Debug, Imports
from .connections import PRESETS, list_connections, list_evidence


class Listed(StrEnum):
    """The kinds of names, in the order of `list`."""

    recipes = "recipes"
    connections = "connections"
    tasks = "tasks"
    configurations = "configurations"
    backbones = "backbones"
    implementations = "implementations"


# The names in `attnres.DEPTH_ATTENTION`, whose import takes seconds; a test compares them.
IMPLEMENTATIONS = ("auto", "eager", "numba", "fla", "triton")

HEADINGS = {
    Listed.configurations: "Configurations, to train from scratch (attnres train pretrain model=NAME), with their "
    "parameters. Activated: those that a token uses, without the embedding and without lm_head, the output projection",
    Listed.recipes: "Recipes (attnres train NAME)",
    Listed.connections: "Residual connections (attnres convert --residual NAME); "
    f"{' and '.join(PRESETS)} are presets of attn_res",
    Listed.tasks: "Benchmarks of the paper (attnres eval --tasks NAME,...)",
    Listed.backbones: "Backbones of the models that attnres convert takes",
    Listed.implementations: "Implementations of depth attention (from_pretrained(depth_attention_implementation=NAME))",
}

NOTES = {
    Listed.connections: (
        "exact: whether a retrofit keeps the model's function. state: in tensors [batch, seq, hidden].",
        "step: time of a training step over the standard model's (Llama, d = 512, a CPU, not compiled).",
        "used by: architectures or recipes. -: none or unknown.",
        "Experiments here at equal tokens: loss minus the standard model's, in nats/token. In brackets: the",
        "95% interval over n seeds, paired. lower, higher: it lies below or above zero. tie: it holds zero.",
    )
}


def list_names(
    kind: Annotated[
        Listed | None, typer.Argument(metavar="KIND", help="List only names of this kind.  [default: all]")
    ] = None,
    imports: Imports = None,
    debug: Debug = False,
) -> None:
    """List the names that you can give to commands. Recipes, configurations and connections are described.

    attnres list
    attnres list recipes
    """
    console = Console(highlight=False)
    for listed in [kind] if kind else Listed:
        # A terminal gets lines that end between words, other programs one line for each heading.
        console.print(HEADINGS[listed], style="bold", soft_wrap=not console.is_terminal, markup=False)
        if listed in TABLES:
            lines = [*(f"  {line}" for line in TABLES[listed]()), *NOTES.get(listed, ())]
            lines += list_evidence() if listed == Listed.connections else []
            console.print(*lines, sep="\n", soft_wrap=True, markup=False)
        elif console.is_terminal:
            console.print(Padding("  ".join(_names(listed)), (0, 0, 1, 2)))
        else:  # one name on each line, for `grep` and other programs
            console.print(*(f"  {name}" for name in _names(listed)), sep="\n", soft_wrap=True)


def _sizes() -> list[str]:
    """Return a line for each configuration: its name and its numbers of parameters."""
    sizes = json.loads((configurations() / "sizes.json").read_text(encoding="utf-8"))
    width = max(map(len, sizes))
    return [
        " ".join([f"{name:{width}}", *(f"{_short(sizes[name][label]):>7} {label}" for label in sizes[name])])
        for name in configuration_names()
    ]


def _recipes() -> list[str]:
    """Return a line for each recipe: its name, and the first line of its file, a comment that says its purpose."""
    names = recipe_names()
    width = max(map(len, names))
    return [f"{name:{width}}  {recipe_path(name).read_text('utf-8').splitlines()[0].lstrip('# ')}" for name in names]


TABLES = {Listed.recipes: _recipes, Listed.connections: list_connections, Listed.configurations: _sizes}


def _short(number: int) -> str:
    """Return a count in millions, billions or trillions, with three digits or more."""
    if number >= 1e12:
        return f"{number / 1e12:.2f}T"
    return f"{number / 1e9:.2f}B" if number >= 1e9 else f"{number / 1e6:.1f}M"


def _names(kind: Listed) -> tuple[str, ...]:
    """Return the names of a kind without a table."""
    if kind == Listed.tasks:
        from attnres.eval.benchmarks import benchmarks

        return tuple(benchmarks())
    return backbones() if kind == Listed.backbones else IMPLEMENTATIONS
