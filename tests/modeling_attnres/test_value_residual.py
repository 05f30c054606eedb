"""Value residuals: their equation on two attentions, training, generation, storage, and what is refused."""

import copy
import pickle

import pytest
import torch
from accelerate import cpu_offload
from transformers import AutoConfig, AutoModelForCausalLM

from attnres import peft_modules_to_save
from attnres.attention_gate_attnres import gate_tensors
from attnres.configuration import load
from attnres.conversion import retrofit
from attnres.value_residual_attnres import VALUE_RESIDUAL_FIELDS, ValueResidual, value_residual_tensors

from . import test_attention_gate
from .connections import assert_same_gradients, cached_logits, gradients

build = test_attention_gate.build  # a fixture: models with vivid weights, coefficients of value residuals included
LLAMA = test_attention_gate.LLAMA
CASES = [
    {"value_residual": "half"},
    {"value_residual": "half", "residual_connection": "standard", "attention_gate": "value"},
    {"backbone": "kimi_linear", "layer_types": ["full_attention"] * 2, "value_residual": "standard"}
    | {"num_hidden_layers": 2, "mlp_layer_types": ["dense"] * 2},
]
# States of connections between layers: one tensor, a tuple of one, a tuple of several.
STATES = ["standard", "mhc", "attn_res"]


@torch.no_grad()
@pytest.mark.parametrize("fields", CASES, ids=str)
def test_values_are_mixed_with_those_of_the_first_layer_cached_and_uncached(build, token_ids, straight_line, fields):
    model = build(**fields)
    tensors = model.state_dict()
    expected = straight_line.logits(tensors, model.config, token_ids)
    without = {name: tensor for name, tensor in tensors.items() if "value_residual" not in name}
    assert (expected - straight_line.logits(without, model.config, token_ids)).abs().max() > 0.1
    for logits in (model(token_ids).logits, cached_logits(model, token_ids)):
        torch.testing.assert_close(logits.double(), expected, rtol=0, atol=test_attention_gate.TOLERANCE)


@torch.no_grad()
def test_the_cache_is_as_large_as_without(build, token_ids):
    caches = [build(**fields)(token_ids, use_cache=True).past_key_values for fields in ({}, CASES[0])]
    shapes = [[(layer.keys.shape, layer.values.shape) for layer in cache.layers] for cache in caches]
    assert shapes[0] == shapes[1]


def test_derivatives_equal_finite_differences():
    of = ValueResidual("half").double()
    new = {"dtype": torch.float64, "requires_grad": True}
    first, values = (torch.randn(2, 3, 4, **new) for _ in range(2))

    def mix(weight, first, values):
        return torch.func.functional_call(of, {"weight": weight}, (first, values))

    assert torch.autograd.gradcheck(mix, (torch.randn(2, **new), first, values))


@pytest.mark.parametrize("connection", STATES)
def test_checkpointing_gives_the_same_gradients(build, token_ids, connection):
    model = build(value_residual="half", residual_connection=connection).train()
    expected = gradients(model, token_ids)
    assert expected.keys() == dict(model.named_parameters()).keys()
    coefficients = value_residual_tensors(model)
    assert len(coefficients) == 2 and all((expected[name] != 0).all() for name in coefficients)
    for use_reentrant in (True, False):
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        assert_same_gradients(gradients(model, token_ids), expected, 1e-5)


@torch.no_grad()
def test_a_model_is_copied_pickled_saved_loaded_and_offloaded(build, token_ids, tmp_path):
    model = build(value_residual="half", residual_connection="mhc", attention_gate="sdpa")
    expected = model(token_ids).logits
    model.save_pretrained(tmp_path)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()) and loaded.config.value_residual == "half"
    others = [loaded, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), cpu_offload(model)]
    assert all(torch.equal(other(token_ids).logits, expected) for other in others)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in value_residual_tensors(half).values()} == {torch.float32}
    assert {tensor.dtype for tensor in gate_tensors(half).values()} == {torch.bfloat16}
    assert half(token_ids).logits.isfinite().all()


def test_coefficients_start_at_a_half_or_as_the_standard_model():
    for start, expected in (("half", [0.5, -0.5]), ("standard", [0.0, 0.0])):
        config = AutoConfig.for_model("attnres_llama", **LLAMA, value_residual=start)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        model.to_empty(device="cpu").init_weights()
        assert [tensor.tolist() for tensor in value_residual_tensors(model).values()] == [expected] * 2
    assert "value_residual" in peft_modules_to_save(model)
    assert VALUE_RESIDUAL_FIELDS.keys().isdisjoint(AutoConfig.for_model("attnres_llama", **LLAMA).to_dict())


@pytest.mark.parametrize("case", ["llama", "qwen3", "olmo2", "gemma3_text", "granite", "mixtral", "deepseek_v3"])
def test_a_retrofit_is_exact_and_learns(backbones, case):
    source, token_ids = backbones.build(case), backbones.token_ids()
    model = retrofit(source, "standard", value_residual="standard")
    outputs = model(token_ids, labels=token_ids)
    assert torch.equal(outputs.logits, source(token_ids).logits)
    outputs.loss.backward()
    coefficients = value_residual_tensors(model)
    assert coefficients and all((tensor.grad != 0).all() for tensor in coefficients.values())
    again = retrofit(model, "attn_res")  # trained coefficients stay
    assert all(again.get_parameter(name).data_ptr() == tensor.data_ptr() for name, tensor in coefficients.items())


@pytest.mark.parametrize(
    ("case", "value", "message"),
    [
        ("llama", "half", "is 'half', but must be 'standard' in a retrofit"),
        ("llama", "identity", "is 'identity', but must be one of None, 'half', 'standard'"),
        ("phi3", "standard", "the attention of 'phi3' has no v_proj or kv_a_layernorm"),
        ("gpt_neox", "standard", "the attention of 'gpt_neox' has no v_proj"),
        ("kimi_linear", "standard", "must be null where a layer has linear attention"),
    ],
)
def test_a_retrofit_that_is_not_possible_is_refused_in_one_line(backbones, case, value, message):
    with pytest.raises(ValueError, match=f"^`value_residual` .*{message}") as error:
        retrofit(backbones.build(case), "standard", value_residual=value)
    assert "\n" not in str(error.value)


def test_kimi_k3_and_a_second_retrofit_are_refused(backbones):
    config = load("attnres-k3-tiny")
    config.value_residual = "standard"
    with pytest.raises(ValueError, match=r"^`value_residual` is 'standard', but must be null"):
        AutoModelForCausalLM.from_config(config)
    model = retrofit(backbones.build("llama"), "standard", value_residual="standard")
    with pytest.raises(ValueError, match="has value_residual='standard' already"):
        retrofit(model, "attn_res", value_residual="standard")


def test_a_checkpoint_without_its_coefficients_warns(build, tmp_path):
    build(residual_connection="standard").save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="`value_residual` is None in its config.json, and 'half' here"):
        AutoModelForCausalLM.from_pretrained(tmp_path, value_residual="half")


def test_tensor_parallelism_sums_the_gradients_of_coefficients():
    plan = AutoConfig.for_model("attnres_llama", **LLAMA, value_residual="half").base_model_tp_plan
    assert plan["layers.*.self_attn.value_residual"] == "replicated_with_grad_allreduce"


@pytest.mark.slow
def test_a_model_compiles_to_one_graph(build, token_ids):
    model = build(value_residual="half", residual_connection="mhc", num_hidden_layers=2)
    model.set_attn_implementation("eager")
    expected = gradients(model, token_ids)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    compiled(token_ids, labels=token_ids, use_cache=False).loss.backward()  # on top of the gradients
    found = {name: parameter.grad - expected[name] for name, parameter in model.named_parameters()}
    assert_same_gradients(found, expected, 1e-3)
