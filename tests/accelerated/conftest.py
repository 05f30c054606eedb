"""Fixtures: code in other processes, and CPU kernels that run for small tensors too."""

import os
from collections.abc import Callable, Iterator

import pytest

from attnres.accelerated.numba import support

from .. import forks
from .triton_stand_ins import kernels  # noqa: F401


@pytest.fixture(scope="module")
def cpu_kernels() -> Iterator[None]:
    """Make the CPU kernels run for tensors as small as in these tests."""
    pytest.importorskip("numba")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(support, "_MANY", 0)
        yield


@pytest.fixture(scope="session")
def printed(tmp_path_factory) -> Callable[..., str]:
    """`printed(code, **environment)` runs code in a fork of a process without numba, and returns what it prints."""
    elsewhere = tmp_path_factory.mktemp("cwd")

    def run(code: str, **environment: str) -> str:
        done = forks.run("-c", code, cwd=elsewhere, env=os.environ | environment)
        assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
        return done.stdout.strip()

    return run
