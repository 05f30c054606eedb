"""Pseudo-queries start at zero and key norms at one, however a model comes into being."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from attnres import AttnResForCausalLM, AttnResForSequenceClassification, AttnResModel
from attnres.conversion.family import backbone_config
from attnres.residual_attnres import residual_tensors

HEADS = [AttnResModel, AttnResForCausalLM, AttnResForSequenceClassification]


def assert_attn_res_tensors_are_initial(model: torch.nn.Module) -> None:
    """Assert that every pseudo-query is zero and every key norm one: 2 of each per layer, and those of the output."""
    tensors = residual_tensors(model)
    queries = [tensor for name, tensor in tensors.items() if name.endswith("_proj.weight")]
    norms = [tensor for name, tensor in tensors.items() if name.endswith("_norm.weight")]
    assert len(queries) == len(norms) == 2 * model.config.num_hidden_layers + 1
    hidden = model.config.hidden_size
    assert all(torch.equal(query, torch.zeros(1, hidden)) for query in queries)
    assert all(torch.equal(norm, torch.ones(hidden)) for norm in norms)


@pytest.fixture(params=HEADS)
def head(request) -> type:
    return request.param


def test_a_new_model_has_initial_values(head, tiny_config):
    assert_attn_res_tensors_are_initial(head(tiny_config()))


def test_a_model_made_from_its_configuration_in_half_precision_has_initial_values(head, tiny_config):
    model = head._from_config(tiny_config(), dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in residual_tensors(model).values()} == {torch.bfloat16}
    assert_attn_res_tensors_are_initial(model.float())


@pytest.mark.parametrize("member", ["attnres", "attnres_llama"])
def test_the_same_seed_gives_the_same_weights_as_the_backbone_alone(member, tiny_config):
    shape = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = tiny_config() if member == "attnres" else AutoConfig.for_model(member, **shape)

    def state(some_config) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(some_config).state_dict()

    backbone, ours = state(backbone_config(config)), state(config)
    assert all(torch.equal(ours[name], tensor) for name, tensor in backbone.items())


@pytest.mark.parametrize("initialise", ["init_weights", "initialize_weights"])
def test_a_model_materialised_from_the_meta_device_has_initial_values(head, tiny_config, initialise):
    with torch.device("meta"):
        model = head(tiny_config())
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}

    model.to_empty(device="cpu")
    for tensor in model.state_dict().values():
        tensor.fill_(torch.nan)
    getattr(model, initialise)()

    assert_attn_res_tensors_are_initial(model)
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())


def test_a_checkpoint_without_attn_res_tensors_loads_with_their_initial_values(head, tiny_config, tmp_path):
    saved = head(tiny_config())
    saved.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if "_res_" not in name}
    save_file(tensors, path, metadata={"format": "pt"})

    loaded, report = head.from_pretrained(tmp_path, output_loading_info=True)

    assert set(report["missing_keys"]) == set(residual_tensors(loaded))
    assert_attn_res_tensors_are_initial(loaded)
    for name, tensor in saved.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_loaded_attn_res_tensors_are_kept(tiny_model, tmp_path):
    saved = tiny_model()
    saved.save_pretrained(tmp_path)
    loaded = residual_tensors(AttnResForCausalLM.from_pretrained(tmp_path))
    for name, tensor in residual_tensors(saved).items():
        assert torch.equal(loaded[name], tensor), name
        assert tensor.std() > 0.1, name


def test_only_missing_heads_are_initialised_beside_loaded_attn_res_tensors(tiny_model, tmp_path):
    saved = tiny_model()
    saved.save_pretrained(tmp_path)
    loaded, report = AttnResForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert set(report["missing_keys"]) == {"score.weight"}
    for name, tensor in residual_tensors(saved).items():
        assert torch.equal(residual_tensors(loaded)[name], tensor), name


def test_the_standard_connection_has_nothing_to_initialise(tiny_config):
    assert residual_tensors(AttnResForCausalLM(tiny_config(residual_connection="standard"))) == {}
