"""No connection is known by its name outside the models, and no two public classes of the package share a name."""

import ast
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from attnres import CONNECTIONS

ROOT = Path(__file__).parents[1]
# All code of the package but the models and what computes their depth attention, and the benchmarks.
FOLDERS = (
    "analysis",
    "benchmarks",
    "checkpoints",
    "commands",
    "configuration",
    "conversion",
    "eval",
    "planning",
    "publishing",
    "training",
)
FILES = sorted(path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
# "standard" is what a retrofit begins from, and what all others are compared with.
NAMES = set(CONNECTIONS) - {"standard"}
FIELDS = {field for connection in CONNECTIONS.values() for field in connection.fields}
ALLOWED = {
    # Not the connection: a key of task files, for the number that the paper reports beside its baseline's.
    *(("eval/report.py", "attn_res"), ("eval/rows.py", "attn_res")),
    # Kimi K3 counts the layers of a block, and Kimi Linear, which it is compared with, the sublayers.
    ("benchmarks/kimi_k3.py", "attn_res_block_size"),
    ("benchmarks/kimi_k3_packed.py", "attn_res_block_size"),
}


def said(source: str) -> set[str]:
    """The names of connections and of their fields that code says: as a whole string, a keyword or an attribute.

    Docstrings may explain by them, and names of functions and variables may contain them.
    """
    words = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words.add(node.value)
        elif isinstance(node, ast.Attribute):
            words.add(node.attr)
        elif isinstance(node, ast.keyword):
            words.add(node.arg)
    return words & (NAMES | FIELDS)


@pytest.mark.parametrize(
    "source",
    ["x == 'attn_res'", "c.attn_res_block_size", "load(attn_res_scale='sum')", "{'identity_hc': 1}", "c.attn_res"],
)
def test_what_says_a_name_is_seen(source):
    assert len(said(source)) == 1
    assert said(f"'''Of {source}.'''") == said("def retrofit_attn_res(): return flash_attn_res") == set()


def test_nothing_outside_the_models_says_the_name_of_a_connection_or_of_a_field_of_one():
    assert {path.parts[0] for path in FILES} == set(FOLDERS)
    found = {(path.as_posix(), name) for path in FILES for name in said((ROOT / path).read_text(encoding="utf-8"))}
    assert found - ALLOWED == set()
    assert found >= ALLOWED, "an exception that is no longer needed"


@pytest.mark.parametrize("page", ["docs/reference/models.md", "docs/guides/inspect.md", "modeling_attnres/README.md"])
def test_pages_that_are_no_guide_to_connections_list_none(page):
    """A new connection is one file, so such a list would lack it. `make tables` makes those of the other pages."""
    words = {*re.findall(r"[a-z_]+", (ROOT / page).read_text(encoding="utf-8"))}
    assert {word for word in words if word.removesuffix("_attnres") in NAMES} <= {"attn_res_attnres"}


def test_no_two_public_classes_of_the_package_share_a_name():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folders = project["tool"]["setuptools"]["package-dir"].values()
    trees = [ast.parse(path.read_text(encoding="utf-8")) for folder in folders for path in (ROOT / folder).glob("*.py")]
    names = Counter(node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    assert len(names) > 100
    shared = {name for name, count in names.items() if count > 1 and not name.startswith("_")}
    assert shared == set()
