"""Text for small runs: documents and tokenizer."""

import pytest

from attnres.training.text import END_OF_TEXT, python_sources, read_documents


@pytest.mark.slow
def test_the_python_sources_are_the_same_modules_each_time():
    documents = python_sources(200_000)
    assert documents == python_sources(200_000)
    assert documents == python_sources(400_000)[: len(documents)]
    assert 200_000 <= sum(map(len, documents)) < 600_000
    assert any("import " in document for document in documents)


def test_a_file_gives_its_documents_until_one_reaches_the_limit(tmp_path):
    path = tmp_path / "text"
    path.write_text(f"One.\n\nStill one.\n{END_OF_TEXT}\nTwo.\n{END_OF_TEXT}\nThree.\n")
    assert read_documents(path) == ["One.\n\nStill one.", "Two.", "Three."]
    assert read_documents(path, 17) == ["One.\n\nStill one.", "Two."]
    path.write_text(" \n")
    with pytest.raises(ValueError, match="holds no text"):
        read_documents(path)
    path.write_bytes(b"One.\n\nTw\xff.\n")
    with pytest.raises(ValueError, match="text:3: not UTF-8"):
        read_documents(path)
