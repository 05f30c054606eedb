"""Tensors that stay in float32 when the model is in 16 bits: routing biases, routers, decays, Hyper-Connections."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from attnres import AttnResForCausalLM
from attnres.residual_attnres import ResidualConnection

NAMES = ("e_score_correction_bias", "gate.weight", "dt_bias", "A_log")
HALF = [torch.bfloat16, torch.float16]
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture
def balanced(vivid_model) -> AttnResForCausalLM:
    """Return a model whose experts have biases that differ by less than a step of bfloat16."""
    model = vivid_model().eval()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.5 + 1e-4 * torch.arange(len(buffer)))
    return model


def kept_tensors(model: PreTrainedModel, names: tuple[str, ...] = NAMES) -> dict[str, Tensor]:
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name.endswith(names)}
    assert {name for name in names if any(key.endswith(name) for key in tensors)} == set(names)
    return tensors


def assert_kept(model: PreTrainedModel, expected: dict[str, Tensor]) -> None:
    """Assert that a model is in 16 bits, but its kept tensors have every digit of the expected ones."""
    assert model.dtype in HALF
    found = model.state_dict()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []
    assert {found[name].dtype for name in expected} == {torch.float32}


@pytest.mark.parametrize("dtype", HALF)
def test_kept_tensors_have_every_digit_when_a_model_is_loaded_in_16_bits(balanced, tmp_path, dtype):
    balanced.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert_kept(loaded, kept_tensors(balanced))
    assert loaded.state_dict()[BIAS].unique().numel() == 8


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.bfloat16()])
def test_kept_tensors_have_every_digit_when_a_model_is_cast(balanced, token_ids, cast):
    expected = {name: tensor.clone() for name, tensor in kept_tensors(balanced).items()}
    balanced(token_ids, labels=token_ids).loss.backward()
    cast(balanced)
    assert_kept(balanced, expected)
    parameters = dict(balanced.named_parameters())
    assert all(p.grad is None or p.grad.dtype == p.dtype for p in parameters.values())
    balanced.zero_grad()
    balanced(token_ids, labels=token_ids).loss.backward()
    assert {parameters[name].grad.dtype for name in expected if name in parameters} == {torch.float32}


def test_kept_tensors_of_a_bare_decoder_have_every_digit_too(balanced):
    expected = {name.removeprefix("model."): tensor.clone() for name, tensor in kept_tensors(balanced).items()}
    assert_kept(balanced.model.bfloat16(), expected)


def test_a_cast_to_float64_and_back_changes_nothing(balanced):
    expected = {name: tensor.clone() for name, tensor in kept_tensors(balanced).items()}
    assert {tensor.dtype for tensor in balanced.double().state_dict().values()} == {torch.float64}
    assert_kept(balanced.bfloat16(), expected)


def test_a_model_made_in_16_bits_has_kept_tensors_in_float32(tiny_config):
    model = AutoModelForCausalLM.from_config(tiny_config(), dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in kept_tensors(model).values()} == {torch.float32}


def test_a_model_saved_in_16_bits_has_kept_tensors_in_the_file_in_float32(balanced, tmp_path):
    expected = kept_tensors(balanced)
    expected = {name: tensor.clone() for name, tensor in expected.items()}
    balanced.bfloat16().save_pretrained(tmp_path, save_original_format=False)
    file = load_file(tmp_path / "model.safetensors")
    assert {name for name, tensor in file.items() if tensor.dtype == torch.float32} == set(expected)
    assert_kept(AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto"), expected)


def test_kept_tensors_of_a_checkpoint_in_bfloat16_load_in_float32(balanced, tmp_path):
    balanced.save_pretrained(tmp_path, save_original_format=False)
    rounded = {name: tensor.bfloat16() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file(rounded, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert_kept(loaded, {name: tensor.bfloat16().float() for name, tensor in kept_tensors(balanced).items()})


@torch.no_grad()
def test_tokens_go_to_the_experts_that_the_biases_choose(balanced, token_ids, tmp_path):
    """A router gets the same hidden states in float32 and in bfloat16."""
    balanced.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    hidden = torch.randn(4096, 32, generator=torch.Generator().manual_seed(0)) * 1e-3  # similar scores
    chosen = [model.model.layers[1].mlp.gate(hidden)[2].sort(-1)[0] for model in (balanced, loaded)]
    assert torch.equal(*chosen)


def test_kept_tensors_offloaded_to_disk_have_every_digit(balanced, token_ids, tmp_path):
    balanced.save_pretrained(tmp_path / "model")
    options = {"dtype": torch.bfloat16, "device_map": "auto", "max_memory": {"cpu": "40KB"}}
    offloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", offload_folder=tmp_path / "disk", **options)
    assert "disk" in offloaded.hf_device_map.values()
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(offloaded(token_ids).logits, whole(token_ids).logits)


def connection_dtypes(model: PreTrainedModel) -> set[torch.dtype]:
    modules = (module for module in model.modules() if isinstance(module, ResidualConnection))
    return {tensor.dtype for module in modules for tensor in module.parameters()}


@pytest.mark.parametrize(
    "connection, dtype", [("hyper_connections", torch.float32), ("attn_res", torch.bfloat16), ("mhc", torch.bfloat16)]
)
@pytest.mark.parametrize("case", ["llama", "kimi_linear"])
def test_only_the_tensors_of_hyper_connections_stay_in_float32(backbones, tmp_path, connection, dtype, case):
    model = backbones.build_member(case, residual_connection=connection)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert connection_dtypes(loaded) == connection_dtypes(model.bfloat16()) == {dtype}
    assert torch.isfinite(loaded(backbones.token_ids()).logits).all()
