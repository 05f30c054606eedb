"""`count_parameters` counts correctly on the meta device, for AttnRes and for Kimi Linear."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, KimiLinearConfig

from attnres import AttnResForCausalLM
from attnres.configuration import count_parameters, load
from attnres.residual_attnres import residual_tensors
from attnres.training.parallel.pipeline_model import count_costs


def test_counts_equal_those_of_an_allocated_model(tiny_config):
    model = AttnResForCausalLM(tiny_config())
    count = count_parameters(model.config)
    biases = sum(buffer.numel() for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias"))
    assert biases > 0
    assert count.total == sum(parameter.numel() for parameter in model.parameters()) + biases
    embeddings = model.model.embed_tokens.weight.numel() + model.lm_head.weight.numel()
    assert count.non_embedding == count.total - embeddings


def test_the_total_is_the_number_of_values_in_a_saved_checkpoint(tiny_config, tmp_path):
    config = tiny_config()
    AttnResForCausalLM(config).save_pretrained(tmp_path)
    assert count_parameters(config).total == sum(map(torch.numel, load_file(tmp_path / "model.safetensors").values()))


def test_activated_parameters_equal_those_of_a_model_with_only_the_top_k_experts(tiny_config):
    config = tiny_config(num_local_experts=8, num_experts_per_tok=3)
    without_idle_experts = count_parameters(tiny_config(num_local_experts=3, num_experts_per_tok=3))
    router_rows = (8 - 3) * (config.hidden_size + 1) * config.mlp_layer_types.count("sparse")  # and their biases
    assert count_parameters(config).activated_non_embedding == without_idle_experts.non_embedding + router_rows


@pytest.mark.parametrize(
    ("model_type", "experts_field", "has_biases"),
    [
        ("mixtral", "num_local_experts", False),
        ("qwen3_moe", "num_experts", False),
        ("attnres_deepseek_v3", "n_routed_experts", True),
    ],
)
def test_the_experts_of_other_backbones_are_counted_alike(model_type, experts_field, has_biases):
    shape = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "n_group": 1}

    def count(num_experts: int):
        fields = {**shape, experts_field: num_experts, "num_experts_per_tok": 2, "topk_group": 1}
        return count_parameters(AutoConfig.for_model(model_type, first_k_dense_replace=0, **fields))

    router_rows = (8 - 2) * (32 + has_biases) * 2
    assert count(8).activated_non_embedding == count(2).non_embedding + router_rows


def test_packed_experts_are_counted_as_unpacked_ones():
    plain, packed = load("attnres-k3-tiny"), load("attnres-k3-tiny", packed_experts=True)
    assert count_parameters(packed) == count_parameters(plain)
    with torch.device("meta"):
        costs = [count_costs(AutoModelForCausalLM.from_config(config)) for config in (plain, packed)]
    assert costs[0] == costs[1]


def test_without_experts_every_parameter_is_activated(tiny_config):
    count = count_parameters(tiny_config(mlp_layer_types=["dense"] * 4))
    assert count.activated_non_embedding == count.non_embedding


def test_a_tied_embedding_counts_once(tiny_config):
    tied, untied = (count_parameters(tiny_config(tie_word_embeddings=tie)) for tie in (True, False))
    config = tiny_config()
    assert untied.total - tied.total == config.vocab_size * config.hidden_size
    assert tied.non_embedding == untied.non_embedding


def test_attn_res_adds_its_tensors_to_every_count(tiny_config):
    added = sum(tensor.numel() for tensor in residual_tensors(AttnResForCausalLM(tiny_config())).values())
    attn_res, standard = (count_parameters(tiny_config(residual_connection=name)) for name in ("attn_res", "standard"))
    assert added > 0
    assert attn_res.total - standard.total == added
    assert attn_res.non_embedding - standard.non_embedding == added
    assert attn_res.activated_non_embedding - standard.activated_non_embedding == added


def test_kimi_linear_has_the_counts_of_the_standard_baseline():
    standard = load("attnres-48b-a3b", residual_connection="standard")
    assert count_parameters(KimiLinearConfig(layer_types=standard.layer_types)) == count_parameters(standard)


def test_nothing_is_allocated(monkeypatch):
    devices = set()
    register_parameter = torch.nn.Module.register_parameter

    def record_device(module, name, parameter):
        if parameter is not None:
            devices.add(parameter.device.type)
        register_parameter(module, name, parameter)

    monkeypatch.setattr(torch.nn.Module, "register_parameter", record_device)
    count_parameters(load("attnres-tiny"))
    assert devices == {"meta"}


def test_counts_cannot_be_changed(tiny_config):
    with pytest.raises(AttributeError):
        count_parameters(tiny_config()).total = 0
