"""The named configurations match the published models, and load by name, by path and with overrides."""

from dataclasses import fields
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, KimiLinearConfig, KimiLinearForCausalLM

from attnres import AttnResConfig, AttnResForCausalLM
from attnres.attn_res_switches_attnres import SWITCHES
from attnres.configuration import count_parameters, load, names

# Name -> activated non-embedding parameters in millions: from the paper's table, and counted with `standard`.
SCALING_TABLE = {
    "attnres-194m": (194, 190.9),
    "attnres-241m": (241, 238.5),
    "attnres-296m": (296, 293.4),
    "attnres-436m": (436, 431.5),
    "attnres-528m": (528, 524.9),
}
NAMES = tuple(sorted([*SCALING_TABLE, "attnres-48b-a3b", "attnres-tiny"]))
KIMI_K3 = ("attnres-k3-tiny", "kimi-k3")

README = Path(__file__).parents[2] / "configuration" / "README.md"

# Overrides that make a model narrow enough to run, with the depth and the blocks of the named model.
NARROW = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "linear_head_dim": 8,
    "linear_num_heads": 1,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

every_name = pytest.mark.parametrize("name", NAMES)
every_scaling_name = pytest.mark.parametrize("name", SCALING_TABLE)


def on_meta(model_class, config):
    with torch.device("meta"):
        return model_class(config)


def sources_at_output(config: AttnResConfig) -> int:
    """Return the number of sources that a forward pass records at the output."""
    model = AttnResForCausalLM(config).eval()
    with torch.no_grad():
        outputs = model(torch.tensor([[3, 4]]), output_depth_attentions=True, use_cache=False)
    return outputs.depth_attentions[-1].shape[0]


def in_readable_units(number: int) -> str:
    return f"{number / 1e9:.2f}B" if number >= 1e9 else f"{number / 1e6:.1f}M"


def full_attention_layers(config: AttnResConfig) -> list[int]:
    """Return the numbers of the layers, counted from one as in the published configuration."""
    return [i for i, layer_type in enumerate(config.layer_types, start=1) if layer_type == "full_attention"]


def test_the_names_are_the_names_of_the_directories():
    assert names() == tuple(sorted([*NAMES, *KIMI_K3]))


@every_name
def test_every_configuration_is_block_attn_res_with_mean_scale(name):
    config = load(name)
    assert type(config) is AttnResConfig
    assert (config.residual_connection, config.attn_res_scale) == ("attn_res", "mean")
    assert config.attn_res_block_size > 1


@every_name
def test_the_directory_loads_with_auto_config(name):
    from_directory = AutoConfig.from_pretrained(files("attnres.configuration") / name)
    assert type(from_directory) is AttnResConfig
    assert from_directory.to_dict() == load(name).to_dict() | {"_name_or_path": from_directory.name_or_path}


@every_name
def test_saving_and_loading_changes_nothing(name, tmp_path):
    load(name).save_pretrained(tmp_path)
    reloaded = AutoConfig.from_pretrained(tmp_path)
    added = {"_name_or_path": str(tmp_path), "auto_map": reloaded.auto_map}
    assert reloaded.to_dict() == load(name).to_dict() | added


@every_name
def test_the_architecture_names_the_class_that_the_auto_class_builds(name):
    config = load(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert config.architectures == [type(model).__name__]


@every_name
def test_special_tokens_are_distinct_and_in_the_vocabulary(name):
    config = load(name)
    special_tokens = {config.pad_token_id, config.bos_token_id, config.eos_token_id}
    assert len(special_tokens) == 3
    assert all(0 <= token < config.vocab_size for token in special_tokens)


@every_name
def test_the_standard_baseline_has_the_tensors_of_kimi_linear(name):
    config = load(name, residual_connection="standard")
    kimi_config = KimiLinearConfig(**{field.name: getattr(config, field.name) for field in fields(KimiLinearConfig)})
    ours = on_meta(AttnResForCausalLM, config).state_dict()
    kimis = on_meta(KimiLinearForCausalLM, kimi_config).state_dict()
    assert {key: tensor.shape for key, tensor in ours.items()} == {key: tensor.shape for key, tensor in kimis.items()}


@every_scaling_name
def test_activated_parameters_match_the_scaling_table(name):
    papers, ours = SCALING_TABLE[name]
    activated = count_parameters(load(name)).activated_non_embedding
    activated_in_baseline = count_parameters(load(name, residual_connection="standard")).activated_non_embedding
    assert round(activated_in_baseline / 1e6, 1) == ours
    for count in (activated, activated_in_baseline):
        assert abs(count / 1e6 / papers - 1) < 0.02


@every_scaling_name
def test_scaling_models_are_three_parts_kda_to_one_part_mla(name):
    config = load(name)
    assert full_attention_layers(config) == list(range(4, config.num_hidden_layers + 1, 4))


@every_scaling_name
def test_scaling_models_share_the_fields_that_the_paper_keeps_fixed(name):
    config = load(name)
    assert config.num_attention_heads == config.linear_num_heads == config.num_hidden_layers
    assert (config.linear_head_dim, config.v_head_dim, config.qk_nope_head_dim) == (128, 128, 128)
    assert (config.num_local_experts, config.num_experts_per_tok, config.n_shared_experts) == (256, 8, 1)
    assert (config.max_position_embeddings, config.vocab_size) == (8192, 163840)


@every_scaling_name
def test_scaling_models_have_about_eight_blocks(name):
    config = load(name)
    sublayers = 2 * config.num_hidden_layers
    nearest_to_eight = min(range(1, sublayers + 1), key=lambda block_size: abs(sublayers / block_size - 8))
    assert config.attn_res_block_size == nearest_to_eight
    assert sources_at_output(load(name, **NARROW)) - 1 in (7, 8, 9)


@every_name
def test_the_table_of_the_readme_matches_the_configuration(name):
    config = load(name)
    count = count_parameters(load(name, residual_connection="standard"))
    sizes = [in_readable_units(n) for n in (count.total, count.non_embedding, count.activated_non_embedding)]
    sources = sources_at_output(load(name, **NARROW))
    cells = [config.num_hidden_layers, config.hidden_size, *sizes, config.attn_res_block_size, sources - 1, sources]
    assert f"| `{name}` | {' | '.join(map(str, cells))} |" in README.read_text(encoding="utf-8").splitlines()


def test_48b_has_the_published_size():
    assert round(count_parameters(load("attnres-48b-a3b")).non_embedding / 1e9, 1) == 48.4


def test_48b_has_the_published_layer_pattern_which_is_not_the_default():
    config = load("attnres-48b-a3b")
    assert full_attention_layers(config) == [4, 8, 12, 16, 20, 24, 27]
    assert config.layer_types != AttnResConfig().layer_types
    assert config.mlp_layer_types == ["dense"] + ["sparse"] * 26


def test_48b_reads_ten_sources_at_its_output():
    assert sources_at_output(load("attnres-48b-a3b", **NARROW)) == 10


def test_tiny_is_small_and_has_every_kind_of_layer():
    config = load("attnres-tiny")
    assert 1e6 < count_parameters(config).total < 3e6
    assert set(config.layer_types) == {"linear_attention", "full_attention"}
    assert set(config.mlp_layer_types) == {"dense", "sparse"}
    assert full_attention_layers(config) == [4, 8]


def test_tiny_learns_a_batch_in_a_few_steps():
    torch.manual_seed(0)
    model = AttnResForCausalLM(load("attnres-tiny")).train()
    token_ids = torch.randint(3, model.config.vocab_size, (2, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(6):
        loss = model(input_ids=token_ids, labels=token_ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 2


def test_a_misspelt_name_is_refused_with_the_right_spelling():
    with pytest.raises(ValueError, match=r"There is no configuration 'attnres-tinny'; .* Did you mean `attnres-tiny`"):
        load("attnres-tinny")


def test_an_unknown_name_is_refused_with_all_names():
    with pytest.raises(ValueError, match=r"'attnres-1b'; the configurations are attnres-194m, .*, attnres-tiny"):
        load("attnres-1b")


@pytest.mark.parametrize("not_a_name", ["", "..", "attnres-tiny/config.json"])
def test_a_path_is_not_a_name(not_a_name):
    with pytest.raises(ValueError, match="There is no configuration"):
        load(not_a_name)


def test_a_misspelt_field_is_refused_with_the_right_spelling():
    with pytest.raises(ValueError, match=r"`residual_conection` is not a field .* Did you mean `residual_connection`"):
        load("attnres-tiny", residual_conection="standard")


def test_an_unknown_field_unlike_any_other_is_refused_with_all_fields():
    with pytest.raises(ValueError, match=r"`zzz` is not a field .* There is .*attn_res_block_size.*vocab_size"):
        load("attnres-tiny", zzz=1)


def test_a_value_that_the_configuration_refuses_is_refused():
    with pytest.raises(ValueError, match="`attn_res_block_size` is 0"):
        load("attnres-tiny", attn_res_block_size=0)


def test_overrides_replace_only_their_fields():
    overrides = {"residual_connection": "standard", "attn_res_block_size": 1, "vocab_size": 77}
    expected = load("attnres-tiny").to_dict() | overrides
    # Only the connection `attn_res` has its fields, including those that the file leaves out.
    expected = {field: value for field, value in expected.items() if field not in SWITCHES}
    assert load("attnres-tiny", **overrides).to_dict() == expected


def test_an_override_by_the_checkpoints_name_of_a_field_is_saved_under_it():
    # Kimi Linear saves `num_local_experts` as `num_experts`, so an override must change both.
    config = load("attnres-tiny", num_local_experts=4)
    assert config.num_local_experts == config.to_dict()["num_experts"] == 4


def test_settings_that_are_not_fields_are_accepted():
    config = load("attnres-tiny", num_labels=5, attn_implementation="eager", experts_implementation="eager")
    assert (config.num_labels, config._attn_implementation, config._experts_implementation) == (5, "eager", "eager")


def test_a_configuration_of_fewer_layers_keeps_the_first_ones():
    config = load("attnres-48b-a3b", num_hidden_layers=8)
    assert full_attention_layers(config) == [4, 8]
    assert config.mlp_layer_types == ["dense"] + ["sparse"] * 7


def test_an_overridden_pattern_is_kept():
    pattern = ["full_attention", "linear_attention"]
    config = load("attnres-tiny", num_hidden_layers=2, layer_types=pattern)
    assert (config.layer_types, config.mlp_layer_types) == (pattern, ["dense", "sparse"])


def test_more_layers_need_a_pattern_of_that_length():
    with pytest.raises(ValueError, match=r"`layer_types` is .* a list of length 9"):
        load("attnres-tiny", num_hidden_layers=9)
    pattern = ["linear_attention"] * 8 + ["full_attention"]
    config = load("attnres-tiny", num_hidden_layers=9, layer_types=pattern, mlp_layer_types=["dense"] * 9)
    assert config.layer_types == pattern


def test_too_few_layers_for_any_full_attention_are_refused():
    with pytest.raises(ValueError, match="at least one 'full_attention' layer"):
        load("attnres-tiny", num_hidden_layers=3)
