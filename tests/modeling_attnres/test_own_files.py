"""Residual connections in files of a user: how they are found, and how their code travels with saved models."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig

from attnres import register_residual_connection
from attnres.publishing.publication import make_publication
from attnres.residual_attnres import FamilyWarning
from attnres.training.recipe import Recipe, read_recipe, write_recipe
from attnres.utils import declared
from attnres.utils.declared import declared_connections, import_files

# A connection in as few lines as possible.
PLAIN = """from attnres.residual_attnres import ResidualConnection


class Plain(ResidualConnection):
    name = "NAME"
    summary = "the stream again"
    fields = {"NAME_size": 3}
    retrofit = {}

    def mix(self, state, coefficients):
        return state, state

    def write(self, state, output):
        return state + output
"""
SMALL = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
# Reads the names in a process of its own, since a registered connection stays registered.
READ = "import attnres, sys; print([n for n in attnres.CONNECTIONS if n.startswith('plain')])"


def write(folder: Path, name: str, before: str = "") -> Path:
    """Write the file of a connection, and return its path."""
    path = folder / f"{name}.py"
    path.write_text(before + PLAIN.replace("NAME", name), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def restored(monkeypatch) -> None:
    """Forget the files that a test imports, but not the registered classes, whose names differ in each test."""
    monkeypatch.setattr(declared, "_files", {})
    monkeypatch.setattr(declared, "_registered", {})


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def saved(path: Path, folder: Path, warning: str | None = None) -> set[str]:
    """Import a file, save a model with its connection, and return the names of the saved Python files."""
    code = f"""
import sys, warnings
import attnres
from attnres.utils.declared import import_files
from transformers import AutoConfig, AutoModelForCausalLM
import_files([{str(path)!r}])
config = AutoConfig.for_model("attnres_llama", residual_connection={path.stem!r}, **{SMALL!r})
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    AutoModelForCausalLM.from_config(config).save_pretrained({str(folder)!r})
print([str(w.message) for w in caught if w.category.__name__ == "FamilyWarning"])
"""
    printed = run(code)
    assert (printed.strip() == "[]") if warning is None else (warning in printed), printed
    return {file.name for file in folder.glob("*.py")}


def test_the_names_of_an_imported_file_are_known_without_its_import(tmp_path):
    path = write(tmp_path, "plain_text")
    code = f"""
import sys
import attnres_cli
attnres_cli.is_running = True
from attnres.utils.declared import declared_connections, import_files
import_files([{str(path)!r}])
of = declared_connections()["plain_text"]
print(of.summary, of.fields[0], of.exact, "torch" in sys.modules)
"""
    assert run(code) == "the stream again plain_text_size yes False\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "declares no class that derives from ResidualConnection"),
        ("class A(ResidualConnection:", "is no Python: "),
    ],
)
def test_a_file_without_a_connection_is_refused(tmp_path, text, message):
    (tmp_path / "other.py").write_text(text)
    for _ in range(2):  # a refused file is not remembered
        with pytest.raises(ValueError, match=message):
            import_files([tmp_path / "other.py"])
    with pytest.raises(FileNotFoundError, match=r"there is no file .*missing\.py"):
        import_files([tmp_path / "missing.py"])


def test_a_file_whose_name_no_import_can_have_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"plain-dash\.py cannot be imported by its name"):
        import_files([write(tmp_path, "plain_dash").rename(tmp_path / "plain-dash.py")])


def save_config(name: str, folder: Path) -> set[str]:
    """Save a configuration with a connection, and return the names of the Python files."""
    AutoConfig.for_model("attnres_llama", residual_connection=name, **SMALL).save_pretrained(folder)
    return {file.name for file in folder.glob("*.py")}


@pytest.mark.parametrize(
    ("name", "line"), [("plain_dot", "from . import beside"), ("plain_deep", "from .below.beside import X")]
)
def test_an_import_that_is_not_followed_is_named(tmp_path, name, line):
    (tmp_path / "below").mkdir()
    for folder in (tmp_path, tmp_path / "below"):
        (folder / "beside.py").write_text("X = 1\n")
    import_files([write(tmp_path, name, f"{line}\n")])
    with pytest.warns(FamilyWarning, match=f"has the import `{line}`, which is not of a file that is saved"):
        assert f"{name}.py" not in save_config(name, tmp_path / "model")


def test_the_connection_of_a_package_travels_as_the_file_that_its_import_names(tmp_path, monkeypatch):
    (tmp_path / "plain_package").mkdir()
    (tmp_path / "plain_package/beside.py").write_text("X = 1\n")
    path = write(tmp_path / "plain_package", "plain_package", "from .beside import X\n\n_ = X\n")
    path.rename(path.with_name("__init__.py"))
    monkeypatch.syspath_prepend(tmp_path)
    register_residual_connection(importlib.import_module("plain_package").Plain)
    names = save_config("plain_package", tmp_path / "model")
    assert {"plain_package.py", "beside.py"} <= names and "__init__.py" not in names


def test_a_recipe_imports_the_file_of_its_connection(tmp_path):
    path = write(tmp_path, "plain_recipe")
    (tmp_path / "mine.yaml").write_text(f"model: m\ntrain: a.txt\nout: o\nsteps: 1\nimport: {path}\n")
    recipe = read_recipe(tmp_path / "mine.yaml", ["retrofit={residual: plain_recipe, plain_recipe_size: 4}"])
    assert recipe.imports == (str(path),) and "plain_recipe" in declared_connections()
    (tmp_path / "again.yaml").write_text(write_recipe(recipe))
    assert read_recipe(tmp_path / "again.yaml") == recipe
    with pytest.raises(FileNotFoundError, match="there is no file"):
        Recipe("m", ("a.txt",), "o", steps=1, imports=("no.py",))


@pytest.mark.slow
def test_a_file_travels_with_those_that_it_imports(tmp_path):
    (tmp_path / "helpers.py").write_text("X = 1\n")
    before = "from attnres.streams_attnres import wide\n\nfrom .helpers import X\n\n_ = X, wide\n"
    names = saved(write(tmp_path, "plain_with", before), tmp_path / "model")
    assert {"plain_with.py", "helpers.py", "streams_attnres.py", "connections_attnres.py"} <= names
    text = (tmp_path / "model/plain_with.py").read_text()
    assert "from .residual_attnres import" in text and "attnres." not in text.replace("_attnres", "")


@pytest.mark.slow
def test_code_that_cannot_travel_is_named_and_the_model_is_not_published(tmp_path):
    path = write(tmp_path, "plain_apart", "from attnres import CONNECTIONS\n")
    names = saved(path, tmp_path / "model", "has the import `from attnres import CONNECTIONS`, which is not of a file")
    assert "plain_apart.py" not in names
    import_files([path])
    AutoConfig.from_pretrained(tmp_path / "model")
    with pytest.raises((OSError, ValueError), match=r"plain_apart\.py is not there"):
        make_publication(tmp_path / "model")


@pytest.mark.slow
def test_an_entry_point_of_an_installed_package_is_found(tmp_path):
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package/__init__.py").write_text("")
    write(tmp_path / "my_package", "plain_entry")
    (tmp_path / "my_package-1.0.dist-info").mkdir()
    (tmp_path / "my_package-1.0.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n"
    )
    (tmp_path / "my_package/broken.py").write_text("class A(ResidualConnection:")
    # Modules that are not there or are no Python do not keep `attnres` from being imported.
    modules = ("my_package.plain_entry", "my_package.absent", "my_package.broken", "no_such_package.module")
    points = "[attnres.connections]\n" + "".join(f"{i} = {module}\n" for i, module in enumerate(modules))
    (tmp_path / "my_package-1.0.dist-info/entry_points.txt").write_text(points)
    assert run(READ, PYTHONPATH=str(tmp_path)) == "['plain_entry']\n"
