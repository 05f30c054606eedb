"""The named configurations travel in the wheel and load from it."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from attnres.configuration import load, names

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel of this checkout, built from a copy: a build leaves its folders beside the sources."""
    pytest.importorskip("setuptools", minversion="77", reason="builds a wheel without the network: needs setuptools")
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "tests", "attnres-demo")
    shutil.copytree(REPOSITORY, folder / "sources", ignore=ignored)
    pip_wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip_wheel, "-w", folder, folder / "sources"], check=True)
    (path,) = folder.glob("attnres-*.whl")
    return path


@pytest.mark.slow
def test_the_wheel_holds_every_configuration(wheel):
    with zipfile.ZipFile(wheel) as archive:
        packed = {path for path in archive.namelist() if path.endswith("config.json")}
    assert packed == {f"attnres/configuration/{name}/config.json" for name in names()}


@pytest.mark.slow
def test_every_configuration_loads_from_an_installed_wheel(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    script = (
        "import json; from attnres import configuration; from attnres.configuration import load, names\n"
        "print(json.dumps([configuration.__file__, {name: load(name).to_dict() for name in names()}]))"
    )
    # `PYTHONPATH` comes before the checkout that an editable install points to.
    result = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    file, configurations = json.loads(result.stdout)
    assert Path(file).is_relative_to(tmp_path)
    assert configurations == {name: json.loads(load(name).to_json_string(use_diff=False)) for name in names()}
