"""The layer for multi-token prediction of DeepSeek-V3, through retrofits in memory and conversions both ways."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from attnres.conversion import retrofit
from attnres.mtp_attnres import MultiTokenPrediction

from . import backbones
from .checkpoints import change_json, change_tensors, convert_well, tensors_of

LAYER = "model.layers.5."
SHARED = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Return a checkpoint of DeepSeek-V3 as released: with the layer, and its copies of embedding and head."""
    folder = tmp_path_factory.mktemp("source") / "deepseek"
    config = backbones.member_config("deepseek_v3", num_nextn_predict_layers=1, residual_connection="standard")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    backbones.make_vivid(model)
    model.save_pretrained(folder)
    for code in folder.glob("*.py"):
        code.unlink()
    names = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    change_json(folder / "config.json", "auto_map", "residual_connection", **names)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {LAYER + copy: tensors[name].clone() for copy, name in SHARED.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def layer_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    layer = MultiTokenPrediction.layer(model)
    return {} if layer is None else layer.state_dict()


def test_a_conversion_keeps_the_layer_to_the_last_byte_and_back(source, tmp_path):
    convert_well(source, tmp_path / "retrofit", "--block-size", "2")
    convert_well(tmp_path / "retrofit", tmp_path / "back", "--to", "standard")
    before, between, after = (tensors_of(folder) for folder in (source, tmp_path / "retrofit", tmp_path / "back"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert not any(name.startswith(LAYER) for name in between.keys() - before.keys())  # it stays plain
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "retrofit")
    model.save_pretrained(tmp_path / "saved")
    saved = tensors_of(tmp_path / "saved")
    assert between.keys() - saved.keys() == {LAYER + copy for copy in SHARED}
    assert all(torch.equal(between[name], saved[name]) for name in saved)


def test_a_retrofit_in_memory_reads_the_layer_from_the_checkpoint_of_its_source(source):
    loaded = AutoModelForCausalLM.from_pretrained(source)
    by_path, by_model = retrofit(source, block_size=2), retrofit(loaded, block_size=2)
    expected = layer_of(AutoModelForCausalLM.from_pretrained(source.parent / "deepseek", config=by_path.config))
    for model in (by_path, by_model):
        layer = layer_of(model)
        assert model.config.num_nextn_predict_layers == 1 and layer.keys() == expected.keys()
        assert all(torch.equal(layer[name], expected[name]) for name in expected)
        assert not any(parameter.requires_grad for parameter in MultiTokenPrediction.layer(model).parameters())
    ids = backbones.token_ids()
    with torch.no_grad():
        assert torch.allclose(by_model.eval()(ids).logits, loaded.eval()(ids).logits, atol=1e-4)


@pytest.mark.parametrize("lacks", ["eh_proj.weight", "self_attn.o_proj.weight", "mlp.gate.e_score_correction_bias"])
def test_a_retrofit_draws_no_part_of_a_layer_that_the_checkpoint_lacks(source, tmp_path, lacks):
    shutil.copytree(source, tmp_path / "damaged")
    change_tensors(tmp_path / "damaged", {LAYER + lacks: None})
    with pytest.raises(ValueError, match=rf"damaged is incomplete: it lacks `{LAYER}{lacks}`. Restore it"):
        retrofit(tmp_path / "damaged", block_size=2)


def test_a_retrofit_promises_no_layer_that_its_source_has_not(tmp_path):
    model = backbones.build("deepseek_v3")
    assert model.config.num_nextn_predict_layers == 1  # the default of `transformers`, which makes no such layer
    assert retrofit(model, block_size=2).config.num_nextn_predict_layers == 0
    model.save_pretrained(tmp_path / "source")
    convert_well(tmp_path / "source", tmp_path / "result", "--no-verify")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "result").config.num_nextn_predict_layers == 0
    assert retrofit(tmp_path / "source", block_size=2).config.num_nextn_predict_layers == 0


@pytest.mark.parametrize("number", [1.0, "1"])
def test_a_number_of_layers_that_is_no_integer_is_refused_in_one_line(source, tmp_path, number):
    shutil.copytree(source, tmp_path / "changed")
    change_json(tmp_path / "changed" / "config.json", num_nextn_predict_layers=number)
    with pytest.raises(ValueError, match=rf"`num_nextn_predict_layers` is {number!r}, but must be 0 or 1.$"):
        retrofit(tmp_path / "changed", block_size=2)
