"""Adapters of Kimi K3's routed experts: without a copy of the stacked weights, and with shared outer factors."""

import copy

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import ParamWrapper
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from attnres.configuration import load
from attnres.kimi_k3_packed_attnres import decode_mxfp4
from attnres.kimi_k3_packing_attnres import encode_mxfp4
from attnres.residual_attnres import FamilyWarning
from attnres.training.lora import add_adapters, load_adapter, merge_adapters

from ..modeling_attnres.kimi_k3_release import write_packed


def base_of(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def adapted_of(folder, **options):
    """Return the model with an adapter that has been moved off its start."""
    torch.manual_seed(1)
    return moved(add_adapters(base_of(folder), rank=4, **options)).eval()


def moved(adapted):
    """Return a model whose trained tensors have been changed, as training would."""
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return adapted


IDS = torch.arange(3, 51).view(2, 24)


@pytest.mark.parametrize("shared_outer", [False, True])
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_peft_alone_reads_the_saved_adapter_and_computes_the_same(tiny_kimi_k3, tmp_path, shared_outer, implementation):
    adapted = adapted_of(tiny_kimi_k3, shared_outer=shared_outer)
    adapted.set_experts_implementation(implementation)
    with torch.no_grad():
        expected, plain = adapted(IDS).logits, base_of(tiny_kimi_k3)(IDS).logits
    assert (expected - plain).abs().max() > 0.05 * plain.abs().max()
    adapted.save_pretrained(tmp_path)
    by_peft = PeftModel.from_pretrained(base_of(tiny_kimi_k3), tmp_path)
    wrappers = [module for module in by_peft.modules() if isinstance(module, ParamWrapper)]
    assert wrappers and {type(module) for module in wrappers} == {ParamWrapper}
    merged = merge_adapters(copy.deepcopy(adapted))
    for model in (by_peft, load_adapter(base_of(tiny_kimi_k3), tmp_path), merged):
        with torch.no_grad():
            assert (model(IDS).logits - expected).abs().max() < 1e-4 * expected.abs().max()


def test_an_adapter_of_a_larger_or_a_smaller_base_is_refused(tiny_kimi_k3, tmp_path):
    config = load("attnres-k3-tiny", num_hidden_layers=8, vocab_size=99)
    larger = [AutoModelForCausalLM.from_config(config) for _ in range(2)]
    add_adapters(larger[0], rank=4).save_pretrained(tmp_path / "larger")
    adapted_of(tiny_kimi_k3).save_pretrained(tmp_path / "smaller")
    for base, name in ((larger[1], "smaller"), (base_of(tiny_kimi_k3), "larger")):
        with pytest.raises(ValueError, match="is an adapter of another base model"):
            load_adapter(base, tmp_path / name)


def test_gradients_are_those_of_peft(tiny_kimi_k3, tmp_path):
    adapted = adapted_of(tiny_kimi_k3)
    adapted.save_pretrained(tmp_path)
    by_peft = PeftModel.from_pretrained(base_of(tiny_kimi_k3), tmp_path, is_trainable=True)
    for model in (adapted, by_peft):
        model(IDS, labels=IDS).loss.backward()
    expected = {name: parameter.grad for name, parameter in by_peft.named_parameters()}
    for name, parameter in adapted.named_parameters():
        assert (parameter.grad is None) == (expected[name] is None)
        if parameter.grad is not None:
            assert (parameter.grad - expected[name]).abs().max() <= 1e-4 * expected[name].abs().max() + 1e-9, name


def test_no_copy_of_the_stacked_experts_is_made(tiny_kimi_k3):
    adapted = adapted_of(tiny_kimi_k3)
    experts = adapted.get_base_model().model.layers[-1].mlp.experts.get_base_layer()

    stacks = {frozenset(weight.shape) for weight in experts.parameters()}
    made = []

    class Shapes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.ndim == 3 and result._base is None:
                made.append(frozenset(result.shape))
            return result

    with Shapes():
        adapted(IDS[:, :5], labels=IDS[:, :5]).loss.backward()
    assert made and not stacks & {*made}


def test_the_outer_factors_are_shared(tiny_kimi_k3):
    adapted = add_adapters(base_of(tiny_kimi_k3), rank=4, expert_rank=2, shared_outer=True)
    experts = adapted.get_base_model().model.layers[-1].mlp.experts
    latent, width = experts.get_base_layer().hidden_dim, experts.get_base_layer().intermediate_dim
    down, gate_up = experts, experts.base_layer
    shapes = [(*part["default"].weight.shape,) for part in (gate_up.lora_A, gate_up.lora_B, down.lora_A, down.lora_B)]
    count = gate_up.num_experts
    assert shapes == [(2, latent), (2 * width, 2 * count), (2 * count, width), (latent, 2)]
    with pytest.raises(ValueError, match="`shared_outer` is for adapters of Kimi K3's experts"):
        add_adapters(base_of(tiny_kimi_k3), shared_outer=True, experts=False)


def test_factors_of_each_expert_are_not_taken_for_shared_ones(tiny_kimi_k3, tmp_path):
    adapted_of(tiny_kimi_k3).save_pretrained(tmp_path / "of each")
    adapted = adapted_of(tiny_kimi_k3, shared_outer=True)
    adapted.save_pretrained(tmp_path / "shared")
    with pytest.raises(ValueError, match="has a factor for each expert, but experts share theirs"):
        adapted.load_adapter(tmp_path / "of each", "other")
    again = adapted_of(tiny_kimi_k3, shared_outer=True)
    again.load_adapter(tmp_path / "shared", "other")
    again.set_adapter("other")
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, adapted(IDS).logits)


@pytest.fixture(scope="module")
def packed_folder(tmp_path_factory):
    return write_packed(tmp_path_factory.mktemp("packed"))


@pytest.mark.parametrize("shared_outer", [False, True])
def test_adapters_on_packed_experts_are_those_on_unpacked_ones(packed_folder, tmp_path, shared_outer):
    """Logits and gradients, and the adapter saved from either loads onto the other."""
    losses, gradients, adapters = [], [], []
    for packed in (False, True):
        base = base_of(packed_folder, packed_experts=packed, dtype=torch.float32)
        torch.manual_seed(1)
        adapted = moved(add_adapters(base, rank=4, shared_outer=shared_outer))
        losses.append(adapted(IDS, labels=IDS).loss)
        losses[-1].backward()
        gradients.append({name: p.grad for name, p in adapted.named_parameters() if p.grad is not None})
        adapted.save_pretrained(tmp_path / str(packed))
        adapters.append(adapted)
    torch.testing.assert_close(losses[0], losses[1])
    assert gradients[0].keys() == gradients[1].keys() and any("experts" in name for name in gradients[0])
    for name, gradient in gradients[0].items():
        assert (gradients[1][name] - gradient).abs().max() <= 1e-4 * gradient.abs().max() + 1e-9, name
    for packed in (False, True):
        base = base_of(packed_folder, packed_experts=packed, dtype=torch.float32)
        loaded = load_adapter(base, tmp_path / str(not packed))
        torch.testing.assert_close(loaded(IDS, labels=IDS).loss, losses[0], rtol=1e-5, atol=1e-6)
        with loaded.disable_adapter():
            assert abs(loaded(IDS, labels=IDS).loss - losses[0]) > 1e-3


def test_packed_experts_take_a_second_adapter_by_peft(packed_folder, tmp_path):
    """TRL adds one as the reference of `DPOTrainer`."""
    adapted = moved(add_adapters(base_of(packed_folder, packed_experts=True, dtype=torch.float32), rank=4))
    adapted.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = adapted(IDS).logits
    for model in (
        add_adapters(base_of(packed_folder, packed_experts=True, dtype=torch.float32), rank=4),
        load_adapter(base_of(packed_folder, packed_experts=True, dtype=torch.float32), tmp_path),
    ):
        model.load_adapter(tmp_path, "second")
        model.set_adapter("second")
        with torch.no_grad():
            torch.testing.assert_close(model(IDS).logits, expected)


@torch.no_grad()
@pytest.mark.parametrize("shared_outer", [False, True])
def test_adapters_are_merged_into_packed_experts_which_are_packed_again(packed_folder, tmp_path, shared_outer):
    unpacked = moved(add_adapters(base_of(packed_folder, dtype=torch.float32), rank=4, shared_outer=shared_outer))
    unpacked.save_pretrained(tmp_path)
    adapted = load_adapter(base_of(packed_folder, packed_experts=True, dtype=torch.float32), tmp_path)
    first = adapted.get_base_model().model.layers[-1].mlp.experts
    for wrapper in (first, first.base_layer):  # an expert whose adapter is zero
        factor = wrapper.lora_B["default"].weight
        factor.view(factor.shape[0], -1, wrapper.num_experts)[..., 3] = 0
    with pytest.warns(FamilyWarning, match="packing these again moved them by"):
        packed = merge_adapters(adapted)
    before = base_of(packed_folder, packed_experts=True).model.layers[-1].mlp.experts
    after = packed.model.layers[-1].mlp.experts
    expected = merge_adapters(unpacked).model.layers[-1].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        codes, scales = (getattr(after, f"{name}_{part}") for part in ("packed", "scale"))
        assert torch.equal(codes[3], getattr(before, f"{name}_packed")[3])
        assert torch.equal(scales[3], getattr(before, f"{name}_scale")[3])
        for expert in (0, 7):
            wanted = encode_mxfp4(getattr(expected, name)[expert])
            assert torch.equal(decode_mxfp4(codes[expert], scales[expert]), decode_mxfp4(*wanted))
            assert not torch.equal(codes[expert], getattr(before, f"{name}_packed")[expert])
    packed.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(again(IDS).logits, packed(IDS).logits, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_adapters_are_not_taken_out_of_packed_experts_nor_added_twice(packed_folder):
    adapted = moved(add_adapters(base_of(packed_folder, packed_experts=True, dtype=torch.float32), rank=4))
    adapted.merge_adapter()
    expected = adapted(IDS).logits
    with pytest.raises(ValueError, match="cannot be taken out of packed experts"), adapted.disable_adapter():
        adapted(IDS)
    torch.testing.assert_close(adapted(IDS).logits, expected, rtol=1e-3, atol=1e-3)
