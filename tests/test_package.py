"""The package as it is installed: one import name, all of its data, a light import, model files that can travel."""

import importlib.metadata
import json
import os
import site
import subprocess
import sys
import tomllib
from pathlib import Path, PurePosixPath
from zipfile import ZipFile

import pytest

import attnres

from .imports import imports_of

ROOT = Path(__file__).parents[1]
MODEL_FOLDER = ROOT / "modeling_attnres"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
# Where each package lies in the tree: {"attnres.conversion": "conversion", ...}
PACKAGE_DIR = PROJECT["tool"]["setuptools"]["package-dir"]


def python(code: str, cwd: Path, *options: str) -> dict:
    """Run code that sets `seen` in a Python process of its own, in the folder `cwd`; return `seen`."""
    code += "\nimport json\nprint(json.dumps(seen))"
    done = subprocess.run(
        [sys.executable, *options, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


# What `import attnres` does in a process that has imported the model of `transformers` before. Both imports are timed
# there, on the processor: how busy the machine is slows them down alike. A full collection of garbage walks through all
# that both have allocated and takes as long as half of an import of ours. It would count for the one that meets it.
IMPORT = f"""
import gc, sys, time, importlib.util
gc.disable()
began = time.process_time()
from transformers import KimiLinearForCausalLM
before, theirs = set(sys.modules), time.process_time()
import attnres
share = (time.process_time() - theirs) / (theirs - began)
specs = [importlib.util.find_spec(name) for name in {[*PACKAGE_DIR.values(), "eval", "benchmarks", "notebooks"]}]
origins = [str(spec.origin or list(spec.submodule_search_locations)) for spec in specs if spec]
seen = dict(modules=sorted(sys.modules), new=sorted(set(sys.modules) - before), origins=origins, share=share)
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory) -> dict:
    """What one process saw of the import, in a folder that is not the project's."""
    return python(IMPORT, tmp_path_factory.mktemp("elsewhere"))


@pytest.mark.slow
def test_import_costs_little_processor_time_beside_that_of_kimi_linear(imported, tmp_path):
    assert "attnres.modeling_attnres" in imported["new"]
    # The first import after a change compiles the sources: then another process tells.
    assert imported["share"] < 0.1 or min(python(IMPORT, tmp_path)["share"] for _ in range(2)) < 0.1


@pytest.mark.parametrize("heavy", ["lm_eval", "peft", "matplotlib", "datasets", "typer", "rich", "fla", "triton"])
def test_import_pulls_in_nothing_heavy_of_its_own(imported, heavy):
    assert heavy not in {name.split(".")[0] for name in imported["new"]}
    if heavy in ("lm_eval", "peft", "matplotlib"):
        assert heavy not in imported["modules"]


def test_import_reads_no_other_room_of_the_package(imported):
    rooms = {name for name in PACKAGE_DIR if name.count(".") == 1} - {"attnres.accelerated", "attnres.utils"}
    assert not rooms & set(imported["new"])


def test_no_folder_of_the_project_is_a_top_level_import_name(imported):
    assert not [origin for origin in imported["origins"] if str(ROOT) in origin]


def test_the_version_is_the_same_everywhere():
    assert importlib.metadata.version("attnres") == attnres.__version__


def test_every_exported_name_exists():
    assert [name for name in attnres.__all__ if not hasattr(attnres, name)] == []


def test_the_extras_are_those_of_the_project():
    assert set(PROJECT["project"]["optional-dependencies"]) == {
        *("analysis", "cpu", "gpu", "eval", "train", "docs", "notebooks", "dev")
    }


def model_files() -> set[str]:
    """`modeling_attnres.py` and every file that it needs, by following the relative imports."""
    files, found = set(), {"modeling_attnres"}
    while found:
        files |= found
        found = {
            module.lstrip(".")
            for name in found
            for module in imports_of((MODEL_FOLDER / f"{name}.py").read_text(encoding="utf-8"))
            if module.startswith(".")
        } - files
    return {f"{name}.py" for name in files}


def test_the_files_saved_beside_the_weights_are_the_model_files(tiny_model, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    expected = model_files() | {"attn_res_attnres.py"}  # the registry of the package imports by other means
    assert {path.name for path in tmp_path.glob("*.py")} == expected
    for name in expected - {"connections_attnres.py"}:
        assert (tmp_path / name).read_text() == (MODEL_FOLDER / name).read_text(), name


def test_dependencies_never_point_back_to_the_rooms_above():
    for path in MODEL_FOLDER.glob("*.py"):
        if path.name != "__main__.py":
            imported = imports_of(path.read_text(encoding="utf-8"))
            above = {module for module in imported if module.split(".")[0] == "attnres"}
            allowed = {"attnres.accelerated"}  # guarded; see `test_travelled_files.py`
            if path.name == "connections_attnres.py":  # it is not saved, and its imports must not look as if
                allowed = {module for module in above if module.endswith("_attnres")} | {"attnres.utils.declared"}
            assert above <= allowed, path.name


@pytest.mark.slow
def test_the_wheel_installs_one_package_and_the_entry_of_its_command(wheel):
    names = {PurePosixPath(name).parts[0] for name in ZipFile(wheel).namelist()}
    assert names == {"attnres", "attnres_cli.py", f"attnres-{attnres.__version__}.dist-info"}


def test_every_file_of_the_package_is_in_the_wheel(wheel):
    expected = {
        PurePosixPath(*package.split("."), *path.relative_to(ROOT / folder).parts).as_posix()
        for package, folder in PACKAGE_DIR.items()
        for path in (ROOT / folder).rglob("*")
        # Stored measurements, in `results`, stay in the project.
        if path.suffix in {".py", ".cpp", ".json", ".yaml", ".html", ".css", ".js", ".jinja"}
        and "results" not in path.parts
    }
    assert "attnres/configuration/attnres-tiny/config.json" in expected
    expected.add("attnres_cli.py")
    assert {name for name in ZipFile(wheel).namelist() if not name.startswith("attnres-")} == expected


def test_every_room_with_code_is_a_package_of_the_wheel():
    rooms = [path.parent.relative_to(ROOT) for path in ROOT.glob("[a-z]*/**/__init__.py")]
    rooms = {room.as_posix() for room in rooms if room.parts[0] not in ("build", "tests")}
    assert rooms == set(PACKAGE_DIR.values())
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == set(PACKAGE_DIR)


@pytest.mark.slow
def test_the_wheel_works_when_installed(wheel, tmp_path):
    target = tmp_path / "installed"
    options = ["--no-deps", "--no-index", "--quiet", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "--target", target, wheel], check=True)

    # No .pth files (-S), so that the editable install is out of sight, and no other path than these.
    paths = [str(target), *site.getsitepackages()]
    seen = python(
        f"""
import sys
sys.path += {paths}
import attnres, torch
from attnres.configuration import load
model = attnres.AttnResForCausalLM(load("attnres-tiny")).eval()
model.save_pretrained("saved")
loaded = attnres.AttnResForCausalLM.from_pretrained("saved")
ids = torch.arange(9)[None]
same = torch.equal(model(ids).logits, loaded(ids).logits)
seen = dict(file=attnres.__file__, same=same, modules=sorted(sys.modules))
""",
        tmp_path,
        "-I",
        "-S",
    )
    assert seen["file"] == str(target / "attnres" / "__init__.py")
    assert seen["same"]
    # The registry of a save names the connection that the model has.
    assert {path.name for path in (tmp_path / "saved").glob("*.py")} == model_files() | {"attn_res_attnres.py"}

    environment = os.environ | {"PYTHONPATH": str(target)}
    for command in (
        [sys.executable, "-m", "attnres_cli", "--help"],
        [sys.executable, target / "bin" / "attnres", "--help"],
    ):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "demo" in done.stdout
