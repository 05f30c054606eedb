"""Fixtures of the tests of publishing: a model to publish, and a process that publishes it on a Hub of its own."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from .publishing import Publisher, publisher, retrofit_of_stories


@pytest.fixture(scope="session")
def published_model(assets, tmp_path_factory) -> Path:
    """Return a folder with `model`, a retrofit of a real checkpoint, which tests must not change."""
    return retrofit_of_stories(assets, tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="session")
def session_that_pushes(published_model) -> Iterator[Publisher]:
    """Return a process that publishes, with the folder of `published_model` as its current directory."""
    with publisher(published_model.parent) as push:
        yield push


@pytest.fixture
def push(session_that_pushes) -> Publisher:
    """Return `push(*arguments)`, which runs a command on a Hub that is empty at the start of the test."""
    session_that_pushes.hub.clear()
    return session_that_pushes


@pytest.fixture
def published_copy(published_model, request) -> Iterator[Path]:
    """Return a copy of `published_model` that a test may change."""
    folder = published_model.with_name(request.node.name.replace("/", " "))
    yield shutil.copytree(published_model, folder)
    shutil.rmtree(folder)
