"""Find the named configurations and recipes without importing `attnres.configuration`, which needs PyTorch."""

from importlib.util import find_spec
from pathlib import Path


def package_folder(package: str) -> Path:
    """Return the folder of a package, without importing the package as `importlib.resources` would.

    Raises:
        ModuleNotFoundError: There is no such package.
    """
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"No package named {package!r}", name=package)
    return Path(spec.submodule_search_locations[0])


def configurations() -> Path:
    """Return the folder of the named configurations and recipes."""
    return package_folder("attnres.configuration")


def configuration_names() -> tuple[str, ...]:
    """Return the names of the configurations, in alphabetical order."""
    return tuple(sorted(path.parent.name for path in configurations().glob("*/config.json")))


def recipe_path(name: str) -> Path:
    """Return the path of a recipe by its name. The file may not exist."""
    return configurations() / "recipes" / f"{name}.yaml"


def recipe_names() -> tuple[str, ...]:
    """Return the names of the recipes, in alphabetical order."""
    return tuple(sorted(path.stem for path in recipe_path("").parent.glob("*.yaml")))


__all__ = ["configuration_names", "configurations", "package_folder", "recipe_names", "recipe_path"]
