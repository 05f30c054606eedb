"""The named configurations travel in the wheel and load from it."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from attnres.configuration import load, names


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
