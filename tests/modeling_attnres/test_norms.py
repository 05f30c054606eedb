"""The norm that a sublayer begins with: computed with what it reads where that is the same, and else called."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from attnres import AttnResForCausalLM, depth_attention_reference, functional_attnres
from attnres.functional_attnres import attend
from attnres.plain_attnres import is_plain_rms_norm

# A layer norm; two that multiply by one more than the weight; one that rounds after the weight. The rest is as Llama's.
OTHERS = {"gpt_neox", "gemma2", "gemma3_text", "olmo2"}
TOKENS = torch.arange(3, 40).view(1, -1)


pytestmark = pytest.mark.usefixtures("cpu_kernels")


@pytest.fixture
def model(vivid_model) -> AttnResForCausalLM:
    return vivid_model(attn_res_block_size=2)


@pytest.fixture
def fused(monkeypatch) -> list[nn.Module]:
    """Fills with the norms that the kernels compute."""
    seen, compute = [], functional_attnres.depth_attention_on_cpu

    def spy(*args):
        seen.extend(arg for arg in args if isinstance(arg, nn.Module))
        return compute(*args)

    monkeypatch.setattr(functional_attnres, "depth_attention_on_cpu", spy)
    return seen


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def test_a_norm_is_plain_if_it_is_llamas(backbones):
    plain = {}
    for case, (model_type, _) in backbones.CASES.items():
        layer = next(module for name, module in backbones.build(case).named_modules() if name.endswith("layers.0"))
        norm = next(module for name, module in layer.named_children() if name.endswith("layernorm"))
        plain[model_type] = is_plain_rms_norm(norm)
        if plain[model_type]:
            x = torch.randn(5, len(norm.weight))
            expected = rms_norm(x.double(), norm.weight.double(), norm.variance_epsilon)
            torch.testing.assert_close(norm(x).double(), expected, rtol=1e-5, atol=1e-5)
    assert {model_type for model_type, is_plain in plain.items() if not is_plain} == OTHERS


def replace_forward(norm: nn.Module) -> None:
    norm.forward = lambda x: x


@pytest.mark.parametrize(
    "change",
    [
        replace_forward,
        lambda norm: norm.register_forward_hook(lambda *args: None),
        lambda norm: norm.register_forward_pre_hook(lambda *args: None),
        lambda norm: norm.register_full_backward_hook(lambda *args: None),
    ],
)
def test_a_norm_that_does_more_is_not_plain(change):
    norm = LlamaRMSNorm(4)
    assert is_plain_rms_norm(norm)
    change(norm)
    assert not is_plain_rms_norm(norm)


def test_a_hook_on_all_modules_sees_the_norms_too(model, fused):
    seen = []
    with torch.nn.modules.module.register_module_forward_hook(lambda module, *args: seen.append(module)):
        model(TOKENS)
    assert fused == [] and sum("Norm" in type(module).__name__ for module in seen) > 0
    model(TOKENS)
    assert fused != [] and set(fused) <= set(seen)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    n=st.integers(1, 6),
    tokens=st.integers(0, 40),
    width=st.integers(1, 24),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    is_sum=st.booleans(),
    has_key_norm=st.booleans(),
    seed=st.integers(0, 99),
)
def test_with_a_norm_the_result_has_gone_through_it(n, tokens, width, dtype, is_sum, has_key_norm, seed):
    torch.manual_seed(seed)
    norm = LlamaRMSNorm(width, 0.01).to(dtype)
    nn.init.normal_(norm.weight, 1)
    key_norm = 1 + 0.3 * torch.randn(width) if has_key_norm else None
    leaves = [torch.randn(1, width).requires_grad_(), norm.weight]
    leaves += [torch.randn(tokens, width).to(dtype).requires_grad_() for _ in range(n)]
    query, _, *sources = leaves
    result, weights, _ = attend(query, sources, key_norm, 1e-6, is_sum, norm)
    apart = norm(attend(query, sources, key_norm, 1e-6, is_sum)[0])
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 1e-5}
    assert weights is None and result.dtype == dtype
    torch.testing.assert_close(result, apart, **close)
    with torch.no_grad():
        torch.testing.assert_close(attend(query, sources, key_norm, 1e-6, is_sum, norm)[0], apart, **close)

    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    query, norm_weight, *sources = exact
    key_norm = None if key_norm is None else key_norm.double()
    read = depth_attention_reference(query[0], sources, key_norm, 1e-6, scale="sum" if is_sum else "mean")
    direction = torch.randn(tokens, width, dtype=torch.float64)
    expected = torch.autograd.grad((rms_norm(read, norm_weight, 0.01) * direction).sum(), exact)
    actual = torch.autograd.grad((result.double() * direction).sum(), leaves)
    for ours, right in zip(actual, expected):
        largest = right.abs().max().item() if right.numel() else 0
        slack = (1e-4 if dtype == torch.float32 else 0.05) * max(1, largest)
        torch.testing.assert_close(ours.double(), right, rtol=0, atol=slack)


def test_a_model_computes_the_same_with_its_norms_called(model, fused):
    with_kernels = model(TOKENS, labels=TOKENS, use_cache=False)
    layers = model.model.layers
    assert fused == [norm for layer in layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    fused.clear()
    recorded = model(TOKENS, labels=TOKENS, use_cache=False, output_hidden_states=True)
    assert fused == []
    torch.testing.assert_close(with_kernels.logits, recorded.logits, rtol=1e-4, atol=1e-4)
    gradients = []
    for outputs in (with_kernels, recorded):
        model.zero_grad()
        outputs.loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    ours, right = gradients
    assert ours.keys() == right.keys() and "model.layers.1.input_layernorm.weight" in ours
    for name, gradient in right.items():
        slack = 1e-4 * gradient.abs().max().item()
        torch.testing.assert_close(
            ours[name], gradient, rtol=1e-3, atol=slack + 1e-7, msg=lambda t, n=name: f"{n}: {t}"
        )


def watch_norm(model: AttnResForCausalLM, seen: list) -> None:
    model.model.layers[1].input_layernorm.register_forward_hook(lambda module, args, output: seen.append(args[0]))


def watch_connection(model: AttnResForCausalLM, seen: list) -> None:
    connection = model.model.layers[1].self_attention_res_proj
    connection.register_forward_hook(lambda module, args, output: seen.append(output[0]))


@pytest.mark.parametrize("watch", [watch_norm, watch_connection])
def test_hooks_see_what_they_saw_before(model, fused, watch: Callable):
    seen = []
    watch(model, seen)
    model(TOKENS)
    assert model.model.layers[1].input_layernorm not in fused and len(fused) == 2 * len(model.model.layers) - 1
    recorded = model(TOKENS, output_hidden_states=True).hidden_states
    torch.testing.assert_close(seen[0], recorded[1], rtol=1e-4, atol=1e-4)


def test_a_norm_of_another_dtype_is_called(fused):
    norm, sources = LlamaRMSNorm(8), [torch.randn(2, 8).bfloat16() for _ in range(2)]
    result, _, _ = attend(torch.zeros(8), sources, None, 1e-6, True, norm)
    assert fused == [] and result.dtype == torch.float32
    torch.testing.assert_close(result, norm(sources[0] + sources[1]))
