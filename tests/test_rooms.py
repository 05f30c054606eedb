"""Imports point one way: between the rooms of the package, and between the files of one room."""

import ast
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
# Where each package lies in the tree: {"attnres.conversion": "conversion", ...}
PACKAGE_DIR = PROJECT["tool"]["setuptools"]["package-dir"]
# Room -> rooms that it may import.
ALLOWED = {
    "attnres": {"accelerated", "utils"},  # only where it is installed: `test_travelled_files.py`
    "accelerated": set(),
    "utils": set(),
    "configuration": {"attnres", "utils"},
    "checkpoints": {"attnres", "configuration", "utils"},
    "conversion": {"attnres", "checkpoints", "configuration", "utils"},
    "publishing": {"attnres", "checkpoints", "configuration", "conversion", "utils"},
    "planning": {"attnres", "checkpoints", "configuration", "conversion", "utils"},
    "analysis": {"attnres", "checkpoints", "configuration", "conversion", "utils"},
    "eval": {"attnres", "checkpoints", "configuration", "conversion", "utils"},
    "training": {"analysis", "attnres", "checkpoints", "configuration", "conversion", "utils"},
    "commands": {
        "analysis",
        "attnres",
        "checkpoints",
        "configuration",
        "conversion",
        "eval",
        "planning",
        "publishing",
        "training",
        "utils",
    },
}
EXCEPTIONS = {
    ("attnres.__main__", "attnres.commands.main"),  # `python -m attnres` starts the command line
    # A run writes the card of the model that it saves, in the same folder and before the folder gets its name.
    ("attnres.training.report", "attnres.publishing.cards"),
    ("attnres.training.report", "attnres.publishing.markdown"),
}


def modules() -> dict[str, Path]:
    """Return the files of the package by import name."""
    return {
        package if path.stem == "__init__" else f"{package}.{path.stem}": path
        for package, folder in PACKAGE_DIR.items()
        for path in (ROOT / folder).glob("*.py")
    }


def imports(name: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Yield the modules of the package that a file imports, also those inside functions."""
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*parents, *filter(None, [node.module])])
            for alias in node.names:
                full = f"{module}.{alias.name}"
                imported = full if full in known else module
                if imported in known and imported != name:
                    yield imported


def room(name: str) -> str:
    """Return the room of a module; the model room is called `attnres`."""
    second = name.split(".")[1] if "." in name else ""
    return second if f"attnres.{second}" in PACKAGE_DIR else "attnres"


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """Return for each module the modules that it imports."""
    known = modules()
    return {name: set(imports(name, path, known)) for name, path in known.items()}


def test_the_reader_of_imports_sees_relative_deferred_and_absolute_ones(tmp_path):
    path = tmp_path / "b.py"
    path.write_text("import attnres.z\ndef f():\n    from . import a\n    from .a import name\n    from ..y import x\n")
    known = dict.fromkeys(["attnres.z", "attnres.r.a", "attnres.y"], path)
    assert [*imports("attnres.r.b", path, known)] == ["attnres.z", "attnres.r.a", "attnres.r.a", "attnres.y"]


def test_each_room_imports_only_the_rooms_below_it(graph):
    assert {room(name) for name in graph} == set(ALLOWED)
    edges = {(name, other) for name, others in graph.items() for other in others if room(name) != room(other)}
    assert [edge for edge in sorted(edges - EXCEPTIONS) if room(edge[1]) not in ALLOWED[room(edge[0])]] == []


def test_no_files_import_each_other_in_a_circle(graph):
    try:
        [*TopologicalSorter(graph).static_order()]
    except CycleError as error:
        pytest.fail(f"circle: {' <- '.join(error.args[1])}")
