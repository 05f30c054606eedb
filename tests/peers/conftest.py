"""Fixtures of the tests that run a script where other packages are installed, and compare the numbers it writes."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from .environments import environment

HERE = Path(__file__).parent
MAX_SECONDS = 1200


@pytest.fixture(scope="session")
def python_with() -> Callable[..., Path]:
    """`python_with(name, *requirements)`: that of an `environment`; where it cannot be made, a skip that says why."""

    def find(name: str, *requirements: str, **options) -> Path:
        try:
            return environment(name, *requirements, **options)
        except RuntimeError as error:
            pytest.skip(str(error))

    return find


@pytest.fixture
def run_session(tmp_path) -> Callable[..., dict]:
    """`run_session(python, script, *arguments)`: what the script writes to the file that is its last argument."""

    def run(python: Path | str, script: str, *arguments: str | Path, **variables: str) -> dict:
        out = tmp_path / "seen.json"
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHONPATH"))}
        environ |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | variables
        command = [python, HERE / script, *arguments, out]
        done = subprocess.run(
            command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=MAX_SECONDS, check=False
        )
        assert done.returncode == 0, done.stderr[-6000:]
        return json.loads(out.read_text())

    return run
