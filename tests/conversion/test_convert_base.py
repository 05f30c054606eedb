"""A decoder that was saved without a head, whose tensors have no prefix, is converted, and converted back."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from attnres.conversion.convert import Conversion

from .checkpoints import (
    IDS,
    change_json,
    change_tensors,
    convert,
    convert_well,
    save_tokenizer,
    standard_model,
    tensors_of,
)

CASES = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("gpt_neox", {}),
    ("mixtral", {"num_local_experts": 4}),
]


def states_of(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModel.from_pretrained(folder).eval()(IDS).last_hidden_state


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "fields"), CASES, ids=str)
def test_a_decoder_computes_the_same_after_every_conversion(tmp_path, model_type, fields):
    model = standard_model(model_type, **fields).base_model
    model.save_pretrained(tmp_path / "source")
    save_tokenizer(tmp_path / "source")
    expected = states_of(tmp_path / "source")
    assert "Verified: " in convert_well(tmp_path / "source", tmp_path / "result", "--block-size", "2").out
    convert_well(tmp_path / "result", tmp_path / "regrouped", "--set-block-size", "3")
    assert "Verified: " in convert_well(tmp_path / "result", tmp_path / "back", "--to", "standard").out
    for name in ("result", "regrouped", "back"):
        assert torch.allclose(states_of(tmp_path / name), expected, atol=1e-4)
    assert tensors_of(tmp_path / "back").keys() == tensors_of(tmp_path / "source").keys()
    assert not any(name.startswith("model.") for name in tensors_of(tmp_path / "result"))
    source, back = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("source", "back"))
    assert back["architectures"] == source["architectures"]


def test_a_decoder_that_was_saved_from_a_retrofit_is_converted_back(tmp_path):
    standard_model().save_pretrained(tmp_path / "source")
    convert_well(tmp_path / "source", tmp_path / "whole", "--no-verify")
    AutoModel.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "decoder")
    convert_well(tmp_path / "decoder", tmp_path / "back", "--to", "standard")
    assert torch.allclose(states_of(tmp_path / "back"), states_of(tmp_path / "source"), atol=1e-4)


def test_a_retrofitted_decoder_with_a_tied_head_loads_as_a_causal_language_model(tmp_path):
    model = standard_model(tie_word_embeddings=True)
    model.base_model.save_pretrained(tmp_path / "source")
    convert_well(tmp_path / "source", tmp_path / "result", "--no-verify")
    with torch.no_grad():
        expected = model(IDS).logits
        logits = AutoModelForCausalLM.from_pretrained(tmp_path / "result").eval()(IDS).logits
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_a_decoder_is_verified_by_its_hidden_states(tmp_path, monkeypatch):
    standard_model().base_model.save_pretrained(tmp_path / "source")
    write = Conversion.write

    def write_and_change(conversion, target, **options):
        notes = write(conversion, target, **options)
        change_tensors(target, {"norm.weight": torch.zeros(32)})
        return notes

    monkeypatch.setattr(Conversion, "write", write_and_change)
    assert "another function" in convert(tmp_path / "source", tmp_path / "result").error


@pytest.mark.parametrize("is_declared_tied", [True, False])
def test_a_separate_head_is_declared_untied(tmp_path, is_declared_tied):
    standard_model(tie_word_embeddings=False).save_pretrained(tmp_path / "source", max_shard_size="20KB")
    change_json(tmp_path / "source" / "config.json", tie_word_embeddings=is_declared_tied)
    convert_well(tmp_path / "source", tmp_path / "result")
    convert_well(tmp_path / "result", tmp_path / "back", "--to", "standard")
    for name in ("result", "back"):
        config = AutoModelForCausalLM.from_pretrained(tmp_path / name).config
        assert config.tie_word_embeddings is False


def test_a_head_equal_to_the_embedding_stays_tied(tmp_path):
    model = standard_model(tie_word_embeddings=False)
    model.lm_head.weight.data.copy_(model.model.embed_tokens.weight)
    model.save_pretrained(tmp_path / "source")
    change_json(tmp_path / "source" / "config.json", tie_word_embeddings=True)
    convert_well(tmp_path / "source", tmp_path / "result")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "result")
    assert model.config.tie_word_embeddings and model.lm_head.weight is model.model.embed_tokens.weight
