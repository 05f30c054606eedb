"""Loading, converting and retrofitting need no extra; another command names the one that it needs."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from attnres.commands import guard
from attnres.utils import wording

from .checkpoints import QUERY, standard_model, tensors_of

EXTRAS = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
]
# Runs the command line where the modules of the extras cannot be found, as if they were not installed. `sklearn` comes
# with lm-eval and imports scipy, and older releases of `transformers` import it where they find it.
SCRIPT = """
import sys
from importlib.machinery import PathFinder

class WithoutExtras(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        extras = ("bokeh", "datasets", "lm_eval", "matplotlib", "numba", "peft", "scipy", "sklearn")
        return None if name.partition(".")[0] in extras else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutExtras
import attnres_cli
attnres_cli.main()
"""


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    """Run `attnres ARGUMENTS` without the extras."""
    command = [sys.executable, "-c", SCRIPT, *arguments]
    return subprocess.run(command, cwd=cwd, env=os.environ, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_convert_works_and_verifies_without_the_extras(tmp_path):
    standard_model().save_pretrained(tmp_path / "source")
    done = run("convert", "source", "result", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Verified: " in done.stdout
    assert QUERY in tensors_of(tmp_path / "result")


@pytest.fixture
def metadata_of_the_checkout(monkeypatch):
    """Let the metadata be those that an installation of this checkout would have."""
    lines = [f'{package}; extra == "{extra}"' for extra, packages in EXTRAS.items() for package in packages]
    monkeypatch.setattr(wording, "requires", lambda name: lines)
    monkeypatch.setattr(wording, "metadata", lambda name: type("Metadata", (), {"get_all": lambda *_: list(EXTRAS)})())


@pytest.mark.parametrize(
    "module, extra", [("matplotlib.figure", "analysis"), ("datasets", "eval"), ("peft", "train"), ("yaml", "eval")]
)
def test_the_error_of_a_missing_package_names_its_extra(module, extra, metadata_of_the_checkout):
    line = guard._describe_error(ModuleNotFoundError(f"No module named {module!r}", name=module))
    assert line.startswith(f"attnres: No module named {module!r}. It comes with `attnres[{extra}]`: pip install '")


def test_the_error_of_a_package_in_no_extra_is_unchanged(metadata_of_the_checkout):
    error = ModuleNotFoundError("No module named 'nowhere'", name="nowhere")
    assert guard._describe_error(error) == "attnres: No module named 'nowhere'"
