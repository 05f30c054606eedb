"""Fields of Kimi K3 mean the same wherever they are given, under each of their names."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnres import AttnResKimiK3Config, AttnResKimiK3ForCausalLM
from attnres.configuration import load
from attnres.kimi_k3_configuration_attnres import decode

from . import kimi_k3_release as release

NAME = "attnres-k3-tiny"
# Each optional feature the other way, and what the shapes or functions of the model are then.
FEATURES: list[tuple[dict[str, Any], dict[str, Any], Callable[[torch.nn.Module], bool]]] = [
    (
        {"num_experts": None},
        {"num_experts": 8, "num_experts_per_token": 2},
        lambda m: not any("experts" in name for name in m.state_dict()),
    ),
    (
        {"num_local_experts": None},
        {"num_local_experts": 8, "num_experts_per_tok": 2},
        lambda m: not hasattr(m.model.layers[3].mlp, "gate"),
    ),
    ({"num_experts": 4}, {"num_experts": 8}, lambda m: len(m.model.layers[3].mlp.experts.down_proj) == 4),
    ({"num_shared_experts": 0}, {"num_shared_experts": 2}, lambda m: m.model.layers[3].mlp.shared_experts is None),
    ({"num_shared_experts": None}, {"n_shared_experts": 2}, lambda m: m.model.layers[3].mlp.shared_experts is None),
    ({"n_shared_experts": None}, {"n_shared_experts": 2}, lambda m: m.model.layers[3].mlp.shared_experts is None),
    ({"num_experts_per_token": 3}, {"num_experts_per_tok": 2}, lambda m: m.model.layers[3].mlp.gate.top_k == 3),
    ({"moe_renormalize": False}, {"norm_topk_prob": True}, lambda m: not m.model.layers[3].mlp.gate.norm_topk_prob),
    (
        {"num_expert_group": 2, "topk_group": 1},
        {"n_group": 1, "topk_group": 1},
        lambda m: m.config.num_expert_group == 2,
    ),
    ({"model_max_length": 64}, {"max_position_embeddings": 8192}, lambda m: m.config.max_position_embeddings == 64),
    (
        {"mla_use_output_gate": False},
        {"mla_use_output_gate": True},
        lambda m: not hasattr(m.model.layers[3].self_attn, "g_proj"),
    ),
    ({"q_lora_rank": None}, {"q_lora_rank": 48}, lambda m: not any("q_a_proj" in name for name in m.state_dict())),
    (
        {"gate_lower_bound": None},
        {"gate_lower_bound": -5.0},
        lambda m: m.model.layers[0].self_attn.forget_gate.lower_bound is None,
    ),
    (
        {"linear_attn_config": {"gate_lower_bound": -2.0}},
        {"gate_lower_bound": -5.0},
        lambda m: m.model.layers[0].self_attn.forget_gate.lower_bound == -2,
    ),
    (
        {"linear_attn_config": {"num_heads": 2}},
        {"linear_num_heads": 4},
        lambda m: m.model.layers[0].self_attn.b_proj.out_features == 2,
    ),
    (
        {"use_full_rank_gate": False},
        {"use_full_rank_gate": True},
        lambda m: hasattr(m.model.layers[0].self_attn, "g_a_proj"),
    ),
    (
        {"hidden_act": "silu"},
        {"hidden_act": "situ"},
        lambda m: m.model.layers[0].mlp.act_fn.of_gate is not None,
    ),
    (
        {"activation_situ_linear_beta": None},
        {"activation_situ_linear_beta": 25.0},
        lambda m: m.model.layers[0].mlp.act_fn.linear_beta is None,
    ),
    (
        {"latent_moe_use_norm": False},
        {"latent_moe_use_norm": True},
        lambda m: m.model.layers[3].mlp.routed_expert_norm is None,
    ),
    (
        {"routed_expert_hidden_size": None},
        {"routed_expert_hidden_size": 64},
        lambda m: not hasattr(m.model.layers[3].mlp, "routed_expert_up_proj"),
    ),
    ({"moe_layer_freq": 2}, {"moe_layer_freq": 1}, lambda m: not hasattr(m.model.layers[3].mlp, "experts")),
    ({"first_k_dense_replace": 4}, {"first_k_dense_replace": 1}, lambda m: not hasattr(m.model.layers[3].mlp, "gate")),
    (
        {"attn_res_block_size": None},
        {"attn_res_block_size": 2},
        lambda m: not any("_res_proj" in name for name in m.state_dict()),
    ),
]
IDS = [", ".join(f"{name}={value}" for name, value in change.items()) for change, _, _ in FEATURES]


def model_of(config: AttnResKimiK3Config) -> torch.nn.Module:
    with torch.device("meta"):
        return AttnResKimiK3ForCausalLM(config)


@pytest.fixture(scope="module")
def unchanged() -> torch.nn.Module:
    return model_of(load(NAME))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a directory with the `config.json` of the small named configuration."""
    folder = tmp_path_factory.mktemp("k3")
    load(NAME).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("change", "back", "has_changed"), FEATURES, ids=IDS)
def test_a_feature_is_switched_by_keyword_wherever_and_by_whichever_name(
    folder, unchanged, tmp_path, change, back, has_changed
):
    expected = load(NAME, **change)
    assert has_changed(model_of(expected))
    assert not has_changed(unchanged)
    changed = AttnResKimiK3Config.from_pretrained(folder, **change)
    assert changed.to_dict()["text_config"] == expected.to_dict()["text_config"]
    changed.save_pretrained(tmp_path)
    assert AttnResKimiK3Config.from_pretrained(tmp_path).to_dict() == changed.to_dict()
    assert not has_changed(model_of(AttnResKimiK3Config.from_pretrained(tmp_path, **back)))


@pytest.mark.parametrize(("change", "back", "has_changed"), FEATURES, ids=IDS)
def test_the_class_takes_each_field_by_keyword_and_by_whichever_name(change, back, has_changed):
    small = {"vocab_size": 32, "hidden_size": 8, "num_hidden_layers": 5, "num_local_experts": 8}
    small |= {"num_experts_per_tok": 2, "linear_num_heads": 4}
    second_names = AttnResKimiK3Config.attribute_map
    others = {name: value for name, value in small.items() if not {name, second_names.get(name)} & change.keys()}
    assert has_changed(model_of(AttnResKimiK3Config(**others, **change)))
    assert not has_changed(model_of(AttnResKimiK3Config(**small)))


def test_a_field_under_its_released_name_has_its_type_checked():
    for name in ("num_experts_per_token", "num_experts_per_tok", "num_expert_group", "moe_renormalize"):
        with pytest.raises(Exception, match=r"expected (int|bool)"):
            load(NAME, **{name: "2"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": 0}, "`num_experts` is 0, but must be an integer >= 2, or null"),
        ({"num_experts": "8"}, "`num_experts` is '8', but must be an integer >= 2, or null"),
        ({"num_experts": 1}, "`num_experts` is 1, but must be an integer >= 2, or null"),
        ({"num_shared_experts": -1}, "`num_shared_experts` is -1, but must be an integer >= 0"),
        ({"mla_use_output_gate": "no"}, "`mla_use_output_gate` is 'no', but must be true or false"),
        ({"use_full_rank_gate": 0}, "`use_full_rank_gate` is 0, but must be true or false"),
        ({"latent_moe_use_norm": None}, "`latent_moe_use_norm` is None, but must be true or false"),
        ({"first_k_dense_replace": -1}, "`first_k_dense_replace` is -1, but must be an integer >= 0"),
        ({"moe_layer_freq": 0}, "`moe_layer_freq` is 0, but must be an integer >= 1"),
        ({"attention_gate": None}, "`attention_gate` is None, but must be 'sdpa' .* Set `mla_use_output_gate` alone"),
        ({"attention_gate": "sdpa", "mla_use_output_gate": False}, "`attention_gate` is 'sdpa', but must be None"),
        ({"num_expert": 4}, "`num_expert` is not a field .* Did you mean `num_experts`"),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message) as error:
        load(NAME, **fields)
    assert "\n" not in str(error.value)


def test_a_text_model_of_a_file_is_not_taken_for_arguments():
    # Without its field, the decay of a release has no bound; that of an argument's default has one.
    text = release.text_fields(gate_lower_bound=...)
    assert AttnResKimiK3Config.from_dict(text).gate_lower_bound is None
    assert AttnResKimiK3Config(text_config=text).gate_lower_bound is None
    with pytest.raises(ValueError, match=r"fields come from a config.json.* `AttnResKimiK3Config.from_dict`"):
        AttnResKimiK3Config(**text)


def test_a_field_that_a_file_lacks_has_the_value_of_the_released_class():
    text = release.text_fields(first_k_dense_replace=..., rms_norm_eps=...)
    config = AttnResKimiK3Config.from_dict(text)
    assert config.first_k_dense_replace == 0 and config.mlp_layer_types[0] == "sparse"
    assert config.rms_norm_eps == 1e-6
    config = AttnResKimiK3Config.from_dict(release.text_fields(num_experts=...))
    assert config.num_local_experts is None and set(config.mlp_layer_types) == {"dense"}


@pytest.mark.parametrize(
    "fields", [{"rope_theta": 5e4}, {"seq_aux": True}, {"torchscript": False}, {"sliding_window": None}, {"moe_x": []}]
)
def test_a_field_without_an_effect_is_taken_without_a_word(fields):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = AttnResKimiK3Config.from_dict(release.text_fields(**fields))
    assert all(getattr(config, name) == value for name, value in fields.items())


@pytest.mark.parametrize("name", ["sliding_window", "num_memory_tokens", "full_attn_layers", "stage"])
def test_a_field_that_is_not_known_is_refused(name):
    with pytest.raises(ValueError, match=rf"`{name}` \(3\) may change what the model computes.* remove the field"):
        AttnResKimiK3Config.from_dict(release.text_fields() | {name: 3})


def test_a_model_without_experts_is_saved_with_the_fields_that_llama_cpp_takes():
    config = load(NAME, num_experts=None)
    text = config.to_dict()["text_config"]
    assert (text["num_experts"], text["num_experts_per_token"], text["first_k_dense_replace"]) == (None, 0, 8)
    again = AttnResKimiK3Config.from_dict(config.to_dict())
    assert again.mlp_layer_types == config.mlp_layer_types == ["dense"] * 8
    assert again.to_dict() == config.to_dict()


def test_fields_keep_the_order_of_the_file():
    file = load("attnres-k3-tiny").to_dict()
    fields = [*decode(file)]
    order = [fields.index(name) for name in file["text_config"] if name in fields and name not in file]
    assert order == sorted(order)
