"""Tests that one setting, `[project.urls]`, is the address of everything that shows one."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from email import message_from_string
from pathlib import Path

import pytest
import yaml

from .reading import ROOT, links_of

REPOSITORY, SITE = "https://github.com/lab/attnres", "https://lab.example/attnres"
RELATIVE = r'\]\((?!https:)[^)]+\)|src="(?!https:)[^"]+"'
# What a process sees of the site's configuration and of the package's metadata.
CONFIGURATION = """
from mkdocs.config import load_config
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page
config = load_config("mkdocs.yml")
config.plugins.run_event("config", config)
print(config.repo_url, config.repo_name, config.site_url)
files = config.plugins.run_event("files", Files([]), config=config)
home = Page(None, files.get_file_from_path("index.md"), config)
print(config.plugins.run_event("page_markdown", home.file.content_string, page=home, config=config, files=files))
"""
METADATA = """
from pathlib import Path
from setuptools import build_meta
folder = build_meta.prepare_metadata_for_build_wheel("built")
print("METADATA", Path("built", folder, "METADATA").read_text(), sep="\\n")
"""


def shown(root: Path) -> dict[str, str]:
    """Return the files that show an address by their names."""
    paths = [root / "README.md", root / "CITATION.cff", *root.glob("notebooks/*.ipynb")]
    return {path.name: path.read_text(encoding="utf-8") for path in paths}


def python(root: Path, *arguments: str) -> str:
    """Run Python in a tree, and return what it printed."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=root, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def metadata_of(root: Path) -> tuple[list[str], str]:
    """Return the URLs and the description of the package."""
    (root / "built").mkdir(exist_ok=True)
    message = message_from_string(python(root, "-c", METADATA).partition("METADATA\n")[2])
    return message.get_all("Project-URL", []), message.get_payload()


@pytest.fixture
def tree(tmp_path) -> Path:
    """Return a copy of the tree in which no address is set."""
    ignored = shutil.ignore_patterns(
        ".*", "__pycache__", "build", "site", "*.egg-info", "tests", "results", "attnres-demo"
    )
    root = tmp_path / "tree"
    shutil.copytree(ROOT, root, ignore=ignored)
    project = (root / "pyproject.toml").read_text(encoding="utf-8")
    (root / "pyproject.toml").write_text(re.sub(r"(?s)\[project\.urls\].*?\n(?=\[)", "", project))
    python(root, "docs/address.py")
    return root


@pytest.mark.slow
def test_one_setting_is_the_address_of_everything_and_without_it_nothing_has_one(tree):
    before = shown(tree)
    assert not [name for name, text in before.items() if re.search("git clone h|Colab\\]|url = |repository-code", text)]
    urls, description = metadata_of(tree)
    assert urls == [] and re.findall(RELATIVE, description) == []

    project = (tree / "pyproject.toml").read_text(encoding="utf-8")
    setting = f'[project.urls]\nRepository = "{REPOSITORY}/"\nDocumentation = "{SITE}"\n\n'
    (tree / "pyproject.toml").write_text(project.replace("[project.scripts]", f"{setting}[project.scripts]"))
    python(tree, "docs/address.py")
    after = shown(tree)
    assert f"[Documentation]({SITE})" in after["README.md"] and f"`git clone {REPOSITORY}`" in after["README.md"]
    assert f"  url = {{{REPOSITORY}}},\n" in after["README.md"]
    citation = yaml.safe_load(after["CITATION.cff"])
    assert (citation["repository-code"], citation["url"]) == (REPOSITORY, SITE)
    for path in tree.glob("notebooks/*.ipynb"):
        cells = ["".join(cell["source"]) for cell in json.loads(after[path.name])["cells"]]
        assert f"](https://colab.research.google.com/github/lab/attnres/blob/main/notebooks/{path.name})" in cells[0]
        assert f"!git clone --quiet {REPOSITORY} {{CHECKOUT}}" in next(cell for cell in cells if "import sys" in cell)
    urls, description = metadata_of(tree)
    assert urls == [f"Repository, {REPOSITORY}/", f"Documentation, {SITE}"]
    assert f"]({REPOSITORY}/blob/main/docs/install.md)" in description
    images = [link for link in links_of(ROOT / "README.md") if link.endswith(".png")]
    assert images and all(f'src="{REPOSITORY}/raw/main/{image}"' in description for image in images)
    assert re.findall(RELATIVE, description) == []
    configuration, home = python(tree, "-c", CONFIGURATION).split("\n", 1)
    assert configuration.split() == [REPOSITORY, "lab/attnres", f"{SITE}/"]
    assert f"[Contributing]({REPOSITORY}/blob/main/CONTRIBUTING.md)" in home  # a file that is not on the site

    # Writing the same addresses again changes nothing, and without them every file is as before.
    python(tree, "docs/address.py")
    assert shown(tree) == after
    (tree / "pyproject.toml").write_text(project)
    python(tree, "docs/address.py")
    assert shown(tree) == before


def test_the_files_show_the_addresses_that_are_set():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    repository, site = (project.get("urls", {}).get(name, "").rstrip("/") for name in ("Repository", "Documentation"))
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation.get("repository-code", ""), citation.get("url", "")) == (repository, site), "run `make address`"
    readme = (ROOT / "README.md").read_text()
    assert ("git clone http" in readme) == bool(repository), "run `make address`"
