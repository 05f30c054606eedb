"""The Python of the README runs as it stands, one block after the other, in the directory that the demo leaves."""

import re
from pathlib import Path

import pytest

from attnres import AttnResForCausalLM
from attnres.configuration import load
from attnres.training.text import python_sources, train_tokenizer

README = Path(__file__).parent.parent / "README.md"


@pytest.fixture
def demo_directory(tmp_path) -> Path:
    """A directory with an untrained `attnres-demo/model` in it."""
    config = load("attnres-tiny")
    AttnResForCausalLM(config).save_pretrained(tmp_path / "attnres-demo" / "model")
    tokenizer = train_tokenizer(python_sources(200_000), config.vocab_size)
    tokenizer.save_pretrained(tmp_path / "attnres-demo" / "model")
    return tmp_path


def test_every_python_block_runs(demo_directory, monkeypatch, capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks) >= 4
    monkeypatch.chdir(demo_directory)
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, README.name, "exec"), namespace)
    output = capsys.readouterr().out
    assert "attn_res 4" in output
    assert "def " in output
    assert "attnres-48b-a3b" in output


def test_every_link_to_a_file_leads_somewhere():
    links = re.findall(r'(?:\]\(|src=")(?!https?:)([^)"]+)', README.read_text())
    assert len(links) >= 5
    assert [link for link in links if not (README.parent / link).exists()] == []
