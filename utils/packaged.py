"""The named configurations and recipes that come with the package, found without importing what reads them."""

from importlib.util import find_spec
from pathlib import Path


def configurations() -> Path:
    """The folder of `attnres.configuration`; a package's data is not found without importing it otherwise."""
    return Path(find_spec("attnres.configuration").submodule_search_locations[0])


def configuration_names() -> tuple[str, ...]:
    """The named configurations, in alphabetical order."""
    return tuple(sorted(path.parent.name for path in configurations().glob("*/config.json")))


def recipe_path(name: str) -> Path:
    """Where the recipe of that name is, if there is one."""
    return configurations() / "recipes" / f"{name}.yaml"


def recipe_names() -> tuple[str, ...]:
    """The recipes, in alphabetical order."""
    return tuple(sorted(path.stem for path in recipe_path("").parent.glob("*.yaml")))


__all__ = ["configuration_names", "configurations", "recipe_names", "recipe_path"]
