"""`attnres list`: the names that the other commands take."""

from rich.console import Console
from rich.padding import Padding

from attnres.connection_help import CONNECTIONS
from attnres.packaged import configuration_names, recipe_names

from .choices import Listed
from .guard import loading

HEADINGS = {
    Listed.configurations: "Configurations, to train from scratch (attnres train pretrain model=NAME)",
    Listed.recipes: "Recipes (attnres train NAME)",
    Listed.connections: "Residual connections (attnres convert --residual NAME)",
    Listed.tasks: "Benchmarks of the paper (attnres eval --tasks NAME,...)",
    Listed.backbones: "Backbones, whose models attnres convert takes",
}


def print_names(kind: Listed | None) -> None:
    """Print the names of one kind, or of all; those that need PyTorch to be known come last."""
    console = Console(highlight=False)
    for listed in [kind] if kind else Listed:
        console.print(HEADINGS[listed], style="bold", soft_wrap=True)
        if console.is_terminal:
            console.print(Padding("  ".join(_names(listed)), (0, 0, 1, 2)))
        else:  # for `grep` and the like
            console.print(*(f"  {name}" for name in _names(listed)), sep="\n", soft_wrap=True)


def _names(kind: Listed) -> tuple[str, ...]:
    if kind == Listed.configurations:
        return configuration_names()
    if kind == Listed.recipes:
        return recipe_names()
    if kind == Listed.connections:
        return tuple(CONNECTIONS)
    if kind == Listed.tasks:
        from attnres.eval.benchmarks import benchmarks

        return tuple(benchmarks())
    with loading():
        from attnres import BACKBONES
    return tuple(BACKBONES)
