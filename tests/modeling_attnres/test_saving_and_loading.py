"""A saved model loads back as it was: in shards, in any dtype, tied or not, on the CPU or offloaded to disk."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from attnres import AttnResForCausalLM, AttnResForSequenceClassification, AttnResModel
from attnres.residual_attnres import residual_tensors

SHARD_SIZE = "40KB"  # of a model of about 400 KB


@pytest.fixture
def saved(tiny_model, tmp_path) -> tuple[AttnResForCausalLM, Path]:
    """Return a model and the directory of its shards."""
    model = tiny_model(attn_res_block_size=3)
    model.save_pretrained(tmp_path / "saved", max_shard_size=SHARD_SIZE)
    return model, tmp_path / "saved"


def names_on_disk(folder: Path) -> set[str]:
    """Return the names of all tensors in the safetensors files of a directory."""
    names = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names |= set(file.keys())
    return names


def test_names_on_disk_are_those_of_the_released_weights(saved):
    model, folder = saved
    expected = {"model.output_attn_res_proj.weight": (1, 32), "model.output_attn_res_norm.weight": (32,)}
    for i in range(model.config.num_hidden_layers):
        for sublayer in ("self_attention", "mlp"):
            expected[f"model.layers.{i}.{sublayer}_res_proj.weight"] = (1, 32)
            expected[f"model.layers.{i}.{sublayer}_res_norm.weight"] = (32,)
    assert {name for name in names_on_disk(folder) if "_res_" in name} == set(expected)
    assert {name: tuple(tensor.shape) for name, tensor in residual_tensors(model).items()} == expected


def test_the_standard_connection_adds_no_names(tiny_model, tmp_path):
    tiny_model(residual_connection="standard").save_pretrained(tmp_path)
    assert not [name for name in names_on_disk(tmp_path) if "_res_" in name]


def test_shards_load_back_bit_for_bit(saved, token_ids):
    model, folder = saved
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 5
    loaded, report = AttnResForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not loaded.training
    assert torch.equal(loaded(token_ids).logits, model(token_ids).logits)


@pytest.mark.parametrize(
    "options", [{"low_cpu_mem_usage": True}, {"use_safetensors": True}, {"device_map": {"": "cpu"}}]
)
def test_loading_options_do_not_change_the_model(saved, token_ids, options):
    model, folder = saved
    loaded = AutoModelForCausalLM.from_pretrained(folder, **options)
    assert torch.equal(loaded(token_ids).logits, model(token_ids).logits)


def test_a_model_saved_by_one_head_loads_into_the_others(saved, token_ids):
    model, folder = saved
    base = AttnResModel.from_pretrained(folder)
    assert torch.equal(base(token_ids).last_hidden_state, model.model(token_ids).last_hidden_state)
    classifier = AttnResForSequenceClassification.from_pretrained(folder, num_labels=3)
    assert classifier(token_ids).logits.shape == (2, 3)
    for name, tensor in model.model.state_dict().items():
        assert torch.equal(classifier.model.state_dict()[name], tensor), name


def test_the_base_model_alone_loads_into_the_language_model(tiny_model, token_ids, tmp_path):
    model = tiny_model(tie_word_embeddings=True)
    model.model.save_pretrained(tmp_path)
    loaded = AttnResForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(token_ids).logits, model(token_ids).logits)


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_stay_tied_or_untied(tiny_model, token_ids, tmp_path, tied):
    model = tiny_model(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    assert ("lm_head.weight" in names_on_disk(tmp_path)) is not tied

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied
    assert torch.equal(loaded(token_ids).logits, model(token_ids).logits)


def dtypes_of(model: AttnResForCausalLM) -> set[torch.dtype]:
    """Return the dtypes of all tensors but those that stay in float32, which `test_float32.py` tests."""
    kept = tuple(AttnResForCausalLM._keep_in_fp32_modules_strict)
    return {tensor.dtype for name, tensor in model.state_dict().items() if not name.endswith(kept)}


@pytest.mark.parametrize(
    ("dtype", "in_config"),
    [(torch.float32, True), (torch.bfloat16, False), (torch.float16, False), (torch.float64, False)],
)
def test_dtype_auto_is_the_dtype_of_the_checkpoint(tiny_model, tmp_path, dtype, in_config):
    tiny_model().to(dtype).save_pretrained(tmp_path)
    if not in_config:
        fields = json.loads((tmp_path / "config.json").read_text())
        del fields["dtype"]
        (tmp_path / "config.json").write_text(json.dumps(fields))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert dtypes_of(loaded) == {dtype}


def test_from_pretrained_can_load_into_another_dtype(tiny_model, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert dtypes_of(loaded) == {torch.bfloat16}


@pytest.fixture(params=["40KB", "120KB", "200KB"])
def offloaded(request, saved, tmp_path) -> AttnResForCausalLM:
    """Load the model of `saved` with room for nothing, for the embedding or for a layer, and the rest on disk."""
    _, folder = saved
    return AutoModelForCausalLM.from_pretrained(
        folder, device_map="auto", max_memory={"cpu": request.param}, offload_folder=tmp_path / "offload"
    )


def test_offloaded_to_disk_the_model_computes_the_same(offloaded, saved, token_ids):
    model, _ = saved
    assert "disk" in offloaded.hf_device_map.values()
    assert {"meta"} <= {tensor.device.type for tensor in residual_tensors(offloaded).values()}
    assert torch.equal(offloaded(token_ids).logits, model(token_ids).logits)


def test_offloaded_to_disk_the_model_generates_the_same(offloaded, saved, token_ids):
    model, _ = saved
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    assert torch.equal(offloaded.generate(token_ids, **options), model.generate(token_ids, **options))


@pytest.mark.parametrize("shard_size", [SHARD_SIZE, "1GB"])
@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
def test_a_model_offloaded_to_disk_is_saved_again(offloaded, saved, token_ids, tmp_path, shard_size):
    model, folder = saved
    offloaded.save_pretrained(tmp_path / "again", max_shard_size=shard_size)
    assert names_on_disk(tmp_path / "again") == names_on_disk(folder)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(loaded(token_ids).logits, model(token_ids).logits)


@pytest.mark.parametrize("on_disk", ["output_attn_res_proj", "output_attn_res_norm", "layers.1", "layers.3"])
def test_any_part_may_be_on_disk_while_the_others_are_in_memory(saved, token_ids, tmp_path, on_disk):
    model, folder = saved
    parts = ["embed_tokens", "norm", "output_attn_res_proj", "output_attn_res_norm", *(f"layers.{i}" for i in range(4))]
    device_map = {"lm_head": "cpu"} | {f"model.{part}": "disk" if part == on_disk else "cpu" for part in parts}
    loaded = AutoModelForCausalLM.from_pretrained(folder, device_map=device_map, offload_folder=tmp_path / "offload")
    assert torch.equal(loaded(token_ids).logits, model(token_ids).logits)


def test_offloaded_to_the_cpu_by_accelerate_the_model_computes_the_same(saved, token_ids):
    model, folder = saved
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    cpu_offload(loaded, execution_device="cpu")
    assert {tensor.device.type for tensor in loaded.parameters()} == {"meta"}
    assert torch.equal(loaded(token_ids).logits, model(token_ids).logits)


@pytest.fixture
def reload(tmp_path) -> Callable[[AttnResForCausalLM], AttnResForCausalLM]:
    """Return `reload(model)`, which saves and loads a model."""

    def save_and_load(model: AttnResForCausalLM) -> AttnResForCausalLM:
        model.save_pretrained(tmp_path)
        return AutoModelForCausalLM.from_pretrained(tmp_path)

    return save_and_load


@pytest.mark.parametrize(("block_size", "scale"), [(1, "mean"), (3, "sum"), (9, "mean")])
def test_every_block_size_and_scale_loads_back(tiny_model, reload, token_ids, block_size, scale):
    model = tiny_model(attn_res_block_size=block_size, attn_res_scale=scale)
    assert torch.equal(reload(model)(token_ids).logits, model(token_ids).logits)


def test_a_standard_checkpoint_becomes_attn_res_by_one_override(tiny_model, token_ids, tmp_path):
    model = tiny_model(residual_connection="standard")
    model.save_pretrained(tmp_path)
    loaded, report = AutoModelForCausalLM.from_pretrained(
        tmp_path, residual_connection="attn_res", attn_res_scale="sum", output_loading_info=True
    )
    assert set(report["missing_keys"]) == set(residual_tensors(loaded))
    torch.testing.assert_close(loaded(token_ids).logits, model(token_ids).logits, rtol=0, atol=1e-5)


def test_a_model_is_loaded_by_the_name_that_transformers_gives_its_argument(tiny_model, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    loaded, info = AttnResForCausalLM.from_pretrained(pretrained_model_name_or_path=tmp_path, output_loading_info=True)
    assert isinstance(loaded, AttnResForCausalLM) and not info["missing_keys"]
