"""Who may import whom: experiments use the package, no room of it uses them; `conversion` does without `training`."""

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FORBIDDEN = {"conversion": {"experiments", "attnres.training"}}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
ROOMS = sorted(PROJECT["tool"]["setuptools"]["package-dir"].values())


def imported(path: Path) -> set[str]:
    """All modules that a file imports by their full names, wherever in it."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return modules


@pytest.mark.parametrize("room", ROOMS)
def test_no_room_imports_what_is_above_it(room):
    forbidden = FORBIDDEN.get(room, {"experiments"})
    for path in (ROOT / room).rglob("*.py"):
        found = {name for name in imported(path) if any(f"{name}.".startswith(f"{above}.") for above in forbidden)}
        assert not found, f"{path.relative_to(ROOT)} imports {found}"


def test_a_machine_with_prepared_text_needs_no_data_sets():
    """What a run imports when it starts: the GPU's machine has no `datasets`."""
    needed, found = {ROOT / "experiments" / "command.py"}, set()
    while needed - found:
        path = (needed - found).pop()
        found.add(path)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:  # at the top of the file only
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
