"""Imports of the experiments: the package does not import them, and a run needs few packages."""

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("folder", sorted(PROJECT["tool"]["setuptools"]["package-dir"].values()))
def test_no_folder_of_the_package_imports_the_experiments(folder):
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = (
                    [node.module or ""] if isinstance(node, ast.ImportFrom) else [name.name for name in node.names]
                )
                assert "experiments" not in {module.split(".")[0] for module in modules}, path


def test_a_machine_with_prepared_text_needs_no_datasets():
    """The machine of the GPU has no `datasets`, so no module that a run imports at its start may import it."""
    needed, found = {ROOT / "experiments" / "command.py"}, set()
    while needed - found:
        path = (needed - found).pop()
        found.add(path)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:  # at the top of the file only
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] != "datasets", path
                folder = path.parent if node.level else ROOT
                parts = (node.module or "").removeprefix("attnres.").split(".")
                candidates = [folder.joinpath(*parts).with_suffix(".py")]
                candidates += [folder.joinpath(*parts, alias.name).with_suffix(".py") for alias in node.names]
                needed |= {candidate for candidate in candidates if candidate.is_file()}
            elif isinstance(node, ast.Import):
                assert "datasets" not in {alias.name.split(".")[0] for alias in node.names}, path
    assert {"scratch.py", "healing.py", "runs.py", "text.py", "loaders.py"} <= {path.name for path in found}
