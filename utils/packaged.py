"""Find the named configurations and recipes without importing `attnres.configuration`, which needs PyTorch."""

from importlib.util import find_spec
from pathlib import Path


def configurations() -> Path:
    """Return the folder of `attnres.configuration`, without importing the package as `importlib.resources` would."""
    return Path(find_spec("attnres.configuration").submodule_search_locations[0])


def configuration_names() -> tuple[str, ...]:
    """Return the names of the configurations, in alphabetical order."""
    return tuple(sorted(path.parent.name for path in configurations().glob("*/config.json")))


def recipe_path(name: str) -> Path:
    """Return the path of a recipe by its name. The file may not exist."""
    return configurations() / "recipes" / f"{name}.yaml"


def recipe_names() -> tuple[str, ...]:
    """Return the names of the recipes, in alphabetical order."""
    return tuple(sorted(path.stem for path in recipe_path("").parent.glob("*.yaml")))


__all__ = ["configuration_names", "configurations", "recipe_names", "recipe_path"]
