"""The text of an experiment: one file holds every token of it, and each seed takes its sequences in another order."""

from pathlib import Path

import pytest
import torch

from attnres.training.data.loaders import END_OF_TEXT
from attnres.training.text import train_tokenizer
from experiments.data import TokenData, load, prepare, prepared_file, token_stream
from experiments.declared import Corpus

TALES = Corpus("tales", 300, 10**9)


def write_tales(folder: Path, documents: list[str]) -> Path:
    """Write a corpus. Its held-out text has the same documents in another order."""
    folder = folder / "tales"
    folder.mkdir(exist_ok=True)
    for name, part in (("train", documents), ("valid", documents[::-1])):
        (folder / f"{name}.txt").write_text(f"\n{END_OF_TEXT}\n".join(part))
    return folder


def test_the_prepared_file_has_every_token_of_the_documents(tmp_path):
    documents = [f"Tale {number}: " + "the wolf and the seven kids. " * number for number in range(1, 30)]
    folder = write_tales(tmp_path, documents)
    data = load(TALES, 8, 3, folder, tmp_path / "out")
    assert prepared_file(TALES, tmp_path / "out").stat().st_size < 2000 < (folder / "train.txt").stat().st_size
    documents = [document.strip() for document in documents]
    stream = torch.from_numpy(token_stream(documents, train_tokenizer(documents, 300)))
    assert torch.equal(data.train.flatten(), stream[: data.train.numel()]) and len(stream) - data.train.numel() < 8
    assert data.selection.shape == data.valid.shape == (3, 8)
    again = load(TALES, 8, 3, None, tmp_path / "out")
    assert again.fingerprint == data.fingerprint and torch.equal(again.valid, data.valid)


def test_another_corpus_is_not_prepared_under_the_name_of_this_one(tmp_path):
    with pytest.raises(ValueError, match=r"--corpus must be the folder of tales; got .*\."):
        prepare(TALES, tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_text_that_is_too_short_is_refused(tmp_path):
    folder = write_tales(tmp_path, ["the wolf and the seven kids " * 50])
    with pytest.raises(ValueError, match=r"tales-300-1000000000.xz .* must hold 1 and 2000: prepare a longer text"):
        load(TALES, 8, 1000, folder, tmp_path)


def test_a_seed_takes_each_sequence_once_before_it_repeats_any():
    data = TokenData(torch.arange(10)[:, None], torch.empty(0), torch.empty(0))
    order = data.order(3, 25).flatten().tolist()
    assert sorted(order[:10]) == sorted(order[10:20]) == list(range(10)) and order[:10] != order[10:20]
    assert data.order(3, 12).flatten().tolist() == order[:12]
    assert data.order(4, 12).flatten().tolist() != order[:12]


def test_the_stream_has_every_token_and_one_mark_for_each_document():
    documents = ["def f(): return 1", "ünïcode too", "x"]
    tokenizer = train_tokenizer(documents, 300)
    assert len(tokenizer) <= 300
    ids = [tokenizer(document)["input_ids"] for document in documents]
    stream = token_stream(documents, tokenizer)
    assert stream.tolist() == [token for document in ids for token in [*document, tokenizer.eos_token_id]]
    assert tokenizer.decode(stream) == END_OF_TEXT.join(documents) + END_OF_TEXT
    begun = token_stream(documents, tokenizer, begin=True)
    assert begun.tolist() == [token for document in ids for token in [tokenizer.bos_token_id, *document]]
    assert token_stream([], tokenizer).shape == (0,)
