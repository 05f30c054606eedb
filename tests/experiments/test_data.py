"""The text of an experiment: every token of it travels in one file, and each seed takes its sequences in its order."""

import json
import lzma
from pathlib import Path

import numpy as np
import pytest
import torch

from attnres.training.loaders import END_OF_TEXT
from attnres.training.text import token_stream, train_tokenizer
from experiments.data import TokenData, load, prepare, prepared_file, tokenizer_folder
from experiments.declared import Corpus

TALES = Corpus("tales", 300, 10**9)


def write_tales(folder: Path, documents: list[str]) -> Path:
    """A corpus; its held-out text has the same documents in another order."""
    folder = folder / "tales"
    folder.mkdir(exist_ok=True)
    for name, part in (("train", documents), ("valid", documents[::-1])):
        (folder / f"{name}.txt").write_text(f"\n{END_OF_TEXT}\n".join(part))
    return folder


def test_the_prepared_file_has_every_token_of_the_documents(tmp_path):
    documents = [f"Tale {number}: " + "the wolf and the seven kids. " * number for number in range(1, 30)]
    folder = write_tales(tmp_path, documents)
    path = prepare(TALES, folder, tmp_path / "out")
    assert path.stat().st_size < 2000 < (folder / "train.txt").stat().st_size
    data = load(TALES, 8, 3, tmp_path / "out")
    documents = [document.strip() for document in documents]
    stream = torch.from_numpy(token_stream(documents, train_tokenizer(documents, 300)))
    assert torch.equal(data.train.flatten(), stream[: data.train.numel()]) and len(stream) - data.train.numel() < 8
    assert data.selection.shape == data.valid.shape == (3, 8)


def test_another_corpus_is_not_prepared_under_the_name_of_this_one(tmp_path):
    with pytest.raises(ValueError, match=r"--corpus must be the folder of tales, which is declared; got .*\."):
        prepare(TALES, tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("stopped", ["lzma.compress", "tokenizer_folder", "atomic_write"])
def test_a_preparation_that_is_stopped_leaves_no_tokens_beside_another_tokenizer(stopped, tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    path, tokenizer = prepared_file(TALES, tmp_path), tokenizer_folder(TALES, tmp_path) / "tokenizer.json"
    prepare(TALES, write_tales(tmp_path, ["the wolf and the seven kids " * 50]), tmp_path)
    before = path.read_bytes(), tokenizer.read_bytes()
    write_tales(tmp_path, ["a princess on a pea " * 50])
    monkeypatch.setattr(f"experiments.data.{stopped}", stop)
    with pytest.raises(KeyboardInterrupt):
        prepare(TALES, tmp_path / "tales", tmp_path)
    assert not path.exists() or (path.read_bytes(), tokenizer.read_bytes()) == before


@pytest.mark.parametrize("vocab_size", [257, 65_537, 512.0, "512"])
def test_a_vocabulary_whose_ids_cannot_be_stored_is_refused(vocab_size):
    with pytest.raises(
        ValueError, match=rf"vocab_size.* must be (a whole number|from 258 to 65536).*; got {vocab_size!r}"
    ):
        Corpus("tales", vocab_size, 1)


def write_prepared(folder: Path, head: object, tokens: int = 100, token: int = 0) -> None:
    content = json.dumps(head).encode() + b"\n" + np.full(tokens, token, np.uint16).tobytes()
    prepared_file(TALES, folder).write_bytes(lzma.compress(content))


@pytest.mark.parametrize(
    ("head", "more", "message"),
    [
        ({"train": 1060, "valid": 40}, {}, "it holds 100 tokens, and its counts are {'train': 1060, 'valid': 40}"),
        ({"train": 60, "valid": 40}, {"tokens": 110}, "it holds 110 tokens"),
        ({"train": "60", "valid": 40}, {}, "not supported between"),
        ({"train": 60.5, "valid": 39.5}, {}, "slice indices must be"),
        ({"train": 110, "valid": -10}, {}, "its counts are {'train': 110, 'valid': -10}"),
        ({"valid": 100}, {}, "its counts are {'valid': 100}"),
        ([60, 40], {}, "its counts are [60, 40]"),
        ({"train": 60, "valid": 40}, {"token": 300}, "it has the id 300, and a vocabulary of 300"),
    ],
)
def test_a_file_that_does_not_hold_what_it_says_is_damaged(head, more, message, tmp_path):
    write_prepared(tmp_path, head, **more)
    with pytest.raises(ValueError, match=r"tales-300-1000000000\.xz is damaged \(.*\): prepare it anew") as error:
        load(TALES, 8, 2, tmp_path)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (0, r"train\.txt of tales gives 0 sequences of 8 tokens, not 1: prepare a longer one"),
        (99, r"valid\.txt of .* 4:"),
    ],
)
def test_a_text_that_is_too_short_is_named(train, message, tmp_path):
    write_prepared(tmp_path, {"train": train, "valid": 100 - train})
    with pytest.raises(ValueError, match=message):
        load(TALES, 8, 2, tmp_path)


def test_a_seed_takes_each_sequence_once_before_it_repeats_any():
    data = TokenData(torch.arange(10)[:, None], torch.empty(0), torch.empty(0))
    order = data.order(3, 25).flatten().tolist()
    assert sorted(order[:10]) == sorted(order[10:20]) == list(range(10)) and order[:10] != order[10:20]
    assert data.order(3, 12).flatten().tolist() == order[:12]
    assert data.order(4, 12).flatten().tolist() != order[:12]


@pytest.mark.parametrize("sequences", [0, 10])
def test_more_passes_over_the_text_than_anyone_means_are_refused(sequences):
    data = TokenData(torch.arange(sequences)[:, None], torch.empty(0), torch.empty(0))
    with pytest.raises(
        ValueError, match=rf"10,001 sequences are more than 1,000 passes over the {sequences} of the text"
    ):
        data.order(0, 10_001)
