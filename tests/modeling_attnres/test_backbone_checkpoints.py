"""Checkpoints on every backbone: they have the backbone's layout and the AttnRes tensors, and load back."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload
from safetensors import safe_open
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from attnres import BACKBONES
from attnres.residual_attnres import residual_tensors

CASES = [*sorted(BACKBONES), "gpt_neox, sequential", "llama, tied"]
SHARD_SIZE = "20KB"  # of models of about 200 KB
# In bfloat16, a dense model, and those that keep tensors in float32.
FORMS = ["gemma3_text", "gpt_neox", "granite", "llama", "llama, tied", "mixtral", "olmo2", "phi3"]
IN_BFLOAT16 = ["deepseek_v3", "kimi_linear", "llama", "mixtral", "qwen3_moe"]
CASES_AND_DTYPES = pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, torch.float32) for case in CASES), *((case, torch.bfloat16) for case in IN_BFLOAT16)],
)


def on_disk(folder: Path) -> dict[str, Tensor]:
    """Return all tensors in the safetensors files of a directory."""
    tensors = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors


@pytest.fixture
def save(tmp_path) -> Callable[..., Path]:
    """Return `save(model, dtype)`, which saves a model in shards in this dtype, and returns the directory."""

    def to_disk(model: torch.nn.Module, dtype: torch.dtype = torch.float32) -> Path:
        folder = tmp_path / type(model).__name__
        model.to(dtype).save_pretrained(folder, max_shard_size=SHARD_SIZE)
        assert len(list(folder.glob("*.safetensors"))) > 3
        return folder

    return to_disk


def assert_names_of_the_backbone(ours: dict[str, Tensor], theirs: dict[str, Tensor], added: dict[str, Tensor]) -> None:
    """Assert that tensors on disk are those of the backbone, under its names, and those that the family adds."""
    assert set(ours) == set(theirs) | set(added)
    assert all(torch.equal(ours[name], tensor) for name, tensor in (theirs | added).items())


@torch.no_grad()
@CASES_AND_DTYPES
def test_a_saved_model_has_the_names_of_the_backbone_and_loads_back_from_shards(backbones, save, case, dtype):
    model, token_ids = backbones.build_member(case, attn_res_block_size=3), backbones.token_ids()
    expected = model(token_ids).logits
    folder = save(model, dtype)
    if dtype == torch.float32 and case != "kimi_linear":  # see test_published_layout.py
        theirs = on_disk(save(backbones.build(case)))
        assert_names_of_the_backbone(on_disk(folder), theirs, residual_tensors(model))
    loaded, report = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert type(loaded) is type(model)
    assert not any(report.values())
    kept = tuple(model._keep_in_fp32_modules_strict) or ("none",)
    assert {tensor.dtype for name, tensor in loaded.named_parameters() if not name.endswith(kept)} == {dtype}
    tensors = model.state_dict()
    assert all(torch.equal(tensor, tensors[name].to(tensor.dtype)) for name, tensor in loaded.state_dict().items())
    if dtype == torch.float32:
        assert torch.equal(loaded(token_ids).logits, expected)


@torch.no_grad()
@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, torch.float32) for case in FORMS), *((case, torch.bfloat16) for case in IN_BFLOAT16)],
)
def test_the_checkpoint_of_a_backbone_loads_with_only_attn_res_tensors_new(backbones, save, case, dtype):
    token_ids, member = backbones.token_ids(), backbones.build_member(case)
    folder = save(backbones.build(case), dtype)
    fields = {"attn_res_scale": "sum", "attn_res_block_size": 3, "dtype": "auto"}
    model, report = type(member).from_pretrained(folder, **fields, output_loading_info=True)
    new = residual_tensors(model)
    assert set(report.pop("missing_keys")) == set(new) == set(residual_tensors(member))
    assert not any(report.values())
    for name, tensor in new.items():
        assert torch.equal(tensor, torch.zeros_like(tensor) if "_proj" in name else torch.ones_like(tensor))
    standard = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in standard.state_dict().items())
    if dtype == torch.float32:
        expected = standard(token_ids).logits
        assert (model(token_ids).logits - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_the_names_of_the_attn_res_tensors_are_those_of_the_released_weights(backbones):
    def suffixes(case: str) -> set[str]:
        names = residual_tensors(backbones.build_member(case, num_hidden_layers=2 if case == "llama" else 1))
        assert len({name.split(".")[0] for name in names}) == 1
        return {name.partition(".")[2].removesuffix(".weight") for name in names}

    output = {"output_attn_res_proj", "output_attn_res_norm"}
    assert suffixes("llama") == output | {
        f"layers.{i}.{sublayer}_res_{kind}"
        for i in (0, 1)
        for sublayer in ("self_attention", "mlp")
        for kind in ("proj", "norm")
    }
    assert suffixes("gpt_neox") == output | {"layers.0.parallel_res_proj", "layers.0.parallel_res_norm"}


@torch.no_grad()
@pytest.mark.parametrize("case", ["llama", "gemma3_text", "gpt_neox", "mixtral"])
def test_a_checkpoint_of_one_head_loads_into_the_others(backbones, save, case):
    model, token_ids = backbones.build_member(case, attn_res_block_size=3), backbones.token_ids()
    folder = save(model)
    base = AutoModel.from_pretrained(folder)
    assert torch.equal(base(token_ids).last_hidden_state, model.base_model(token_ids).last_hidden_state)
    classifier, report = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=3, output_loading_info=True
    )
    assert report["missing_keys"] == {"score.weight"}
    again = AutoModelForSequenceClassification.from_pretrained(save(classifier))
    assert torch.equal(again(token_ids).logits, classifier(token_ids).logits)
    assert torch.equal(again.base_model(token_ids).last_hidden_state, base(token_ids).last_hidden_state)


@pytest.mark.parametrize("case", ["deepseek_v3", "kimi_linear", "mixtral", "qwen3_moe"])
def test_tensors_that_the_backbone_keeps_in_float32_stay_in_float32(backbones, save, case):
    def kept(model: PreTrainedModel) -> set[str]:
        loaded = type(model).from_pretrained(save(model), dtype=torch.bfloat16)
        return {name for name, tensor in loaded.state_dict().items() if tensor.dtype == torch.float32}

    found, expected = kept(backbones.build_member(case)), kept(backbones.build(case))
    if case == "kimi_linear":  # see `test_float32.py`
        assert found >= expected
    else:
        assert found == expected
    assert any("e_score_correction_bias" in name for name in found) == (case in ("deepseek_v3", "kimi_linear"))


@torch.no_grad()
@pytest.mark.parametrize("case", ["llama", "gemma3_text", "gpt_neox", "mixtral"])
def test_the_placement_of_parts_does_not_change_the_result(backbones, save, case, tmp_path):
    model, token_ids = backbones.build_member(case, attn_res_block_size=3), backbones.token_ids()
    expected, folder = model(token_ids).logits, save(model)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(folder, device_map="cpu")(token_ids).logits, expected)

    room = {"cpu": sum(tensor.nbytes for tensor in model.parameters()) * 6 // 10}
    offloaded = AutoModelForCausalLM.from_pretrained(
        folder, device_map="auto", max_memory=room, offload_folder=tmp_path / "offload"
    )
    assert "disk" in offloaded.hf_device_map.values()
    assert any(tensor.is_meta for tensor in residual_tensors(offloaded).values())
    layers = [name for name in offloaded.hf_device_map if ".layers." in name]
    assert layers and not [name for name in layers if not name.rpartition(".")[2].isdigit()], "a layer is split"
    assert torch.equal(offloaded(token_ids).logits, expected)

    loaded = AutoModelForCausalLM.from_pretrained(folder)
    cpu_offload(loaded, execution_device="cpu")
    assert torch.equal(loaded(token_ids).logits, expected)


@pytest.mark.parametrize("case", ["llama", "gpt_neox"])
def test_a_checkpoint_that_lacks_some_attn_res_tensors_is_refused_by_name(backbones, tmp_path, case):
    model = backbones.build_member(case)
    lost = sorted(residual_tensors(model))[0]
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != lost}
    model.save_pretrained(tmp_path, state_dict=tensors)
    with pytest.raises(ValueError, match=f"missing: {lost}. Restore"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_the_code_beside_the_weights_holds_every_class_that_the_configuration_names(backbones, save):
    folder = save(backbones.build_member("llama"))
    references = AutoConfig.from_pretrained(folder).auto_map
    heads = ("CausalLM", "QuestionAnswering", "SequenceClassification", "TokenClassification")
    assert set(references) == {"AutoConfig", "AutoModel", *(f"AutoModelFor{head}" for head in heads)}
    assert {reference.partition(".")[0] for reference in references.values()} == {"backbones_attnres"}
    assert {path.stem for path in folder.glob("*.py")} >= {
        "backbones_attnres",
        "decoder_attnres",
        "configuration_attnres",
    }
