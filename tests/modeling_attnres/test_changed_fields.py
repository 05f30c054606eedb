"""A field that changes the function of a checkpoint causes a warning that names it; other fields load silently."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from attnres import AttnResConfig, AttnResLlamaForCausalLM
from attnres.conversion import retrofit
from attnres.residual_attnres import FamilyWarning, residual_tensors


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny_model, backbones) -> Path:
    """Save models: trained hybrid, Llama, gated and dynamic models, an untrained retrofit, and its source."""
    folder = tmp_path_factory.mktemp("models")
    tiny_model(attn_res_block_size=3).save_pretrained(folder / "hybrid")
    backbones.build_member("llama", attn_res_block_size=3).save_pretrained(folder / "llama")
    backbones.build_member("llama", attention_gate="sdpa").save_pretrained(folder / "gated")
    dynamic = backbones.build_member("llama", residual_connection="hyper_connections")
    with torch.no_grad():
        for name, tensor in residual_tensors(dynamic).items():
            if not name.endswith(".static"):
                tensor.normal_(std=0.5)
    dynamic.save_pretrained(folder / "dynamic")
    backbones.build_member("llama", residual_connection="mhc").save_pretrained(folder / "mhc")
    backbones.build_member("llama", residual_connection="gated_residual").save_pretrained(folder / "gains")
    backbones.build_member("llama", residual_connection="highway").save_pretrained(folder / "highway")
    source = backbones.build("llama")
    source.save_pretrained(folder / "source")
    retrofit(source, block_size=3).save_pretrained(folder / "retrofit")
    return folder


def warnings_of(folder: Path, **fields) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        AutoModelForCausalLM.from_pretrained(folder, **fields)
    return [str(warning.message) for warning in caught if warning.category is FamilyWarning]


@pytest.mark.parametrize(
    ("name", "field", "stored", "asked"),
    [
        ("hybrid", "attn_res_block_size", 3, 2),
        ("llama", "attn_res_block_size", 3, 1),
        ("llama", "attn_res_scale", "mean", "sum"),
        ("llama", "attn_res_key_norm", True, False),
        ("llama", "residual_connection", "attn_res", "standard"),
        ("dynamic", "hyper_connections_dynamic", True, False),  # its remaining tensors have their initial values
        ("llama", "attention_gate", None, "sdpa"),
        ("retrofit", "attention_gate", None, "output"),
        ("gated", "attention_gate", "sdpa", None),
        ("gated", "attention_gate_scale", "unit", "double"),
        ("retrofit", "attn_res_scale", "sum", "mean"),
        ("gains", "residual_streams_start", "equal", "apart"),  # its gains are differences from the start
    ],
)
def test_a_field_that_changes_the_function_is_named_with_both_values(folders, name, field, stored, asked):
    (message,) = warnings_of(folders / name, **{field: asked})
    assert f"`{field}` is {stored!r} in its config.json, and {asked!r} here" in message
    assert str(folders / name) in message


def test_a_changed_field_of_a_given_configuration_is_named_too(folders):
    config = AutoConfig.from_pretrained(folders / "hybrid")
    config.attn_res_block_size = 2
    (message,) = warnings_of(folders / "hybrid", config=config)
    assert "`attn_res_block_size` is 3 in its config.json, and 2 here" in message


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("hybrid", {}),
        ("gated", {"attn_implementation": "eager"}),
        ("llama", {"attention_gate": None, "attention_gate_scale": "double"}),
        ("llama", {"attn_res_block_size": 3, "depth_attention_implementation": "auto"}),
        ("mhc", {"residual_streams_start": "apart"}),
        ("highway", {"highway_bias": -2.0}),
        ("retrofit", {"attn_res_block_size": 2}),  # at zero queries a block is only a sum of sums
    ],
)
def test_a_field_that_keeps_the_function_causes_no_warning(folders, name, fields):
    assert warnings_of(folders / name, **fields) == []


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("llama", "attn_res_temperature", 3.0),
        ("dynamic", "residual_streams", 2),
        ("hybrid", "residual_connection", "standard"),
        ("gated", "attention_gate", None),
    ],
)
def test_a_field_that_is_changed_on_a_model_is_saved_as_the_model_uses_it(folders, tmp_path, name, field, value):
    model = AutoModelForCausalLM.from_pretrained(folders / name)
    built, ids = getattr(model.config, field), torch.arange(1, 9)[None]
    setattr(model.config, field, value)
    with pytest.warns(
        FamilyWarning, match=f"changed after the model was made: `{field}` to {value!r}.*{built!r} is saved"
    ):
        model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=0, atol=0)


def test_a_gate_without_weights_in_the_checkpoint_is_named(folders, tmp_path):
    shutil.copytree(folders / "llama", tmp_path, dirs_exist_ok=True)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"attention_gate": "sdpa"}))
    (message,) = warnings_of(tmp_path)
    assert "has the `attention_gate` 'sdpa', but its weights hold no tensors of it" in message


def test_a_field_of_another_version_is_named(folders, tmp_path):
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folders / "retrofit")
    model.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields |= {"attn_res_softness": 2.0, "mhc_rank": 3, "some_note": "mine"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    messages = warnings_of(tmp_path)
    assert {message.split("`")[1] for message in messages} == {"attn_res_softness", "mhc_rank"}
    assert any("(2.0) is not a field of this version" in message for message in messages)


@pytest.mark.parametrize(
    ("written", "meant"), [("attn_res_blocksize", "attn_res_block_size"), ("scale_form", "scaled_form")]
)
def test_a_misspelt_field_is_named_with_the_right_spelling(written, meant):
    with pytest.warns(FamilyWarning, match=f"`{written}`.*Did you mean `{meant}`"):
        AttnResConfig(**{written: 2})


def test_no_field_of_a_backbone_causes_a_warning(backbones):
    with warnings.catch_warnings():
        warnings.simplefilter("error", FamilyWarning)
        for case in backbones.CASES:
            backbones.member_config(case)


@torch.no_grad()
@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        ({}, "To keep it, pass attn_res_scale='sum', or call `attnres.conversion.retrofit`."),
        ({"attn_res_scale": "sum"}, None),
        ({"residual_connection": "standard"}, None),
        ({"residual_connection": "denseformer"}, None),
        (
            {"residual_connection": "residual_scalars", "residual_scalars_start": "nanochat"},
            "pass residual_scalars_start=",
        ),
        ({"residual_connection": "post_norm"}, "become 'post_norm' at their start, which changes the function"),
    ],
    ids=str,
)
def test_a_backbones_checkpoint_whose_function_a_class_of_the_family_changes_causes_a_warning(
    folders, backbones, fields, remedy
):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = AttnResLlamaForCausalLM.from_pretrained(folders / "source", **fields)
    messages = [str(warning.message) for warning in caught if warning.category is FamilyWarning]
    assert [remedy in message for message in messages] == [True] * (remedy is not None)
    if remedy is None:
        logits = [each(backbones.token_ids()).logits for each in (backbones.build("llama"), model)]
        assert torch.allclose(*logits, rtol=0, atol=1e-4)
