"""Fixtures: other processes, and kernels that compute what is as small as in these tests."""

import os
from collections.abc import Callable, Iterator

import pytest

from attnres.accelerated import numba as on_cpu

from .. import forks


@pytest.fixture(scope="module")
def cpu_kernels() -> Iterator[None]:
    """The kernels of a CPU are worth it for what is as small as in these tests too."""
    pytest.importorskip("numba")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_cpu, "_MANY", 0)
        yield


@pytest.fixture(scope="session")
def printed(tmp_path_factory) -> Callable[..., str]:
    """`printed(code, **environment)`: what a fork of a process without numba prints; it must not fail."""
    elsewhere = tmp_path_factory.mktemp("cwd")

    def run(code: str, **environment: str) -> str:
        done = forks.run("-c", code, cwd=elsewhere, env=os.environ | environment)
        assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
        return done.stdout.strip()

    return run
