"""Tools of `transformers` find the family: architectures, pipelines, the server, tokenizers, docstrings."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, pipeline, pipelines
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import Modality

import attnres
from attnres import family
from attnres.conversion import retrofit

TEXT = "Once upon a time"


@pytest.fixture(scope="module")
def result(assets, tmp_path_factory) -> Path:
    """Save a retrofit with its tokenizer, and return the folder."""
    source, folder = assets / "checkpoints" / "stories260K-hf", tmp_path_factory.mktemp("result")
    retrofit(AutoModelForCausalLM.from_pretrained(source), num_blocks=4).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_transformers_has_the_architectures_of_the_family_and_its_own_names(run, tmp_path):
    run("architectures_session.py", tmp_path / "seen.json", with_attnres=True)
    assert json.loads((tmp_path / "seen.json").read_text()) == ["AttnResMistralForCausalLM"] * 2
    for model_type in ("attnres", "attnres_llama", "attnres_qwen3"):
        AutoConfig.for_model(model_type)  # tools read `architectures` from a configuration
    for name in ("AttnResForCausalLM", "AttnResLlamaForCausalLM", "AttnResQwen3ForTokenClassification"):
        assert getattr(transformers, name) is getattr(attnres, name)
    assert transformers.LlamaForCausalLM.__module__.startswith("transformers.")
    for name in ("AttnResGPT2ForCausalLM", "AttnResNothing", "Nothing"):
        with pytest.raises(AttributeError, match=name):
            getattr(transformers, name)


@torch.no_grad()
def test_transformers_serve_loads_a_result(result):
    manager = ModelManager(device="cpu", dtype="float32")
    try:
        model, tokenizer = manager.load_model_and_processor(manager.process_model_name(str(result)))
        assert type(model) is attnres.AttnResLlamaForCausalLM
        ids = tokenizer(TEXT, return_tensors="pt").input_ids
        assert torch.equal(model(ids).logits, AutoModelForCausalLM.from_pretrained(result)(ids).logits)
    finally:
        manager.shutdown()


@pytest.mark.parametrize("task", ["text-generation", "text-classification", "token-classification"])
def test_a_pipeline_supports_the_family(result, monkeypatch, task):
    errors = []
    monkeypatch.setattr(pipelines.base.logger, "error", errors.append)
    pipeline(task, model=str(result))
    assert errors == []


def test_transformers_serve_treats_the_family_as_a_language_model(result):
    model = AutoModelForCausalLM.from_pretrained(result)
    assert ModelManager.get_model_modality(model) is Modality.LLM


def test_a_pipeline_labels_tokens(result):
    label = pipeline("token-classification", model=str(result))
    assert type(label.model) is attnres.AttnResLlamaForTokenClassification
    assert {entity["word"] for entity in label(TEXT)} <= set(label.tokenizer.tokenize(TEXT)) | {"<s>"}


@pytest.mark.slow
def test_the_tokenizer_loads_without_attnres_without_code_or_question(result, run, tmp_path):
    done = run("tokenizer_session.py", result, TEXT, tmp_path / "seen.json")
    expected = AutoTokenizer.from_pretrained(result)(TEXT).input_ids
    assert json.loads((tmp_path / "seen.json").read_text()) == {"by class": expected, "by auto class": expected}
    assert done.stdout.split() == ["PreTrainedTokenizerFast", "AutoTokenizer"]  # no question whether to trust code
    # Only the Auto class warns, because it does not know the configuration's model type.
    warnings = [line for line in done.stderr.splitlines() if "PyTorch" not in line]
    assert len(warnings) == 1 and "You are using a model of type `attnres_llama`" in warnings[0]


CLASSES = [
    "AttnResModel",
    "AttnResForCausalLM",
    "AttnResForSequenceClassification",
    "AttnResLlamaForTokenClassification",
]


@pytest.mark.parametrize("name", CLASSES)
def test_the_docstrings_are_the_familys_own(name):
    model_class = getattr(attnres, name)
    assert "attention residuals" in model_class.__doc__
    assert "`output_depth_attentions`" in model_class.forward.__doc__
    assert "Mixin" not in model_class.__doc__ + model_class.forward.__doc__


def test_the_docstring_of_forward_links_to_the_backbones():
    assert "[`LlamaForCausalLM`]" in attnres.AttnResLlamaForCausalLM.__doc__
    assert "[`LlamaForCausalLM.forward`]" in attnres.AttnResLlamaForCausalLM.forward.__doc__


def test_a_peft_without_the_tables_fails_with_the_error_of_python(monkeypatch):
    monkeypatch.setattr(family, "_PEFT_TABLES", "attnres.utils.absent")
    monkeypatch.setattr(sys, "meta_path", [family._PeftImport(), *sys.meta_path])
    with pytest.raises(ModuleNotFoundError, match=r"attnres\.utils\.absent"):
        importlib.import_module("attnres.utils.absent")
