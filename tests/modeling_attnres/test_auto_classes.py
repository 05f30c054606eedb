"""After `import attnres`, the Auto classes of `transformers` load the family by directory and by configuration."""

import json
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    KimiLinearForCausalLM,
)

from attnres import AttnResConfig, AttnResForCausalLM, AttnResForSequenceClassification, AttnResModel

AUTO_CLASSES = [
    (AutoModel, AttnResModel),
    (AutoModelForCausalLM, AttnResForCausalLM),
    (AutoModelForSequenceClassification, AttnResForSequenceClassification),
]


def test_auto_config_reads_a_saved_model(tiny_model, tmp_path):
    model = tiny_model(attn_res_block_size=3)
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is AttnResConfig
    assert config.attn_res_block_size == 3


def test_auto_config_makes_a_configuration_by_model_type():
    config = AutoConfig.for_model("attnres", attn_res_scale="sum")
    assert type(config) is AttnResConfig
    assert config.attn_res_scale == "sum"


@pytest.mark.parametrize(("auto_class", "model_class"), AUTO_CLASSES)
def test_from_pretrained_returns_the_class_and_the_weights_of_a_saved_model(
    auto_class, model_class, tiny_config, token_ids, tmp_path
):
    torch.manual_seed(0)
    saved = model_class(tiny_config()).eval()
    saved.save_pretrained(tmp_path)
    loaded, report = auto_class.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is model_class
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert torch.equal(loaded(token_ids)[0], saved(token_ids)[0])


@pytest.mark.parametrize("trust_remote_code", [False, True, None])
@pytest.mark.parametrize(("auto_class", "model_class"), AUTO_CLASSES)
def test_the_imported_package_is_used_and_not_the_code_in_the_directory(
    auto_class, model_class, trust_remote_code, tiny_model, tmp_path
):
    tiny_model().save_pretrained(tmp_path)
    (tmp_path / "modeling_attnres.py").write_text("raise RuntimeError('the code in the directory was run')")
    loaded = auto_class.from_pretrained(tmp_path, trust_remote_code=trust_remote_code)
    assert type(loaded) is model_class


@pytest.mark.parametrize(("auto_class", "model_class"), AUTO_CLASSES)
def test_from_config_makes_a_new_model(auto_class, model_class, tiny_config):
    model = auto_class.from_config(tiny_config(attn_res_block_size=3))
    assert type(model) is model_class
    assert model.config.attn_res_block_size == 3


def test_from_pretrained_takes_overrides_of_the_configuration(tiny_model, tmp_path):
    tiny_model(attn_res_scale="mean").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_res_scale="sum", attn_res_block_size=1)
    assert (model.config.attn_res_scale, model.config.attn_res_block_size) == ("sum", 1)
    connections = [model.model.output_attn_res_proj, *(layer.mlp_res_proj for layer in model.model.layers)]
    assert {(connection.scale, connection.block_size) for connection in connections} == {("sum", 1)}


@pytest.mark.parametrize("model_class", [AttnResModel, AttnResForCausalLM, AttnResForSequenceClassification])
def test_attention_and_experts_run_on_the_same_implementation_as_in_kimi_linear(model_class, tiny_config, monkeypatch):
    # `transformers` caches on the class whether it can set experts; earlier tests must not matter.
    for ancestor in model_class.__mro__:
        for remembered in [name for name in vars(ancestor) if name.endswith("_cached_value")]:
            monkeypatch.delattr(ancestor, remembered)
    config = model_class(tiny_config()).config
    kimi = KimiLinearForCausalLM(tiny_config()).config
    assert (config._attn_implementation, config._experts_implementation) == (
        kimi._attn_implementation,
        kimi._experts_implementation,
    )


class Mine(AttnResForCausalLM):
    """As a user may derive it."""


def test_a_derived_class_is_saved_as_the_class_whose_code_travels(tiny_model, tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path / "model")
    model.__class__ = Mine
    model.save_pretrained(tmp_path / "mine")
    model, mine = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("model", "mine"))
    assert mine == model
    names = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("model", "mine")]
    assert names[0] == names[1]


def test_a_derived_class_that_is_registered_travels_with_its_models(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(Mine, "_auto_class", "AutoModelForCausalLM")
    model = tiny_model()
    model.__class__ = Mine
    model.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    file = Path(__file__).stem
    expected = {"AutoConfig": "kimi_linear_configuration_attnres.AttnResConfig", "AutoModelForCausalLM": f"{file}.Mine"}
    assert (fields["auto_map"], fields["architectures"]) == (expected, ["Mine"])
    assert (tmp_path / f"{file}.py").is_file()
