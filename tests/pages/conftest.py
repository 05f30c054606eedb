"""Fixtures that make the directory in which pages run, with small versions of the files that pages name."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForCausalLM

import attnres
from attnres import AttnResForCausalLM, AttnResKimiK3ForCausalLM
from attnres.configuration import load
from attnres.conversion import retrofit
from attnres.kimi_tokenizer import K3_CHAT_TEMPLATE
from attnres.training.text import python_sources, train_tokenizer
from attnres.utils import declared

from ..eval.synthetic import write_data_set
from ..modeling_attnres.kimi_k3_seeing import write_seeing

CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"


def _questions(count: int) -> list[dict]:
    """Return questions in the format of ARC-Challenge."""
    return [
        {
            "id": f"item-{number}",
            "question": f"Which is item {number}?",
            "choices": {"text": [f"item {number}", "a stone", "a fish", "rain"], "label": list("ABCD")},
            "answerKey": "A",
        }
        for number in range(count)
    ]


@pytest.fixture(scope="session")
def material(tmp_path_factory) -> Path:
    """Make a folder with all models and files that pages name."""
    folder = tmp_path_factory.mktemp("material")
    config = load("attnres-tiny", num_hidden_layers=4)
    sources = python_sources(200_000)
    tokenizer = train_tokenizer(sources, config.vocab_size)
    tokenizer.chat_template = CHAT_TEMPLATE
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    qwen3 = AutoConfig.for_model("qwen3", vocab_size=config.vocab_size, num_hidden_layers=3, head_dim=16, **sizes)
    torch.manual_seed(0)
    standard = AutoModelForCausalLM.from_config(qwen3)
    for model, name in (
        (AttnResForCausalLM(config), "attnres-demo/model"),
        (standard, "Qwen/Qwen3-0.6B"),
        (retrofit(standard, num_blocks=8), "qwen3-attnres"),
    ):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    kimi_k3 = AttnResKimiK3ForCausalLM(load("attnres-k3-tiny", vocab_size=config.vocab_size, num_hidden_layers=4))
    for layout, name in (("composite", "my-k3"), ("text", "my-k3-text")):
        kimi_k3.config.checkpoint_layout = layout
        kimi_k3.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    write_seeing(folder / "Kimi-K3", [*sources[:20], K3_CHAT_TEMPLATE.read_text(encoding="utf-8")], 2000)
    Image.new("RGB", (9, 6), "red").save(folder / "photo.png")
    content = [{"type": "image", "path": "photo.png"}, {"type": "text", "text": "What is it?"}]
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": "A red square."}]
    (folder / "images.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 8)
    shutil.copytree(folder / "qwen3-attnres", folder / "me/qwen3-attnres")
    (folder / "text.txt").write_text("\n\n".join(sources)[:60_000], encoding="utf-8")
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text[:4000]}) + "\n" for text in sources[:40]))
    chat = {"messages": [{"role": "user", "content": "def?"}, {"role": "assistant", "content": "def main(): pass"}]}
    (folder / "chats.jsonl").write_text((json.dumps(chat) + "\n") * 40)
    splits = {"train": _questions(30), "validation": _questions(4), "test": _questions(4)}
    write_data_set(folder / "data/allenai/ai2_arc", {"ARC-Challenge": splits})
    return folder


@pytest.fixture
def workplace(material, tmp_path, monkeypatch) -> Callable[..., Path]:
    """Return `workplace(*made)`, which enters a copy of the material without the folders `made` by the page itself."""

    def enter(*made: str) -> Path:
        shutil.copytree(material, tmp_path, dirs_exist_ok=True)
        for name in made:
            shutil.rmtree(tmp_path / name)
        monkeypatch.chdir(tmp_path)
        return tmp_path

    return enter


@pytest.fixture(autouse=True)
def restored_tables() -> Iterator[None]:
    """Remove the connections and backbones that a page adds."""
    added = attnres.CONNECTIONS, attnres.BACKBONES, declared._files, declared._registered
    tables = [(table, dict(table)) for table in added]
    yield
    for table, before in tables:
        table.clear()
        table.update(before)
