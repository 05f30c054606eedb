"""Conversions keep the dtype of every tensor: routing biases in float32 beside weights in bfloat16."""

import json
import warnings

import pytest
import torch
from safetensors.torch import save_file
from transformers import KimiLinearForCausalLM, PreTrainedModel

from attnres.conversion import retrofit
from attnres.conversion.retrofit import retrofit_part
from attnres.residual_attnres import FamilyWarning, residual_tensors
from attnres.training.prepare import build_model
from attnres.training.recipe import Recipe

from .checkpoints import convert_well, tensors_of

BIASES = "e_score_correction_bias"


@pytest.fixture
def published(backbones, tmp_path):
    """Return a checkpoint like Kimi Linear's: bfloat16, but float32 routing biases that bfloat16 would round."""
    model = backbones.build("kimi_linear")
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith(BIASES):
                buffer.copy_(0.5 + 1e-4 * torch.arange(len(buffer)))
    folder = tmp_path / "published"
    model.save_pretrained(folder)
    tensors = {name: t if name.endswith(BIASES) else t.bfloat16() for name, t in tensors_of(folder).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return folder


def test_convert_keeps_the_dtype_and_the_bytes_of_every_tensor(published, tmp_path):
    convert_well(published, tmp_path / "out")
    before, after = tensors_of(published), tensors_of(tmp_path / "out")
    assert all(
        after[name].dtype == tensor.dtype and torch.equal(after[name], tensor) for name, tensor in before.items()
    )
    assert {after[name].dtype for name in after.keys() - before.keys()} == {torch.bfloat16}
    assert {tensor.dtype for name, tensor in after.items() if name.endswith(BIASES)} == {torch.float32}


def test_a_connection_that_is_kept_in_float32_is_added_in_float32(published, tmp_path):
    convert_well(published, tmp_path / "out", "--residual", "hyper_connections")
    before, after = tensors_of(published), tensors_of(tmp_path / "out")
    assert {after[name].dtype for name in after.keys() - before.keys()} == {torch.float32}
    model = retrofit(published, "hyper_connections")
    assert {tensor.dtype for tensor in residual_tensors(model).values()} == {torch.float32}


@pytest.mark.parametrize("names_dtype", [True, False])
def test_added_tensors_have_the_dtype_of_the_weights_and_not_of_a_bias(published, tmp_path, names_dtype):
    if not names_dtype:
        config = json.loads((published / "config.json").read_text())
        del config["dtype"]
        (published / "config.json").write_text(json.dumps(config))
        # Now the first tensor of the file is float32.
        tensors = {"a.unused": torch.ones(1)} | tensors_of(published)
        save_file(tensors, published / "model.safetensors", metadata={"format": "pt"})
    convert_well(published, tmp_path / "out")
    added = tensors_of(tmp_path / "out").keys() - tensors_of(published).keys()
    assert {tensors_of(tmp_path / "out")[name].dtype for name in added} == {torch.bfloat16}


def by_recipe(path) -> PreTrainedModel:
    return build_model(Recipe(str(path), ("a.txt",), "out", steps=1, retrofit={}), None)


@pytest.mark.parametrize("make", [retrofit, by_recipe])
def test_a_retrofit_of_a_directory_keeps_its_float32_biases(make, published):
    expected = {name: tensor for name, tensor in tensors_of(published).items() if name.endswith(BIASES)}
    before = KimiLinearForCausalLM._keep_in_fp32_modules_strict
    model = make(published)
    assert model.dtype == torch.bfloat16
    biases = [tensor for name, tensor in model.state_dict().items() if name.endswith(BIASES)]
    assert len(biases) == len(expected) > 0
    assert all(map(torch.equal, biases, expected.values()))
    assert KimiLinearForCausalLM._keep_in_fp32_modules_strict == before


def test_a_retrofit_of_a_rounded_model_has_its_biases_in_float32_and_warns(published, backbones):
    with torch.no_grad():
        source = KimiLinearForCausalLM.from_pretrained(published).bfloat16().eval()
        expected = source(backbones.token_ids()).logits
        with pytest.warns(FamilyWarning, match=rf"{BIASES}` of the model is in torch.bfloat16.*{published}"):
            model = retrofit(source, full=True)
        for name, bias in source.named_buffers():
            if name.endswith(BIASES):
                assert bias.dtype == torch.bfloat16, "the source must stay as it is"
                assert model.get_buffer(name).dtype == torch.float32
                assert torch.equal(model.get_buffer(name), bias.float())
        standard = retrofit_part(source, "standard")
        assert torch.equal(standard(backbones.token_ids()).logits, expected)


def test_a_model_whose_biases_are_not_rounded_causes_no_warning(published, backbones):
    fresh = backbones.build("kimi_linear")
    for name, buffer in fresh.named_buffers():
        if name.endswith(BIASES):
            buffer.zero_()
    in_float32 = KimiLinearForCausalLM.from_pretrained(published, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FamilyWarning)
        for source in (in_float32, published, fresh.bfloat16(), backbones.build("llama").bfloat16()):
            retrofit(source)


def test_a_bias_in_float32_is_shared_with_the_source(published):
    source = KimiLinearForCausalLM.from_pretrained(published, dtype=torch.float32)
    model = retrofit(source)
    biases = [name for name, _ in source.named_buffers() if name.endswith(BIASES)]
    assert biases and all(model.get_buffer(name) is source.get_buffer(name) for name in biases)
