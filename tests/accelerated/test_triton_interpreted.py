"""The tests of the kernels pass in Triton's interpreter too."""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from .triton_cases import needs_triton

FILES = sorted({path.name for path in Path(__file__).parent.glob("test_triton_*.py")} - {Path(__file__).name})


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_the_tests_of_the_kernels_pass_in_tritons_interpreter(file):
    if tuple(map(int, version("triton").split(".")[:2])) < (3, 9):
        pytest.skip("interpreters before Triton 3.9 cannot loop with current versions of numpy")
    options = ["-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(Path(__file__).parents[2])]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(Path(__file__).with_name(file))],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 0, done.stdout
