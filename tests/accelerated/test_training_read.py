"""In training one kernel computes a read and the norm after it: the numbers of both modules, where both do no more."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from attnres import AttnResLlamaConfig, AttnResLlamaForCausalLM, depth_attention_reference
from attnres.accelerated.autograd import FollowingNorm
from attnres.accelerated.numba import training as on_cpu
from attnres.attn_res_attnres import AttnRes
from attnres.kimi_linear_configuration_attnres import AttnResConfig
from attnres.residual_attnres import ResidualNorm

pytestmark = [pytest.mark.usefixtures("cpu_kernels")]
EPS, NORM_EPS, WIDTH = 1e-2, 1e-3, 40


def read_with_norm(
    query: Tensor, g: Tensor, weight: Tensor, sources: list[Tensor], is_sum: bool = True
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    attended = on_cpu.read(query, sources, g, EPS, is_sum, True, FollowingNorm(weight, NORM_EPS))
    return None if attended is None else (attended[0], attended[2])


def reads_of_kernels(is_sum: bool) -> Callable:
    return lambda query, g, weight, sources: read_with_norm(query, g, weight, sources, is_sum)


def reads_of_equation(is_sum: bool) -> Callable:
    def read(query: Tensor, g: Tensor, weight: Tensor, sources: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        h = depth_attention_reference(query[0], sources, g, EPS, scale="sum" if is_sum else "mean")
        return weight * h * (h.square().mean(-1, keepdim=True) + NORM_EPS).rsqrt(), sources

    return read


def chain(read: Callable, reads: int, leaves: list[Tensor]) -> Tensor:
    """Return a loss over several reads. Each result is a source of the next read, and one source is used directly."""
    total, weights, sources = 0, leaves[: 3 * reads], leaves[3 * reads :]
    for i in range(0, 3 * reads, 3):
        result, sources = read(*weights[i : i + 3], sources)
        total = total + (result * sources[0].cos()).sum()
        sources = [*sources, result.sin()]
    return total + sources[-1].sum()


def inputs(n: int, tokens: int, width: int, dtype: torch.dtype, reads: int, frozen: bool = False) -> list[Tensor]:
    """Return the query and both norms' weights of each read, then n sources; `frozen` are some of all kinds."""
    torch.manual_seed(0)
    leaves = [torch.randn(1, width), torch.rand(width) + 0.5, torch.rand(width) + 0.5] * reads
    leaves += [torch.randn(tokens, width) for _ in range(n)]
    # `clone`, because the reads must not share a leaf.
    return [leaf.clone().to(dtype).requires_grad_(not frozen or i % 4 != 1) for i, leaf in enumerate(leaves)]


def grads(read: Callable, reads: int, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(chain(read, reads, leaves), [leaf for leaf in leaves if leaf.requires_grad])


def exactly(leaves: list[Tensor]) -> list[Tensor]:
    return [leaf.detach().double().requires_grad_(leaf.requires_grad) for leaf in leaves]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n, tokens, width, is_sum", [(1, 3, 5, False), (2, 40, 64, True), (7, 17, 77, True)])
@pytest.mark.parametrize("frozen", [False, True])
def test_results_and_gradients_are_those_of_the_equations(n, tokens, width, is_sum, frozen, dtype):
    leaves = inputs(n, tokens, width, dtype, reads=3, frozen=frozen)
    expected = grads(reads_of_equation(is_sum), 3, exactly(leaves))
    for actual, right in zip(grads(reads_of_kernels(is_sum), 3, leaves), expected, strict=True):
        slack = (1e-4 if dtype == torch.float32 else 0.12) * max(1, right.abs().max().item())
        torch.testing.assert_close(actual.double(), right, rtol=0, atol=slack)


@pytest.mark.parametrize("only", [None, 0, 2, 3])
def test_the_backward_pass_is_differentiable(only):
    def penalty(read: Callable, leaves: list[Tensor]) -> tuple[Tensor, ...]:
        needed = [leaf for leaf in leaves if leaf.requires_grad]
        first = torch.autograd.grad(chain(read, 1, leaves), needed, create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in first), needed)

    leaves = inputs(3, 7, 24, torch.float32, reads=1)
    for i, leaf in enumerate(leaves):
        leaf.requires_grad_(only is None or i == only)
    expected = penalty(reads_of_equation(True), exactly(leaves))
    for actual, right in zip(penalty(reads_of_kernels(True), leaves), expected, strict=True):
        torch.testing.assert_close(actual.double(), right, rtol=0, atol=1e-4 * max(1, right.abs().max().item()))


def test_the_bits_do_not_depend_on_the_number_of_threads():
    before, seen = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            seen.append(grads(reads_of_kernels(True), 2, inputs(3, 90, WIDTH, torch.float32, reads=2)))
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *seen))


@pytest.fixture(scope="module")
def model() -> AttnResLlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 3}
    config = AttnResLlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, attn_res_block_size=2)
    model = AttnResLlamaForCausalLM(config).train()
    for module in model.modules():
        if isinstance(module, AttnRes):
            nn.init.normal_(module.weight)
    return model


def step(model: AttnResLlamaForCausalLM, implementation: str = "auto") -> dict[str, Tensor]:
    """Return the gradients of a training step by name."""
    ids = torch.arange(24).view(2, 12)
    model.config.depth_attention_implementation = implementation
    model(ids, labels=ids, use_cache=False).loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


@pytest.fixture
def fused(monkeypatch) -> list[bool]:
    """Whether the loops computed each read, in the order of the reads."""
    seen, read = [], on_cpu.read

    def spy(*arguments) -> object:
        both = read(*arguments)
        seen.append(both is not None)
        return both

    monkeypatch.setattr(on_cpu, "read", spy)
    return seen


def test_a_model_trains_by_the_gradients_of_plain_pytorch(model, fused):
    actual = step(model)
    assert fused == [True] * 7
    expected = step(model, "eager")
    assert fused == [True] * 7
    for name, right in expected.items():
        torch.testing.assert_close(actual[name], right, rtol=1e-3, atol=1e-6, msg=name)


def test_a_recomputed_layer_has_the_same_bits(model, fused):
    expected = step(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        actual = step(model)
    finally:
        model.gradient_checkpointing_disable()
    assert len(fused) == 7 + 13 and all(fused)  # the output too, but not again
    assert all(torch.equal(actual[name], right) for name, right in expected.items())


def test_a_model_reads_alone_while_a_read_is_recorded_and_without_gradients(model, fused):
    ids = torch.arange(8)[None]
    assert model(ids, output_depth_attentions=True).depth_attentions is not None
    with torch.no_grad():
        model(ids)
    assert fused == []


def watch(module: nn.Module) -> None:
    module.register_forward_hook(lambda *args: None)


def watch_grads(module: nn.Module) -> None:
    module.register_full_backward_hook(lambda *args: None)


def replace_forward(module: nn.Module) -> None:
    module.forward = type(module).forward.__get__(module)


def modules() -> tuple[AttnRes, ResidualNorm, nn.Module]:
    return AttnRes(AttnResConfig(hidden_size=WIDTH), 1), ResidualNorm(WIDTH), LlamaRMSNorm(WIDTH)


def is_fused(connection: nn.Module, key_norm: nn.Module, norm: nn.Module, *sources: Tensor) -> bool:
    plan = on_cpu.training_plan([(connection, key_norm, norm)])
    return plan is not None and plan.read(connection, sources)[1]


@pytest.mark.parametrize("part", [0, 1, 2], ids=["connection", "key norm", "norm"])
@pytest.mark.parametrize("change", [watch, watch_grads, replace_forward, nn.Module.compile])
def test_modules_that_do_more_than_their_class_are_called_one_by_one(change, part):
    sources = torch.randn(2, 3, WIDTH), torch.randn(2, 3, WIDTH)
    chosen = modules()
    assert is_fused(*chosen, *sources)
    change(chosen[part])
    assert not is_fused(*chosen, *sources)


@pytest.mark.parametrize("part", [0, 1, 2], ids=["query", "weight of the key norm", "weight of the norm"])
@pytest.mark.parametrize("change", [Tensor.double, lambda weight: weight.to("meta"), lambda weight: weight[..., 1:]])
def test_weights_that_the_loops_do_not_take_are_left_to_the_modules(change, part):
    sources, weights = [torch.randn(2, 3, WIDTH)] * 2, [torch.ones(1, WIDTH), torch.ones(WIDTH), torch.ones(WIDTH)]
    assert read_with_norm(*weights, sources) is not None
    weights[part] = change(weights[part])
    assert read_with_norm(*weights, sources) is None


def test_other_norms_and_sources_are_called_one_by_one(monkeypatch):
    one, other = torch.randn(2, 3, WIDTH), torch.randn(2, 3, WIDTH)
    connection, key_norm, norm = modules()
    assert is_fused(connection, key_norm, norm, one, other)
    assert not is_fused(connection, key_norm, Gemma2RMSNorm(WIDTH), one, other)
    assert not is_fused(connection, key_norm, nn.LayerNorm(WIDTH), one, other)
    assert not is_fused(connection, key_norm, norm, one.bfloat16(), other.bfloat16())  # the norm is in float32
    hook = register_module_forward_hook(lambda *args: None)
    assert not is_fused(connection, key_norm, norm, one, other)
    hook.remove()
    assert is_fused(connection, key_norm, norm, one, other)
    with torch.autograd.forward_ad.dual_level():
        assert not is_fused(connection, key_norm, norm, one, other)
    monkeypatch.setattr(AttnRes, "forward", lambda self, state, norm: (state[0], None, state))
    assert not is_fused(connection, key_norm, norm, one, other)
