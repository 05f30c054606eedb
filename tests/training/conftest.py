"""Fixtures for the tests of training."""

import pytest

from attnres.training.data.documents import Encoder
from attnres.training.text import train_tokenizer

from .blocks import WORDS


@pytest.fixture
def in_tmp_path(tmp_path, monkeypatch) -> None:
    """Change into a directory that only this test uses."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def tokenizer():
    """Return a small tokenizer of number words and bytes."""
    return train_tokenizer([" ".join(WORDS)] * 5, 300)


@pytest.fixture
def tokenised(monkeypatch) -> list[str]:
    """Return a list that gets an entry whenever documents are tokenised."""
    calls, batches = [], Encoder.batches

    def counting(self, documents):
        calls.append("tokenised")
        return batches(self, documents)

    monkeypatch.setattr(Encoder, "batches", counting)
    return calls
