"""Fixtures of the tests of the Hub: clients in this process, with `huggingface_hub` itself."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from huggingface_hub import HfApi, constants
from huggingface_hub.utils import _http, close_session, disable_progress_bars, enable_progress_bars

from .running import Hub

MEGABYTE = 1_000_000


@pytest.fixture(scope="module", autouse=True)
def client() -> Iterator[None]:
    """No `hf_xet`, no token and no proxy of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
        for name in ("NO_PROXY", "no_proxy"):
            patch.setenv(name, "127.0.0.1")
        close_session()
        disable_progress_bars()
        yield
        enable_progress_bars()
        close_session()


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    """The seconds that the client would have waited before it asked again; it does not wait."""
    seconds: list[float] = []
    monkeypatch.setattr(_http, "time", SimpleNamespace(sleep=seconds.append))
    return seconds


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with Hub.running(part_size=MEGABYTE) as hub:
        yield hub


@pytest.fixture
def hub(server) -> Hub:
    """An empty Hub that takes objects of more than a megabyte in parts."""
    server.clear()
    return server


@pytest.fixture
def client_of(hub) -> Callable[[str | bool], HfApi]:
    """`client_of(token)`: a client of this Hub; with False, one without a token."""
    return lambda token: HfApi(endpoint=hub.url, token=token)


@pytest.fixture
def me(hub, client_of) -> HfApi:
    """The client of the user `me`, who may write; there is an empty repository `me/model`."""
    api = client_of(hub.write_token)
    api.create_repo("me/model")
    hub.forget()
    return api


@pytest.fixture
def folder(tmp_path) -> Path:
    """A model directory: two text files, an object for one request and one for three."""
    folder = tmp_path / "folder"
    (folder / "code").mkdir(parents=True)
    (folder / "README.md").write_text("---\nlicense: mit\ntags: [attnres]\n---\n# A model\n")
    (folder / "code" / "config.json").write_text("{}\n")
    noise = np.random.default_rng(0)
    (folder / "large.safetensors").write_bytes(noise.bytes(int(2.5 * MEGABYTE)))
    (folder / "small.safetensors").write_bytes(noise.bytes(300_000))
    return folder
