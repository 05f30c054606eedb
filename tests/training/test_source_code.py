"""Code that came with the base model does not run, and the files of a run do not refer to it."""

import json

import pytest
from transformers import AutoConfig, AutoTokenizer

from attnres.training.prepare import build_model, open_tokenizer
from attnres.training.recipe import Recipe

from ..conversion.checkpoints import change_json, save_tokenizer, standard_model


@pytest.fixture
def recipe(tmp_path):
    """Return a recipe for a model whose configuration files name code. The code makes the file `sprung` if it runs."""
    source = tmp_path / "source"
    standard_model().save_pretrained(source)
    save_tokenizer(source)
    (source / "evil.py").write_text(
        f"open({str(tmp_path / 'sprung')!r}, 'w').close()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast\n\n\n"
        "class T(PreTrainedTokenizerFast): ...\n\n\nclass C(LlamaConfig): ...\n\n\nclass M(LlamaForCausalLM): ...\n"
    )
    change_json(source / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "evil.T"]})
    change_json(source / "config.json", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    return Recipe(str(source), ("text.txt",), str(tmp_path / "out"), steps=1)


def test_the_code_is_neither_run_nor_saved(recipe, tmp_path):
    open_tokenizer(recipe.model).save_pretrained(tmp_path / "saved")
    build_model(recipe, None).save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "sprung").exists()
    for name in ("config.json", "tokenizer_config.json"):
        assert "auto_map" not in json.loads((tmp_path / "saved" / name).read_text())
    assert not list((tmp_path / "saved").glob("*.py"))


def test_the_trap_works_if_the_code_runs(recipe, tmp_path):
    AutoTokenizer.from_pretrained(recipe.model, trust_remote_code=True)
    assert (tmp_path / "sprung").exists()
    assert type(AutoConfig.from_pretrained(recipe.model, trust_remote_code=True)).__name__ == "C"
