"""Every command that loads a tokenizer refuses a directory without one, in one line with the remedy."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from attnres.checkpoints.tokenizers import load_tokenizer
from attnres.commands.inspect import InspectedSource
from attnres.conversion import retrofit
from attnres.training.recipe import Recipe
from attnres.training.train import run_train


def refusal(call, *arguments, **options) -> str:
    with pytest.raises(ValueError) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def bare(assets, tmp_path) -> Path:
    """Return a retrofit that was saved without its tokenizer."""
    retrofit(assets / "checkpoints" / "stories260K-hf", block_size=2).save_pretrained(tmp_path / "bare")
    return tmp_path / "bare"


# Without files, `transformers` fails for the first type, and returns an empty vocabulary for the others.
@pytest.mark.parametrize("model_type", ["attnres_llama", "qwen3", "gemma2", "gpt_neox"])
def test_a_directory_without_a_tokenizer_is_refused_with_the_remedies(model_type, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert refusal(load_tokenizer, tmp_path, remedy="name one by --other") == (
        f"{tmp_path} has no tokenizer that loads: save one there by "
        "AutoTokenizer.from_pretrained(SOURCE).save_pretrained(DIR), or name one by --other."
    )


def test_every_command_refuses_a_directory_without_a_tokenizer(bare, tmp_path):
    message = f"{bare} has no tokenizer that loads: save one there by "
    recipe = Recipe(str(bare), ("text.txt",), str(tmp_path / "out"), steps=1)
    assert refusal(run_train, recipe).startswith(message)
    assert refusal(run_train, recipe).endswith(", or name one by tokenizer=DIR.")
    assert refusal(InspectedSource(str(bare)).load).startswith(message)


def test_a_tokenizer_that_is_saved_as_the_message_proposes_loads(bare, assets):
    source = assets / "checkpoints" / "stories260K-hf"
    AutoTokenizer.from_pretrained(source).save_pretrained(bare)
    assert load_tokenizer(bare)("Once upon").input_ids == load_tokenizer(source)("Once upon").input_ids


def test_a_damaged_file_is_reported_with_the_reason(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"mod')
    with pytest.raises(OSError, match=r"^\S*tokenizer.json is damaged \(JSONDecodeError\(.*\)\)\. Copy it again\.$"):
        load_tokenizer(tmp_path)


def test_a_name_that_is_not_a_directory_keeps_the_error_of_the_hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(OSError):
        load_tokenizer("nobody/none")
