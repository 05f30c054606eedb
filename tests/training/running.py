"""A run in a process of its own, and what it leaves."""

import json
import subprocess
import time
from pathlib import Path


def results(out: Path) -> dict:
    return json.loads((out / "results.json").read_text())


def wait_for(path: Path, process: subprocess.Popen) -> None:
    while not path.exists():
        assert process.poll() is None
        time.sleep(0.01)
