"""Text for small runs: documents, tokenizer, packed blocks."""

import pytest
import torch

from attnres.training.text import END_OF_TEXT, pack, python_sources, read_documents, train_tokenizer


def test_the_python_sources_are_real_and_the_same_each_time():
    documents = python_sources(200_000)
    assert documents == python_sources(200_000)
    assert documents == python_sources(400_000)[: len(documents)]
    assert 200_000 <= sum(map(len, documents)) < 600_000
    assert any("import " in document for document in documents)


def test_a_file_is_split_at_end_of_text_lines_or_else_in_paragraphs(tmp_path):
    path = tmp_path / "text"
    path.write_text(f"One.\n\nStill one.\n{END_OF_TEXT}\nTwo.\n{END_OF_TEXT}\n")
    assert read_documents(path, 1000) == ["One.\n\nStill one.", "Two."]
    path.write_text(f"One.\n{END_OF_TEXT}\nTwo.\n{END_OF_TEXT}")
    assert read_documents(path, 1000) == ["One.", "Two."]
    path.write_text("One.\n\n\n\nTwo.\n")
    assert read_documents(path, 1000) == ["One.", "Two."]
    path.write_text(" \n")
    with pytest.raises(ValueError, match="holds no text"):
        read_documents(path, 1000)


def test_a_real_corpus_is_split_into_its_stories(assets):
    path = assets / "corpora" / "tinystories" / "valid.txt"
    documents = read_documents(path, 10_000_000)
    assert len(documents) == 278  # 277 marks between them
    assert not any(END_OF_TEXT in document for document in documents)


def test_packing_loses_no_token_and_marks_every_end():
    documents = ["def f(): return 1", "ünïcode too", "x"]
    tokenizer = train_tokenizer(documents, 300)
    assert len(tokenizer) <= 300
    blocks = pack(documents, tokenizer, length=4)
    stream = [t for document in documents for t in [*tokenizer(document)["input_ids"], tokenizer.eos_token_id]]
    assert torch.equal(blocks.flatten(), torch.tensor(stream)[: blocks.numel()])
    assert len(stream) - blocks.numel() < 4
    text = tokenizer.decode(stream)
    assert text == END_OF_TEXT.join(documents) + END_OF_TEXT
