"""The family on every backbone: Auto classes, the equations, recorded outputs, generation, configurations.

`tests/conversion` tests retrofits; `test_backbone_*.py` and `test_add_backbone.py` test checkpoints, training and new
backbones.
"""

import copy
import json
import pickle

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.utils import logging

import attnres
from attnres import BACKBONES, CONNECTIONS
from attnres.residual_attnres import residual_tensors

from ..caches import CACHE
from ..cases import each_once

release = Version(transformers.__version__)
CASES = [*sorted(BACKBONES), "gpt_neox, sequential", "llama, tied"]
# One of each form: pre-norm, norm after, sandwich, multipliers, parallel, experts.
FORMS = ["llama", "olmo2", "gemma3_text", "granite", "gpt_neox", "mixtral"]
AUTO_CLASSES = {
    AutoModel: "Model",
    AutoModelForCausalLM: "ForCausalLM",
    AutoModelForSequenceClassification: "ForSequenceClassification",
}
RECORD = {"output_hidden_states": True, "output_depth_attentions": True}


def relative_difference(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


# ---- Names


@pytest.mark.parametrize("backbone", sorted(BACKBONES))
def test_the_auto_classes_find_every_model(backbones, backbone):
    config = backbones.member_config(backbone)
    assert config.model_type == ("attnres" if backbone == "kimi_linear" else f"attnres_{backbone}")
    for auto_class, suffix in AUTO_CLASSES.items():
        with torch.device("meta"):
            model = auto_class.from_config(config)
        name = type(model).__name__
        assert name.startswith("AttnRes") and name.endswith(suffix)
        assert getattr(attnres, name) is type(model)
        assert type(model.config) is type(config)


def test_a_class_is_named_after_that_of_its_backbone():
    for names in (
        ["LlamaConfig", "LlamaModel", "LlamaForCausalLM", "LlamaForSequenceClassification"],
        ["LlamaForQuestionAnswering", "LlamaForTokenClassification", "Gemma2ForTokenClassification"],
        ["Qwen3Config", "Qwen3ForCausalLM", "Qwen3MoeConfig", "Qwen3MoeForCausalLM"],
        ["Gemma3TextConfig", "Gemma3TextModel", "Gemma3ForCausalLM", "GPTNeoXForSequenceClassification"],
    ):
        for name in names:
            assert getattr(attnres, f"AttnRes{name}").__name__ == f"AttnRes{name}"
    for name in ("AttnResGPT2ForCausalLM", "AttnResGemma2ForQuestionAnswering", "LlamaForCausalLM", "depth"):
        with pytest.raises(AttributeError, match=name):
            getattr(attnres, name)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("AttnResLLamaForCausalLM", " Did you mean `AttnResLlamaForCausalLM`?"),
        ("ad_backbone", " Did you mean `add_backbone`?"),
        ("retrofit", " It is in another module: `from attnres.conversion import retrofit`."),
        ("conversion", " It is a module: `import attnres.conversion` first."),
        ("conversion.retrofit", ""),
        ("_anything", ""),
    ],
)
def test_an_unknown_name_of_the_package_gets_the_place_or_a_similar_name(name, remedy, monkeypatch):
    monkeypatch.delattr(attnres, name, raising=False)  # another test may have imported the module
    with pytest.raises(AttributeError) as caught:
        getattr(attnres, name)
    assert str(caught.value) == f"module 'attnres' has no attribute {name!r}.{remedy}"


# ---- The equations


def queries_and_norms(model) -> tuple[list[Tensor], list[Tensor]]:
    """Return `w_l` and `g_l` of the sublayers in order, and of the output."""
    tensors = residual_tensors(model)
    names = [name.removesuffix("_proj.weight") for name in tensors if name.endswith("_proj.weight")]
    # The decoder registers the tensors of the output before the layers, so they are moved to the end.
    names.sort(key=lambda name: "output_attn_res" in name)
    return [tensors[f"{name}_proj.weight"][0] for name in names], [tensors[f"{name}_norm.weight"] for name in names]


@torch.no_grad()
@pytest.mark.parametrize(("case", "block_size", "scale"), each_once(FORMS, [3, 3, 1], ["mean", "sum"]))
def test_every_form_of_a_decoder_follows_the_equations(backbones, case, block_size, scale):
    # An epsilon large enough to matter.
    eps = {"layer_norm_eps" if case == "gpt_neox" else "rms_norm_eps": 0.1}
    model = backbones.build_member(case, attn_res_block_size=block_size, attn_res_scale=scale, **eps)
    standard, token_ids = backbones.build(case, **eps), backbones.token_ids()
    read = backbones.depth_recurrence(*queries_and_norms(model), block_size, scale, 0.1)
    expected = backbones.straight_line(standard, token_ids, read)
    assert expected.abs().max() >= 5
    assert relative_difference(standard(token_ids).logits, expected) > 0.05
    assert relative_difference(model(token_ids).logits, expected) <= 1e-4

    first = model(token_ids[:, :7], use_cache=True)
    last = model(token_ids[:, 7:], **{CACHE: first[CACHE]})
    assert relative_difference(torch.cat([first.logits, last.logits], dim=1), expected) <= 1e-4


def test_each_form_of_a_layer_has_its_sublayers(backbones):
    layers = backbones.COMMON["num_hidden_layers"]
    for case, sublayers in (("llama", 2 * layers), ("gpt_neox", 8), ("gpt_neox, sequential", 2 * layers)):
        assert backbones.member_config(case).num_sublayers == sublayers


@pytest.mark.parametrize("case", CASES)
def test_the_standard_connection_equals_the_backbone_to_the_last_bit(backbones, case):
    standard, token_ids = backbones.build(case), backbones.token_ids()
    model = backbones.build_member(case, residual_connection="standard")
    assert list(model.state_dict()) == list(standard.state_dict())
    expected, found = (some(token_ids, labels=token_ids, output_hidden_states=True) for some in (standard, model))
    assert torch.equal(found.logits, expected.logits)
    assert len(found.hidden_states) == len(expected.hidden_states) == len(model.base_model.layers) + 1
    assert all(map(torch.equal, found.hidden_states, expected.hidden_states))
    for outputs in (expected, found):
        outputs.loss.backward()
    gradients = {name: parameter.grad for name, parameter in standard.named_parameters()}
    for name, parameter in model.named_parameters():
        assert (gradients[name] is None) == (parameter.grad is None), name
        assert parameter.grad is None or torch.equal(parameter.grad, gradients[name]), name


# ---- Recorded outputs


@torch.no_grad()
@pytest.mark.parametrize("case", [*FORMS, "gpt_neox, sequential", "kimi_linear"])
def test_depth_weights_and_hidden_states_are_recorded(backbones, case):
    token_ids = backbones.token_ids()
    model = backbones.build_member(case, attn_res_block_size=3)
    layers, sublayers = len(model.base_model.layers), model.config.num_sublayers
    inputs: list[Tensor] = []
    for layer in model.base_model.layers:
        sublayer = getattr(layer, f"{layer.sublayers[0].name}_proj")
        sublayer.register_forward_hook(lambda module, args, output: inputs.append(output[0]))

    outputs = model(token_ids, **RECORD)
    assert len(outputs.hidden_states) == layers + 1
    assert all(map(torch.equal, outputs.hidden_states, inputs))
    assert torch.equal(outputs.hidden_states[-1], model.base_model(token_ids).last_hidden_state)

    assert len(outputs.depth_attentions) == sublayers + 1
    for l, weights in enumerate(outputs.depth_attentions):  # noqa: E741
        assert weights.shape == (1 + -(-l // 3), *token_ids.shape)
        torch.testing.assert_close(weights.sum(0), torch.ones(token_ids.shape))
    assert outputs.depth_attentions[-1].std(dim=(1, 2)).min() > 1e-3

    logits, *rest = model(token_ids, **RECORD, return_dict=False)
    assert torch.equal(logits, outputs.logits)
    assert all(map(torch.equal, rest[-1], outputs.depth_attentions))
    assert all(map(torch.equal, rest[-2], outputs.hidden_states))
    assert model(token_ids).depth_attentions is None


@torch.no_grad()
@pytest.mark.parametrize("case", ["llama", "gpt_neox", "mixtral"])
def test_the_base_model_and_the_classifier_record_the_same(backbones, case):
    token_ids, fields = backbones.token_ids(), {"attn_res_block_size": 3}
    expected = backbones.build_member(case, **fields)(token_ids, **RECORD)
    base = backbones.build_member(case, AutoModel, **fields)(token_ids, **RECORD)
    classifier = backbones.build_member(case, AutoModelForSequenceClassification, num_labels=3, **fields)
    scores = classifier(token_ids, **RECORD)
    assert scores.logits.shape == (2, 3)
    assert torch.equal(base.last_hidden_state, expected.hidden_states[-1])
    torch.testing.assert_close(scores.logits, classifier.score(expected.hidden_states[-1][:, -1]))
    for outputs in (base, scores):
        for name in ("hidden_states", "depth_attentions"):
            assert len(outputs[name]) == len(expected[name])
            assert all(map(torch.equal, outputs[name], expected[name]))


@torch.no_grad()
@pytest.mark.parametrize("case", ["deepseek_v3", "mixtral", "qwen3_moe"])
def test_router_logits_and_their_loss_equal_those_of_the_backbone(backbones, case):
    token_ids = backbones.token_ids()
    if case == "deepseek_v3" and release < Version("5.19"):
        pytest.skip("DeepSeek-V3 of this transformers returns no router logits")
    asked = {"labels": token_ids, "output_router_logits": True}
    expected = backbones.build(case)(token_ids, **asked)
    found = backbones.build_member(case, residual_connection="standard")(token_ids, **asked)
    assert len(found.router_logits) == len(expected.router_logits) > 0
    assert all(map(torch.equal, found.router_logits, expected.router_logits))
    assert torch.equal(found.loss, expected.loss)
    if case != "deepseek_v3":  # balances its experts by a bias and has no such loss
        assert torch.equal(found.aux_loss, expected.aux_loss)


# ---- Generation and the implementation of attention


@pytest.mark.parametrize("case", ["llama", "gpt_neox"])
def test_a_misspelt_argument_of_generate_is_refused(backbones, case):
    model, token_ids = backbones.build_member(case), backbones.token_ids()
    with pytest.raises(ValueError, match="attention_maks"):
        model.generate(token_ids, attention_maks=torch.ones_like(token_ids), max_new_tokens=1)


@torch.no_grad()
@pytest.mark.parametrize("case", ["llama", "gpt_neox", "gemma3_text"])
def test_the_first_layers_can_draft_tokens_that_the_whole_model_verifies(backbones, case):
    """For a draft, `transformers` runs fewer layers by a smaller `num_hidden_layers` in the configuration."""
    if case == "gemma3_text" and release < Version("5.19"):
        pytest.skip("with this transformers it fails for the backbone itself, in the masks of its sliding windows")
    model, token_ids = backbones.build_member(case, attn_res_block_size=3), backbones.token_ids()[:1]
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    expected = model.generate(token_ids, **options)
    first_two = backbones.build_member(case, attn_res_block_size=3)
    first_two.config.num_hidden_layers = 2
    shallow = copy.deepcopy(first_two)
    shallow.base_model.layers = shallow.base_model.layers[:2]
    assert torch.equal(first_two(token_ids).logits, shallow(token_ids).logits)
    assert torch.equal(model.generate(token_ids, assistant_early_exit=2, **options), expected)


def test_a_custom_loss_function_is_called_as_for_a_backbone(backbones):
    model, token_ids = backbones.build_member("llama"), backbones.token_ids()
    model.loss_function = lambda logits, labels, vocab_size: logits.sum()
    outputs = model(token_ids, labels=token_ids)
    assert torch.equal(outputs.loss, outputs.logits.sum())


@torch.no_grad()
@pytest.mark.parametrize("case", ["llama", "gpt_neox", "gemma3_text"])
def test_the_implementation_of_attention_can_be_chosen(backbones, case, monkeypatch):
    calls = []
    sdpa = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *args, **kwargs: calls.append(1) or sdpa(*args, **kwargs),
    )
    # Soft caps of attention are for eager attention alone, in the backbone too.
    fields = {"attn_logit_softcapping": None} if "gemma" in case else {}
    model, token_ids = backbones.build_member(case, **fields), backbones.token_ids()
    layers = len(model.base_model.layers)
    logits = {}
    for implementation, expected_calls in (("sdpa", layers), ("eager", 0), ("sdpa", layers)):
        model.set_attn_implementation(implementation)
        calls.clear()
        outputs = model(token_ids, output_attentions=implementation == "eager")
        assert len(calls) == expected_calls
        if implementation == "eager":
            assert len(outputs.attentions) == layers
        logits[implementation] = outputs.logits
    assert relative_difference(logits["eager"], logits["sdpa"]) <= 1e-4
    # The same when a model is made.
    model = AutoModelForCausalLM.from_config(model.config, attn_implementation="eager")
    calls.clear()
    model(token_ids)
    assert model.config._attn_implementation == "eager" and not calls


# ---- Copies and configurations


@torch.no_grad()
@pytest.mark.parametrize("case", ["llama", "gpt_neox"])
def test_a_model_can_be_copied_and_pickled(backbones, case):
    model, token_ids = backbones.build_member(case), backbones.token_ids()
    pickled = pickle.dumps(model)
    expected = model(token_ids, **RECORD)  # installs hooks, which a deep copy copies, as for a backbone
    for other in (copy.deepcopy(model), pickle.loads(pickled)):
        assert type(other) is type(model)
        found = other(token_ids, **RECORD)
        assert torch.equal(found.logits, expected.logits)
        assert len(found.depth_attentions) == len(expected.depth_attentions)
        other.base_model.output_attn_res_proj.weight.add_(1.0)
        assert not torch.equal(other(token_ids).logits, expected.logits)
        assert torch.equal(model(token_ids).logits, expected.logits)


@pytest.mark.parametrize("case", CASES)
def test_a_configuration_reads_back_equal(backbones, case, tmp_path):
    config = backbones.member_config(case, attn_res_block_size=3, attn_res_scale="sum", residual_connection="standard")
    config.save_pretrained(tmp_path)
    read = AutoConfig.from_pretrained(tmp_path)
    assert type(read) is type(config)
    assert read.to_dict() | {"_name_or_path": ""} == config.to_dict()
    assert (read.attn_res_block_size, read.attn_res_scale, read.residual_connection) == (3, "sum", "standard")
    assert pickle.loads(pickle.dumps(config)).to_dict() == config.to_dict()


@pytest.mark.parametrize("case", CASES)
def test_a_configuration_of_the_backbone_is_read_completely_and_without_a_warning(backbones, case, tmp_path, caplog):
    standard = backbones.build(case).config
    standard.save_pretrained(tmp_path)
    config_class = type(backbones.member_config(case))
    logging.enable_propagation()
    config = config_class.from_pretrained(tmp_path, attn_res_scale="sum")
    logging.disable_propagation()
    assert "a model of type" not in caplog.text
    assert config.model_type.startswith("attnres")
    assert config.attn_res_scale == "sum"
    identity = ("model_type", "transformers_version")
    differing = {
        name: value
        for name, value in standard.to_dict().items()
        if name not in identity and config.to_dict()[name] != value
    }
    assert not differing


WRONG = [
    ("attn_res_block_size", 0, "an integer >= 1 (block size in sublayers)"),
    ("attn_res_block_size", 2.5, "an integer >= 1 (block size in sublayers)"),
    ("attn_res_scale", "max", "one of 'mean', 'sum'"),
    ("residual_connection", "hyper", f"one of {', '.join(map(repr, CONNECTIONS))}"),
]


@pytest.mark.parametrize(
    ("case", "field", "value", "allowed"), [(case, *field) for case, field in each_once(FORMS, WRONG)]
)
def test_a_wrong_field_is_refused_however_it_was_set(backbones, case, field, value, allowed, tmp_path):
    config = backbones.member_config(case)
    message = f"`{field}` is {value!r}, but must be {allowed}."

    def refused(make) -> bool:
        with pytest.raises(ValueError) as error:
            make()
        return str(error.value) == message

    assert refused(lambda: backbones.member_config(case, **{field: value}))
    config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    assert refused(lambda: AutoConfig.from_pretrained(tmp_path))
    setattr(config, field, value)
    for auto_class in AUTO_CLASSES:
        with torch.device("meta"):
            assert refused(lambda: auto_class.from_config(config))  # noqa: B023
