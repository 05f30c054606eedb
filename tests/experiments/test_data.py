"""The text of an experiment: every token of it travels in one file, and each seed takes its sequences in its order."""

import pytest
import torch

from attnres.training.readers import END_OF_TEXT
from attnres.training.text import token_stream, train_tokenizer
from experiments.data import Data, Text, load, prepare


def test_the_prepared_file_has_every_token_of_the_documents(tmp_path):
    documents = [f"Tale {number}: " + "the wolf and the seven kids. " * number for number in range(1, 30)]
    folder = tmp_path / "tales"
    folder.mkdir()
    for name, part in (("train", documents), ("valid", documents[::-1])):
        (folder / f"{name}.txt").write_text(f"\n{END_OF_TEXT}\n".join(part))
    text = Text("tales", 300, 10**9)
    path = prepare(text, folder, tmp_path / "out")
    assert path.stat().st_size < 2000 < (folder / "train.txt").stat().st_size
    data = load(text, 8, 3, tmp_path / "out")
    documents = [document.strip() for document in documents]
    stream = torch.from_numpy(token_stream(documents, train_tokenizer(documents, 300)))
    assert torch.equal(data.train.flatten(), stream[: data.train.numel()]) and len(stream) - data.train.numel() < 8
    assert data.selection.shape == data.valid.shape == (3, 8)


def test_another_corpus_is_not_prepared_under_the_name_of_this_one(tmp_path):
    with pytest.raises(ValueError, match=r"--corpus: this is declared for tales, not .*\."):
        prepare(Text("tales", 300, 10**9), tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_seed_takes_each_sequence_once_before_it_repeats_any():
    data = Data(torch.arange(10)[:, None], torch.empty(0), torch.empty(0))
    order = data.order(3, 25).flatten().tolist()
    assert sorted(order[:10]) == sorted(order[10:20]) == list(range(10)) and order[:10] != order[10:20]
    assert data.order(3, 12).flatten().tolist() == order[:12]
    assert data.order(4, 12).flatten().tolist() != order[:12]
