"""A read and the norm that follows are one step in training: values, gradients, and a model's training step.

Without Triton, stand-ins in PyTorch's operations replace the kernels (`triton_stand_ins`).
"""

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from attnres import backbones_attnres, depth_attention_reference
from attnres.accelerated import autograd
from attnres.accelerated.autograd import FollowingNorm
from attnres.accelerated.triton import direct

from .triton_cases import DEVICE, DTYPES, EPS, in_float64, make

pytestmark = pytest.mark.usefixtures("kernels")
NORM_EPS = 1e-3


def inputs(n: int, dtype: torch.dtype) -> list[Tensor]:
    """Return a query `[1, D]`, the weights of the key norm and of the norm that follows, and n sources."""
    query, sources = make(n, (2, 4), 16, dtype)
    weights = [torch.linspace(low, 2, 16).to(DEVICE, dtype).requires_grad_() for low in (0.5, -1)]
    return [query.detach().view(1, -1).to(dtype).requires_grad_(), *weights, *sources]


def directly(query: Tensor, key_norm_weight: Tensor, norm_weight: Tensor, *sources: Tensor) -> Tensor:
    """Return a loss over two reads with norms. The second reads what the first returned."""
    norm = FollowingNorm(norm_weight, NORM_EPS)
    result, weights, later = direct.attend(query, sources, key_norm_weight, EPS, True, True, norm)
    again, _, _ = direct.attend(query, [*later, result], key_norm_weight, EPS, True, True, norm)
    return loss(result, weights, again)


def readable(query: Tensor, key_norm_weight: Tensor, norm_weight: Tensor, *sources: Tensor) -> Tensor:
    def read(*sources: Tensor) -> tuple[Tensor, Tensor]:
        options = {"scale": "sum", "return_weights": True}
        h, weights = depth_attention_reference(query[0], sources, key_norm_weight, EPS, **options)
        return torch.nn.functional.rms_norm(h, h.shape[-1:], norm_weight, NORM_EPS), weights

    result, weights = read(*sources)
    return loss(result, weights, read(*sources, result)[0])


def loss(result: Tensor, weights: Tensor, again: Tensor) -> Tensor:
    direction = torch.linspace(-1, 1, result.numel(), device=DEVICE).view(result.shape)
    direction = direction.to(torch.float16).to(result.dtype)  # rounded in the same way for every dtype
    return (direction * result).double().sum() + (weights.double() ** 2).sum() + again.double().square().sum() / 64


def assert_near(actual: list[Tensor], expected: list[Tensor], slack: float) -> None:
    for tensor, exact in zip(actual, expected, strict=True):
        torch.testing.assert_close(tensor.double(), exact, rtol=0, atol=slack * max(1, exact.abs().max().item()))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 3, 9])
def test_reads_with_norms_and_their_gradients_are_those_of_the_readable_form(n, dtype):
    leaves = inputs(n, dtype)
    exact = in_float64(*leaves)
    value = readable(*exact)
    expected = [value, *torch.autograd.grad(value, exact)]
    for _ in range(2):  # the second launches compiled kernels
        value = directly(*leaves)
        actual = [value, *torch.autograd.grad(value, leaves)]
        assert_near(actual, expected, 1e-4 if dtype == torch.float32 else 24 * torch.finfo(dtype).eps)
        assert [grad.shape for grad in actual[1:]] == [leaf.shape for leaf in leaves]
        assert {grad.dtype for grad in actual[1:]} == {dtype}


@pytest.mark.gpu
def test_second_derivatives_of_a_read_with_a_norm_are_those_of_the_readable_form():
    def penalty(function, leaves: list[Tensor]) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(function(*leaves), leaves, create_graph=True)
        return torch.autograd.grad(sum(grad.double().square().sum() for grad in first), leaves)

    leaves = inputs(3, torch.float32)
    assert_near(penalty(directly, leaves), penalty(readable, in_float64(*leaves)), 1e-3)


@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_norm_and_its_gradients_in_operations_are_those_of_pytorch(dtype, shape):
    x, grad = (tensor.detach() for tensor in make(2, shape, 16, dtype)[1])
    norm = FollowingNorm(torch.linspace(-1, 2, 16).to(DEVICE, dtype), NORM_EPS)
    exact = in_float64(x, norm.weight)
    normed = torch.nn.functional.rms_norm(exact[0], (16,), exact[1], NORM_EPS)
    expected = [normed, *torch.autograd.grad(normed, exact, grad.double())]
    actual = [autograd.rms_norm_in_operations(x, norm), *autograd.norm_grads_in_operations(grad, x, norm)]
    assert_near(actual, expected, 1e-6 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps)
    assert {tensor.dtype for tensor in actual} == {dtype}


def test_a_gradient_at_another_alignment_gives_the_same_gradients():
    leaves = inputs(3, torch.float32)
    norm = FollowingNorm(leaves[2], NORM_EPS)
    result, _, _ = direct.attend(leaves[0], leaves[3:], leaves[1], EPS, True, True, norm)
    grad = torch.linspace(-1, 1, result.numel(), device=DEVICE).view(result.shape)
    misaligned = torch.cat([grad.new_ones(1), grad.flatten()])[1:].view(grad.shape)
    expected = torch.autograd.grad(result, leaves, grad, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(result, leaves, misaligned), expected)


@pytest.mark.gpu
def test_weights_that_need_no_gradient_get_none_and_change_no_other():
    leaves = inputs(3, torch.float32)
    expected = torch.autograd.grad(directly(*leaves), leaves)
    leaves[2].requires_grad_(False)
    leaves[0].requires_grad_(False)
    actual = torch.autograd.grad(directly(*leaves), [leaves[1], *leaves[3:]])
    torch.testing.assert_close(actual, (expected[1], *expected[3:]))
    with torch.no_grad():
        torch.testing.assert_close(directly(*leaves), directly(*leaves))


# ---- Models


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    shape = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3}
    config = backbones_attnres.config_on("llama")(num_attention_heads=2, attn_res_block_size=2, **shape)
    model = AutoModelForCausalLM.from_config(config).to(DEVICE).train()
    for name, parameter in model.named_parameters():
        if "norm" in name or "_res_" in name:
            torch.nn.init.normal_(parameter, mean=1)
    return model


def gradients(model: PreTrainedModel, implementation: str) -> list[Tensor]:
    model.config.depth_attention_implementation = implementation
    model.zero_grad()
    tokens = torch.arange(16, device=DEVICE).view(2, -1)
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.fixture
def norms(monkeypatch) -> list[bool]:
    """A list of the direct reads: whether each computed a norm too."""
    reads, attend = [], direct.attend

    def note(*arguments, **options) -> tuple | None:
        attended = attend(*arguments, **options)
        reads.append(attended is not None and len(arguments) > 6 and arguments[6] is not None)
        return attended

    monkeypatch.setattr(direct, "attend", note)
    return reads


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [None, False, True])
def test_a_training_step_reads_with_norms_and_keeps_its_gradients(model, norms, checkpointing):
    expected = gradients(model, "eager")
    assert not norms
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    try:
        torch.testing.assert_close(gradients(model, "triton"), expected, rtol=1e-3, atol=1e-5)
    finally:
        model.gradient_checkpointing_disable()
    # A checkpoint reads again in the backward pass. The output's read has no norm to compute.
    assert norms.count(True) == (6 if checkpointing is None else 12)


@pytest.mark.parametrize("what", ["hook on a norm", "hook on a connection", "other norm", "recorded"])
def test_what_must_run_by_itself_is_left_to_its_module(model, norms, what, monkeypatch):
    tokens, layer = torch.arange(16, device=DEVICE).view(2, -1), model.model.layers[1]
    seen = []
    handle = None
    if what == "hook on a norm":
        handle = layer.input_layernorm.register_forward_hook(lambda *_: seen.append(1))
    elif what == "hook on a connection":
        handle = layer.mlp_res_proj.register_forward_hook(lambda *_: seen.append(1))
    elif what == "other norm":
        norm_class = type(layer.input_layernorm)
        doubled = type("Doubled", (norm_class,), {"forward": lambda self, x: 2 * norm_class.forward(self, x)})
        monkeypatch.setattr(layer.input_layernorm, "__class__", doubled)
    model.config.depth_attention_implementation = "triton"
    model(tokens, use_cache=False, output_hidden_states=what == "recorded")
    if handle is not None:
        handle.remove()
        assert seen == [1]
    assert norms.count(True) == (5 if what in ("hook on a norm", "other norm") else 0)
