"""Adapters of a mixture of experts: PEFT alone on a retrofit, and the recipe `lora` on a standard model."""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from attnres.conversion import retrofit
from attnres.training.lora import add_adapters

from .test_lora import MODELS, SMALL


@pytest.mark.parametrize("target_modules", ["all-linear", "the names of earlier releases"])
@pytest.mark.parametrize("backbone", ["mixtral", "qwen3_moe"])
def test_peft_adapts_the_experts_of_a_retrofit_as_those_of_its_source(backbone, target_modules, tmp_path):
    fields = {name: value for name, value in SMALL.items() if not name.startswith("attn_res")}
    source = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(backbone, **fields, **MODELS[f"attnres_{backbone}"])
    ).eval()
    if target_modules != "all-linear":
        experts = ["w1", "w2", "w3"] if backbone == "mixtral" else ["gate_proj", "up_proj", "down_proj"]
        target_modules = ["q_proj", *experts]
    config = LoraConfig(target_modules=target_modules, r=2, init_lora_weights=False)
    adapted = get_peft_model(copy.deepcopy(source), copy.deepcopy(config))
    number = sum(".experts." in name for name in trained_names(adapted))
    assert number
    assert sum(".experts." in name for name in trained_names(get_peft_model(retrofit(source), config))) == number

    adapted.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(retrofit(source), tmp_path).eval()
    ids = torch.arange(3, 15)[None]
    torch.testing.assert_close(loaded(ids).logits, adapted.eval()(ids).logits)


def trained_names(model: PeftModel) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def test_dense_layers_of_a_standard_mixture_have_adapters_too():
    fields = {name: value for name, value in SMALL.items() if not name.startswith("attn_res")}
    config = AutoConfig.for_model("qwen3_moe", **fields, **MODELS["attnres_qwen3_moe"])
    names = trained_names(add_adapters(AutoModelForCausalLM.from_config(config), rank=4))
    (dense,) = config.mlp_only_layers
    for projection in ("gate_proj", "up_proj", "down_proj"):
        assert f"base_model.model.model.layers.{dense}.mlp.{projection}.lora_A.default.weight" in names
