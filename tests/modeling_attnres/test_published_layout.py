"""Checkpoints in the layout of the published Kimi-Linear-48B-A3B load directly; only AttnRes tensors are new.

These tests write a small random checkpoint in two shards key by key, without the code under test.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, KimiLinearForCausalLM
from transformers.utils import logging

from attnres import AttnResConfig, AttnResForCausalLM, AttnResModel
from attnres.residual_attnres import residual_tensors

# The fields of the published config.json, with smaller numbers. Layers are counted from one.
CONFIG = {
    "architectures": ["KimiLinearForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_kimi.KimiLinearConfig",
        "AutoModel": "modeling_kimi.KimiLinearModel",
        "AutoModelForCausalLM": "modeling_kimi.KimiLinearForCausalLM",
    },
    "bos_token_id": 1,
    "dtype": "float32",
    "eos_token_id": 2,
    "first_k_dense_replace": 1,
    "head_dim": 12,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 64,
    "kv_lora_rank": 16,
    "linear_attn_config": {
        "full_attn_layers": [4, 5],
        "head_dim": 16,
        "kda_layers": [1, 2, 3],
        "num_heads": 2,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 4096,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 16,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 4,
    "num_expert_group": 2,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "num_hidden_layers": 5,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 2,
    "pad_token_id": 0,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "transformers_version": "4.57.1",
    "use_cache": True,
    "use_grouped_topk": True,
    "v_head_dim": 16,
    "vocab_size": 99,
}


def published_shapes() -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors of a published checkpoint with a configuration."""
    hidden, vocab, heads = CONFIG["hidden_size"], CONFIG["vocab_size"], CONFIG["num_attention_heads"]
    rank, nope, rope = CONFIG["kv_lora_rank"], CONFIG["qk_nope_head_dim"], CONFIG["qk_rope_head_dim"]
    kda = CONFIG["linear_attn_config"]
    kda_heads, kda_dim, kernel = kda["num_heads"], kda["head_dim"], kda["short_conv_kernel_size"]
    kda_width = kda_heads * kda_dim
    expert_width = CONFIG["moe_intermediate_size"]

    def mlp(prefix: str, width: int) -> dict[str, tuple[int, ...]]:
        names = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
        return {f"{prefix}.{name}.weight": shape for name, shape in names.items()}

    shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(CONFIG["num_hidden_layers"]):
        layer, attn = f"model.layers.{i}", f"model.layers.{i}.self_attn"
        shapes |= {f"{layer}.input_layernorm.weight": (hidden,), f"{layer}.post_attention_layernorm.weight": (hidden,)}
        if i + 1 in kda["kda_layers"]:
            shapes |= {f"{attn}.{x}_proj.weight": (kda_width, hidden) for x in "qkv"}
            shapes |= {f"{attn}.{x}_conv1d.weight": (kda_width, 1, kernel) for x in "qkv"}
            shapes |= {f"{attn}.{x}_a_proj.weight": (kda_dim, hidden) for x in "fg"}
            shapes |= {f"{attn}.{x}_b_proj.weight": (kda_width, kda_dim) for x in "fg"}
            shapes |= {
                f"{attn}.A_log": (1, 1, kda_heads, 1),
                f"{attn}.dt_bias": (kda_width,),
                f"{attn}.b_proj.weight": (kda_heads, hidden),
                f"{attn}.o_norm.weight": (kda_dim,),
                f"{attn}.o_proj.weight": (hidden, kda_width),
            }
        else:
            shapes |= {
                f"{attn}.q_proj.weight": (heads * (nope + rope), hidden),
                f"{attn}.kv_a_proj_with_mqa.weight": (rank + rope, hidden),
                f"{attn}.kv_a_layernorm.weight": (rank,),
                f"{attn}.kv_b_proj.weight": (heads * (nope + CONFIG["v_head_dim"]), rank),
                f"{attn}.o_proj.weight": (hidden, heads * CONFIG["v_head_dim"]),
            }
        if i < CONFIG["first_k_dense_replace"]:
            shapes |= mlp(f"{layer}.mlp", CONFIG["intermediate_size"])
            continue
        moe = f"{layer}.block_sparse_moe"
        shapes |= {
            f"{moe}.gate.weight": (CONFIG["num_experts"], hidden),
            f"{moe}.gate.e_score_correction_bias": (CONFIG["num_experts"],),
        }
        shapes |= mlp(f"{moe}.shared_experts", expert_width * CONFIG["num_shared_experts"])
        for expert in range(CONFIG["num_experts"]):
            shapes |= {f"{moe}.experts.{expert}.{w}.weight": (expert_width, hidden) for w in ("w1", "w3")}
            shapes |= {f"{moe}.experts.{expert}.w2.weight": (hidden, expert_width)}
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """Write a directory as published: config.json, two shards and their index, but no code."""
    folder = tmp_path_factory.mktemp("published")
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.3 + (1.0 if "norm.weight" in name else 0.0)
        for name, shape in published_shapes().items()
    }
    names = list(tensors)
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())}, "weight_map": {}}
    for i, shard in enumerate((names[: len(names) // 2], names[len(names) // 2 :])):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        save_file({name: tensors[name] for name in shard}, folder / file, metadata={"format": "pt"})
        index["weight_map"] |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture
def load(published) -> Callable[..., AttnResForCausalLM]:
    """Return `load(**overrides)`, which loads the published directory as an AttnRes model."""
    return lambda **overrides: AttnResForCausalLM.from_pretrained(published, **overrides)


@pytest.fixture
def kimi(published) -> KimiLinearForCausalLM:
    """Load the published directory as the model of `transformers`."""
    return KimiLinearForCausalLM.from_pretrained(published)


def attn_res_names(num_layers: int, prefix: str = "model.") -> set[str]:
    """Return the released names of the AttnRes tensors."""
    per_layer = [
        f"layers.{i}.{sublayer}_res_{kind}.weight"
        for i in range(num_layers)
        for sublayer in ("self_attention", "mlp")
        for kind in ("proj", "norm")
    ]
    return {prefix + name for name in (*per_layer, "output_attn_res_proj.weight", "output_attn_res_norm.weight")}


def test_the_report_names_exactly_the_attn_res_tensors_as_new(load):
    _, report = load(output_loading_info=True)
    assert set(report["missing_keys"]) == attn_res_names(CONFIG["num_hidden_layers"])
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    assert not report["error_msgs"]


def test_the_logged_report_names_exactly_the_attn_res_tensors_as_new(load, caplog):
    load()
    table = caplog.text.split("LOAD REPORT")[1].split("Notes:")[0]
    rows = {row.split("|")[0].strip(): row.split("|")[1].strip() for row in table.splitlines() if row.count("|") >= 2}
    del rows["Key"]
    assert rows == dict.fromkeys(
        (
            *(
                f"model.layers.{{0, 1, 2, 3, 4}}.{sublayer}_res_{kind}.weight"
                for sublayer in ("self_attention", "mlp")
                for kind in ("proj", "norm")
            ),
            "model.output_attn_res_proj.weight",
            "model.output_attn_res_norm.weight",
        ),
        "MISSING",
    )


def test_the_new_tensors_have_initial_values(load):
    for name, tensor in residual_tensors(load()).items():
        expected = torch.zeros_like(tensor) if name.endswith("proj.weight") else torch.ones_like(tensor)
        assert torch.equal(tensor, expected), name


@pytest.mark.parametrize("block_size", [1, 2, 3, 6, 10, 100])
def test_the_logits_with_scale_sum_equal_those_of_kimi_linear(load, kimi, token_ids, block_size):
    model = load(attn_res_scale="sum", attn_res_block_size=block_size)
    torch.testing.assert_close(model(token_ids).logits, kimi(token_ids).logits, rtol=0, atol=1e-5)


def test_the_standard_connection_equals_kimi_linear_to_the_last_bit_without_new_tensors(load, kimi, token_ids):
    model, report = load(residual_connection="standard", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert torch.equal(model(token_ids).logits, kimi(token_ids).logits)


def test_the_published_fields_are_read(load):
    config = load().config
    assert config.model_type == "attnres"
    assert config.layer_types == ["linear_attention"] * 3 + ["full_attention"] * 2
    assert config.mlp_layer_types == ["dense"] + ["sparse"] * 4
    assert (config.linear_num_heads, config.linear_head_dim, config.linear_conv_kernel_dim) == (2, 16, 4)
    assert (config.num_local_experts, config.num_experts_per_tok, config.n_shared_experts) == (8, 3, 2)
    assert (config.n_group, config.topk_group, config.norm_topk_prob) == (2, 1, True)
    assert config.max_position_embeddings == 4096


def test_the_base_model_reads_the_same_directory(published, kimi, token_ids):
    model, report = AttnResModel.from_pretrained(published, attn_res_scale="sum", output_loading_info=True)
    assert set(report["missing_keys"]) == attn_res_names(CONFIG["num_hidden_layers"], prefix="")
    assert set(report["unexpected_keys"]) == {"lm_head.weight"}
    expected = kimi.model(token_ids).last_hidden_state
    torch.testing.assert_close(model(token_ids).last_hidden_state, expected, rtol=0, atol=1e-5)


@pytest.fixture
def saved(load, tmp_path) -> tuple[AttnResForCausalLM, Path]:
    """Return the published checkpoint as a model with random AttnRes tensors, and the directory of its save."""
    model = load(attn_res_scale="sum", attn_res_block_size=3)
    torch.manual_seed(0)
    for tensor in residual_tensors(model).values():
        torch.nn.init.normal_(tensor)
    model.save_pretrained(tmp_path)
    return model, tmp_path


def test_a_published_checkpoint_saved_and_loaded_again_gives_the_same_model(saved, token_ids):
    model, folder = saved
    loaded, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(loaded) is AttnResForCausalLM
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert (loaded.config.attn_res_scale, loaded.config.attn_res_block_size) == ("sum", 3)
    assert torch.equal(loaded(token_ids).logits, model(token_ids).logits)


def test_saving_names_the_classes_of_this_family_in_place_of_the_published_ones(saved):
    _, folder = saved
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["AttnResForCausalLM"]
    assert {reference.split(".")[0] for reference in config["auto_map"].values()} == {
        "kimi_linear_configuration_attnres",
        "modeling_attnres",
    }
    assert {path.stem for path in folder.glob("*.py")} >= {"kimi_linear_configuration_attnres", "modeling_attnres"}


def test_saving_writes_the_published_names_and_tensors_back_with_the_new_ones(saved, published):
    _, folder = saved
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        written = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    read = {}
    for shard in published.glob("*.safetensors"):
        read |= load_file(shard)
    assert set(written) == set(published_shapes()) | attn_res_names(CONFIG["num_hidden_layers"])
    assert [name for name, tensor in read.items() if not torch.equal(written[name], tensor)] == []


def test_a_published_checkpoint_in_bfloat16_loads_in_bfloat16(published, tmp_path, token_ids):
    for shard in published.glob("*.safetensors"):
        tensors = {name: tensor.bfloat16() for name, tensor in load_file(shard).items()}
        save_file(tensors, tmp_path / shard.name, metadata={"format": "pt"})
    index = (published / "model.safetensors.index.json").read_text()
    (tmp_path / "model.safetensors.index.json").write_text(index)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"dtype": "bfloat16"}))

    model = AttnResForCausalLM.from_pretrained(tmp_path, residual_connection="standard")
    expected = KimiLinearForCausalLM.from_pretrained(tmp_path)
    kept = tuple(AttnResForCausalLM._keep_in_fp32_modules_strict)  # before 5.24 Kimi Linear keeps none in float32
    dtypes = {(name.endswith(kept), tensor.dtype) for name, tensor in model.state_dict().items()}
    assert dtypes == {(False, torch.bfloat16), (True, torch.float32)}
    assert torch.equal(model(token_ids).logits, expected(token_ids).logits)


def test_a_directory_that_kimi_linear_saved_loads_too(kimi, tmp_path, token_ids):
    """`transformers` writes a dense MLP as `block_sparse_moe`; a published checkpoint has `mlp`."""
    kimi.save_pretrained(tmp_path)
    assert "model.layers.0.block_sparse_moe.gate_proj.weight" in load_file(tmp_path / "model.safetensors")
    model, info = AttnResForCausalLM.from_pretrained(tmp_path, attn_res_scale="sum", output_loading_info=True)
    assert set(info["missing_keys"]) == set(residual_tensors(model)) and not info["unexpected_keys"]
    with torch.no_grad():
        torch.testing.assert_close(model(token_ids).logits, kimi(token_ids).logits, rtol=1e-5, atol=1e-5)


def test_loading_does_not_warn_of_another_model_type(published, caplog):
    with caplog.at_level("WARNING", logger="transformers"):
        logging.enable_propagation()
        assert AttnResConfig.from_pretrained(published).model_type == "attnres"
        logging.disable_propagation()
    assert "kimi_linear" not in caplog.text
