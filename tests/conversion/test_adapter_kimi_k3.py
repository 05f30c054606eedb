"""Adapters of Kimi K3 under released names, and back."""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from attnres.configuration import load
from attnres.conversion.adapter_kimi_k3 import convert_adapter
from attnres.training.lora import add_adapters, load_adapter, merge_adapters

IDS = torch.arange(3, 51).view(2, 24)
ROOT = "base_model.model.language_model."


def base_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@torch.no_grad()
def logits(model):
    return model.eval()(IDS).logits


def adapted_of(folder, **options):
    torch.manual_seed(1)
    adapted = add_adapters(base_of(folder), rank=4, **options)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return adapted.eval()


@pytest.fixture
def released(tiny_kimi_k3, tmp_path):
    """The released form of an adapter on everything, and the model with the adapter."""
    adapted = adapted_of(tiny_kimi_k3)
    adapted.save_pretrained(tmp_path / "own")
    convert_adapter(tmp_path / "own", tmp_path / "released", "released")
    return tmp_path / "released", adapted


def assert_close(found, expected):
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize(
    "options", [{}, {"targets": ("gate_up_proj", "o_proj")}, {"targets": ("down_proj",)}, {"experts": False}], ids=str
)
def test_there_and_back_gives_the_same_logits(tiny_kimi_k3, tmp_path, options):
    adapted = adapted_of(tiny_kimi_k3, **options)
    expected = logits(adapted)
    adapted.save_pretrained(tmp_path / "own")
    convert_adapter(tmp_path / "own", tmp_path / "released", "released")
    convert_adapter(tmp_path / "released", tmp_path / "back", "attnres")
    with warnings.catch_warnings(action="error", category=RuntimeWarning):
        back = load_adapter(base_of(tiny_kimi_k3), tmp_path / "back")
    assert_close(logits(back), expected)
    sizes = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("own", "back")]
    assert {n: t.shape for n, t in sizes[0].items()} == {n: t.shape for n, t in sizes[1].items()}


def test_each_released_matrix_has_its_own_adapter(tiny_kimi_k3, released, tmp_path):
    """The sum of each released matrix and its adapter is the matrix of the merged model in the released layout."""
    path, adapted = released
    fields = json.loads((path / "adapter_config.json").read_text())
    assert {"w1", "w2", "w3", "self_attn.f_a_proj", "block_sparse_moe.shared_experts.up_proj"} <= {
        *fields["target_modules"]
    }
    tensors = load_file(path / "adapter_model.safetensors")
    assert f"{ROOT}model.layers.1.block_sparse_moe.experts.0.w1.lora_A.weight" in tensors
    merge_adapters(adapted).save_pretrained(tmp_path / "merged")
    before, merged = (load_file(p / "model.safetensors") for p in (tiny_kimi_k3, tmp_path / "merged"))
    adapters = {n.removesuffix(".lora_A.weight") for n in tensors if n.endswith(".lora_A.weight")}
    for name in adapters:
        weight = f"{name.removeprefix('base_model.model.')}.weight"
        rank, alpha = fields["r"], fields["lora_alpha"]
        for ends, value in fields["rank_pattern"].items():
            if any(name.endswith(end.replace("\\", "")) for end in ends.split("|")):
                rank, alpha = value, fields["alpha_pattern"][ends]
        a, b = (tensors[f"{name}.lora_{factor}.weight"] for factor in "AB")
        assert len(a) == rank
        torch.testing.assert_close(before[weight] + alpha / rank * b @ a, merged[weight], rtol=1e-4, atol=1e-6)
    changed = {name for name in before if not torch.equal(before[name], merged[name])}
    assert {f"{name.removeprefix('base_model.model.')}.weight" for name in adapters} == {
        name for name in changed if "_res_" not in name
    }


def test_gate_and_up_of_others_may_have_factors_that_share_nothing(tiny_kimi_k3, released, tmp_path):
    path, _ = released
    tensors = load_file(path / "adapter_model.safetensors")
    torch.manual_seed(2)
    for name in tensors:
        if ".w3.lora_A." in name:
            tensors[name] = torch.randn_like(tensors[name])
    save_file(tensors, path / "adapter_model.safetensors")
    convert_adapter(path, tmp_path / "back", "attnres")
    fields = json.loads((path / "adapter_config.json").read_text())
    merged = merge_adapters(load_adapter(base_of(tiny_kimi_k3), tmp_path / "back"))
    merged.save_pretrained(tmp_path / "merged")
    before, after = (load_file(p / "model.safetensors") for p in (tiny_kimi_k3, tmp_path / "merged"))
    weight = "language_model.model.layers.2.block_sparse_moe.experts.3.w3"
    a, b = (tensors[f"base_model.model.{weight}.lora_{factor}.weight"] for factor in "AB")
    expected = before[f"{weight}.weight"] + 2 * b @ a  # alpha is twice the rank
    assert fields["lora_alpha"] == 2 * fields["r"]
    torch.testing.assert_close(after[f"{weight}.weight"], expected, rtol=1e-4, atol=1e-5)


def test_strengths_of_others_may_be_given_by_whole_names(tiny_kimi_k3, tmp_path):
    """PEFT matches patterns with names of the composite layout, which begin with `language_model`."""
    adapted_of(tiny_kimi_k3, targets=("experts.down_proj",)).save_pretrained(tmp_path / "own")
    path = tmp_path / "released"
    convert_adapter(tmp_path / "own", path, "released")
    first, second = (f"language_model.model.layers.2.block_sparse_moe.experts.{i}.w2" for i in (1, 3))
    fields = json.loads((path / "adapter_config.json").read_text())
    fields["alpha_pattern"] = {first: 6 * fields["r"], f"^{second}": 10 * fields["r"]}
    (path / "adapter_config.json").write_text(json.dumps(fields))
    convert_adapter(path, tmp_path / "back", "attnres")
    tensors = load_file(tmp_path / "back" / "adapter_model.safetensors")
    stacked = tensors["base_model.model.model.layers.2.mlp.experts.lora_B.weight"]
    stacked = stacked.unflatten(1, (fields["r"], -1))
    tensors = load_file(path / "adapter_model.safetensors")
    for name, expert, strength in ((first, 1, 6), (second, 3, 10)):
        torch.testing.assert_close(stacked[..., expert], strength * tensors[f"base_model.model.{name}.lora_B.weight"])


def test_an_adapter_of_another_base_is_refused(tiny_kimi_k3, released, tmp_path):
    path, _ = released
    other = tmp_path / "other"
    config = load("attnres-k3-tiny", num_hidden_layers=4, vocab_size=99, hidden_size=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(other)
    for form, source in (("attnres", path), ("released", tmp_path / "own")):
        file = source / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(other)}))
        with pytest.raises(ValueError, match="is of another base model: the base that it names has the shape"):
            convert_adapter(source, tmp_path / "result", form)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "nowhere/at-all"}))
    with pytest.raises(FileNotFoundError, match="put its directory or Hub id into `base_model_name_or_path`"):
        convert_adapter(source, tmp_path / "result", form)


def change_files(path, tensors=None, **fields):
    """Change the files of an adapter: its tensors by a function, and fields of its configuration."""
    file, config = path / "adapter_model.safetensors", path / "adapter_config.json"
    held = {name: tensor.clone() for name, tensor in load_file(file).items()}
    if tensors is not None:
        tensors(held)
    save_file(held, file)
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))


def first_of(held, end):
    return next(name for name in held if name.endswith(end))


@pytest.mark.parametrize(
    ("change", "fields", "words"),
    [
        (lambda held: held[first_of(held, "lora_A.weight")].fill_(float("nan")), {}, "must hold a matrix of finite"),
        (lambda held: held.pop(first_of(held, "lora_A.weight")), {}, "lacks one of lora_A and lora_B"),
        (lambda held: held.update({first_of(held, "lora_B.weight"): torch.ones(3)}), {}, "must hold a matrix"),
        (lambda held: held.update({"model.x.lora_magnitude_vector": torch.ones(3)}), {}, "A and B of LoRA alone"),
        (lambda held: held.update({"model.layers.0.x": torch.ones(3)}), {}, "has no such tensor, `model.layers.0.x`"),
        (lambda held: held.clear(), {}, "has no tensors of LoRA"),
        (None, {"peft_type": "LOHA"}, "is of the type 'LOHA'"),
        (None, {"r": 8, "rank_pattern": {}}, "adapter_config.json says 8"),
        (None, {"lora_alpha": float("nan"), "alpha_pattern": {}}, "is nan, but must be a number"),
    ],
)
@pytest.mark.parametrize("form", ["released", "attnres"])
def test_a_damaged_adapter_and_one_that_is_no_lora_are_refused(released, tmp_path, form, change, fields, words):
    path = tmp_path / ("own" if form == "released" else "released")
    change_files(path, change, **fields)
    with pytest.raises(ValueError, match=words):
        convert_adapter(path, tmp_path / "result", form)
    assert not (tmp_path / "result").exists()


def test_a_tensor_that_was_trained_whole_has_its_released_name(tiny_kimi_k3, released, tmp_path):
    name, weight = (
        "model.layers.1.mlp.gate.weight",
        torch.randn(base_of(tiny_kimi_k3).model.layers[1].mlp.gate.weight.shape),
    )
    change_files(tmp_path / "own", lambda held: held.update({f"base_model.model.{name}": weight}))
    convert_adapter(tmp_path / "own", tmp_path / "there", "released")
    there = load_file(tmp_path / "there" / "adapter_model.safetensors")
    assert torch.equal(there[f"{ROOT}model.layers.1.block_sparse_moe.gate.weight"], weight)
    convert_adapter(tmp_path / "there", tmp_path / "back", "attnres")
    assert torch.equal(load_file(tmp_path / "back" / "adapter_model.safetensors")[f"base_model.model.{name}"], weight)


def test_layers_may_have_strengths_of_their_own(tiny_kimi_k3, tmp_path):
    adapted_of(tiny_kimi_k3, targets=("o_proj",)).save_pretrained(tmp_path / "own")
    change_files(tmp_path / "own", alpha_pattern={"layers.1.self_attn.o_proj": 40})
    expected = logits(load_adapter(base_of(tiny_kimi_k3), tmp_path / "own"))
    convert_adapter(tmp_path / "own", tmp_path / "released", "released")
    convert_adapter(tmp_path / "released", tmp_path / "back", "attnres")
    assert_close(logits(load_adapter(base_of(tiny_kimi_k3), tmp_path / "back")), expected)
