"""Fixtures: other processes, and kernels that compute what is as small as in these tests."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from attnres.accelerated import numba as on_cpu


@pytest.fixture(scope="module")
def cpu_kernels() -> Iterator[None]:
    """The kernels of a CPU are worth it for what is as small as in these tests too."""
    pytest.importorskip("numba")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_cpu, "_MANY", 0)
        yield


@pytest.fixture(scope="session")
def printed() -> Callable[..., str]:
    """`printed(code, **environment)`: what another process prints; it must not fail."""

    def run(code: str, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code],
            capture_output=True,
            text=True,
            timeout=500,
            env=os.environ | environment,
        )
        assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
        return done.stdout.strip()

    return run
