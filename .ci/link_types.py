"""Make `build/types/attnres`, a tree of links in which each folder has its import name, for the type checker.

The folders of the package lie side by side, and setuptools maps them to import names by `package-dir` of
`pyproject.toml`. A type checker reads no such table. The tree is made anew from the table each time.
"""

import shutil
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TREE = ROOT / "build" / "types"

shutil.rmtree(TREE, ignore_errors=True)
packages = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-dir"]
for package, folder in packages.items():
    target = TREE.joinpath(*package.split("."))
    target.mkdir(parents=True)
    for file in (ROOT / folder).glob("*.py"):
        (target / file.name).symlink_to(file)
