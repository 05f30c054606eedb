"""The Python of the pages runs as it stands, one block after the other, in the directory that the demo leaves."""

import re
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

import attnres
from attnres import AttnResForCausalLM
from attnres.configuration import load
from attnres.training.text import python_sources, train_tokenizer

ROOT = Path(__file__).parent.parent
SOURCE = "Qwen/Qwen3-0.6B"  # of the README; here a small one of its kind lies at that path
PAGES = [path for path in ROOT.glob("*/README.md") if not path.parent.name.startswith(".")]
CONNECTIONS = ROOT / "modeling_attnres" / "connections.md"


@pytest.fixture
def demo_directory(tmp_path) -> Path:
    """A directory with an untrained `attnres-demo/model` and a standard Qwen3 in it."""
    config = load("attnres-tiny")
    tokenizer = train_tokenizer(python_sources(200_000), config.vocab_size)
    qwen3 = AutoConfig.for_model(
        "qwen3",
        vocab_size=config.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    for model, folder in (
        (AttnResForCausalLM(config), tmp_path / "attnres-demo" / "model"),
        (AutoModelForCausalLM.from_config(qwen3), tmp_path / SOURCE),
    ):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return tmp_path


def run_blocks(page: Path) -> int:
    """Run the page's Python, one block after the other; how many there are."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), namespace)
    return len(blocks)


def test_the_python_of_the_readme_runs(demo_directory, monkeypatch, capsys):
    monkeypatch.chdir(demo_directory)
    assert run_blocks(ROOT / "README.md") == 1
    assert "Attention is" in capsys.readouterr().out
    again = AutoModelForCausalLM.from_pretrained("qwen3-attnres")
    assert again.config.model_type == "attnres_qwen3"


def test_the_python_of_the_page_on_models_runs(demo_directory, monkeypatch, capsys):
    monkeypatch.chdir(demo_directory)
    assert run_blocks(ROOT / "modeling_attnres" / "README.md") == 6
    output = capsys.readouterr().out
    assert "attn_res 4" in output
    assert "attnres-48b-a3b" in output


def test_the_python_of_the_page_on_analysis_runs(demo_directory, monkeypatch, capsys):
    monkeypatch.chdir(demo_directory)
    assert run_blocks(ROOT / "analysis" / "README.md") == 3
    assert capsys.readouterr().out.endswith("tensor(True)\n")


def test_the_python_of_the_page_on_training_runs(demo_directory, monkeypatch, capsys):
    monkeypatch.chdir(demo_directory)
    assert run_blocks(ROOT / "training" / "README.md") == 2
    lines = [line for line in capsys.readouterr().out.splitlines() if "'loss'" in line]
    assert len(lines) == 2
    documented = re.findall(r"`((?:depth|magnitude)_\w+)`", (ROOT / "training" / "README.md").read_text())
    assert all(f"'{name}': " in line for name in documented for line in lines)
    assert len(set(documented)) == 7
    assert list(Path("runs/a/runs").glob("*/events*"))


def test_the_page_on_residual_connections_names_all_and_adds_one(capsys):
    before = dict(attnres.CONNECTIONS)
    try:
        assert run_blocks(CONNECTIONS) == 3
        assert attnres.CONNECTIONS.keys() - before.keys() == {"scaled_stream"}
    finally:
        attnres.CONNECTIONS.pop("scaled_stream", None)
    assert "mhc 4" in capsys.readouterr().out
    assert set(re.findall(r"^\| \[`(\w+)`\]", CONNECTIONS.read_text(), flags=re.MULTILINE)) == before.keys()


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES, CONNECTIONS], ids=lambda page: page.parent.name)
def test_every_link_to_a_file_leads_somewhere(page):
    links = [link.partition("#")[0] for link in re.findall(r'(?:\]\(|src=")(?!https?:)([^)"]+)', page.read_text())]
    assert len(links) >= 5 or page.parent != ROOT
    assert [link for link in links if not (page.parent / link).exists()] == []
