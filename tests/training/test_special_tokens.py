"""A trained model has the special tokens of its source, unless the recipe names others in `config`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, Qwen3Config

from attnres.configuration import load
from attnres.conversion import retrofit
from attnres.training.recipe import Recipe
from attnres.training.train import run_train

from .blocks import some_texts, write

END_OF_TURN = 7  # the tokenizer's end-of-text token is 1
SIZES = {
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "bos_token_id": 3,
    "eos_token_id": END_OF_TURN,
    "pad_token_id": 4,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES),
    "retrofit": lambda: LlamaConfig(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=8),
    "kimi k3": lambda: load("attnres-k3-tiny", num_hidden_layers=4, vocab_size=300, eos_token_id=END_OF_TURN),
}


@pytest.fixture
def train(tokenizer, tmp_path) -> Callable[..., tuple[dict, dict]]:
    """Return `train(model, **fields)`, which trains for a step, and gives both JSON files of the source and result."""

    def run(model, **fields) -> tuple[dict, dict]:
        model.generation_config = GenerationConfig(eos_token_id=[END_OF_TURN, 5], bos_token_id=3)
        model.save_pretrained(tmp_path / "source")
        tokenizer.save_pretrained(tmp_path / "source")
        data, out = write(str(tmp_path / "a.jsonl"), some_texts(40)), tmp_path / "out"
        sizes = {"length": 16, "batch_size": 2, "steps": 1, "held_out_sequences": 1}
        run_train(Recipe(str(tmp_path / "source"), (data,), str(out), **sizes, **fields))
        names = ("config.json", "generation_config.json")
        assert all((out / "checkpoint-1" / name).read_text() for name in names)
        return tuple(
            [json.loads((folder / name).read_text()) for name in names]
            for folder in (tmp_path / "source", out / "checkpoint-1", out / "model")
        )

    return run


def special(settings: dict) -> dict:
    """Return the special tokens in a configuration, at every level."""
    tokens = {name: value for name, value in settings.items() if name.endswith("_token_id")}
    return tokens | {name: special(part) for name, part in settings.items() if name == "text_config"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_training_keeps_the_special_tokens_of_the_source(kind, train):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]())
    source, *trained = train(retrofit(model) if kind == "retrofit" else model)
    assert special(source[0])["eos_token_id"] == END_OF_TURN
    for files in trained:
        assert [special(file) for file in files] == [special(file) for file in source]


@pytest.mark.slow
def test_a_recipe_may_name_other_special_tokens(train, tmp_path):
    torch.manual_seed(0)
    _, *trained = train(AutoModelForCausalLM.from_config(CONFIGS["llama"]()), config={"eos_token_id": 9})
    for files in trained:
        assert [(file["eos_token_id"], file["bos_token_id"]) for file in files] == [(9, 3)] * 2
    assert GenerationConfig.from_pretrained(Path(tmp_path / "out" / "model")).eos_token_id == 9
