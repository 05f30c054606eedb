"""Fixtures of the tests of data."""

import pytest

from attnres.training.encoding import Encoder
from attnres.training.text import train_tokenizer

from .blocks import WORDS


@pytest.fixture
def in_tmp_path(tmp_path, monkeypatch) -> None:
    """The working directory is the test's own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def tokenizer():
    """A small one, of number words and bytes."""
    return train_tokenizer([" ".join(WORDS)] * 5, 300)


@pytest.fixture
def tokenised(monkeypatch) -> list[str]:
    """An entry for each time that documents are tokenised."""
    calls, batches = [], Encoder.batches

    def noted(self, documents):
        calls.append("tokenised")
        return batches(self, documents)

    monkeypatch.setattr(Encoder, "batches", noted)
    return calls
