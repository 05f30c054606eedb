"""A wheel holds what the package compiles."""

import zipfile

import pytest

from attnres.accelerated.triton import host


@pytest.mark.slow
def test_the_wheel_holds_the_source_of_the_hosts_part(wheel):
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(f"attnres/accelerated/triton/{host.SOURCE.name}") == host.SOURCE.read_bytes()
