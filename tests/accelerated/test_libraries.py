"""The operation of flash-linear-attention: what it lacks is added, and tensors that it does not take are refused.

On a GPU its kernels run. Elsewhere functions with the same arguments and results replace them.
"""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from attnres.accelerated import registration
from attnres.accelerated.triton import IMPLEMENTATIONS
from attnres.accelerated.triton import flash_linear_attention as fla

from .triton_cases import DEVICE, EPS, everything, in_float64, loss, make, reference

RUNS = DEVICE == "cuda" and find_spec("fla") is not None
SLACK = 1e-4  # how far results may be from float64


def average(query: Tensor, sources: tuple[Tensor, ...], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the softmax average, and 1 / RMS and logits `[n, ...]`."""
    values = torch.stack(sources).float()
    rstd = (values.square().mean(-1) + eps).rsqrt()
    logit = (values * query).sum(-1) * rstd
    return (logit.softmax(0).unsqueeze(-1) * values).sum(0).to(sources[0].dtype), rstd, logit


def grads_of_average(grad: Tensor, query: Tensor, sources: tuple[Tensor, ...], eps: float) -> list[Tensor]:
    """Return the gradients of the query and of each source."""
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in (query, *sources)]
        result, *_ = average(leaves[0], tuple(leaves[1:]), eps)
        return [*torch.autograd.grad(result, leaves, grad)]


def fla_forward(q, residuals, res, w, ow, eps, scale, checkpoint_level):
    assert len(res) in (8, 16) and ow is None and checkpoint_level == 1 and scale == 1
    assert all(source.is_contiguous() for source in residuals)
    result, rstd, logit = average(q * w, residuals, eps)
    return result, None, rstd, logit, logit.logsumexp(0)


def fla_backward(do, q, residuals, res, w, ow, o_pre, rstd, logit, lse, eps, scale, checkpoint_level):
    grad_q, *grads = grads_of_average(do, q * w, residuals, eps)
    return grads, grad_q, None, None


STAND_IN = SimpleNamespace(fused_attnres_fwd=fla_forward, fused_attnres_bwd=fla_backward)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    if not RUNS:
        monkeypatch.setattr(fla, "operation", lambda: STAND_IN)


def assert_near(actual: list[Tensor], expected: list[Tensor], slack: float) -> None:
    for tensor, exact in zip(actual, expected, strict=True):
        torch.testing.assert_close(tensor.double(), exact, rtol=slack, atol=slack * max(0.1, exact.abs().max().item()))


@pytest.mark.gpu
@pytest.mark.parametrize("is_sum", [False, True])
@pytest.mark.parametrize("n, shape", [(1, (2, 3)), (3, ()), (9, (5,))])
def test_the_result_the_weights_and_all_gradients_are_those_of_the_reference(n, shape, is_sum):
    query, sources = make(n, shape, 64)
    run = IMPLEMENTATIONS["fla"].run
    actual = everything(lambda q, s, is_sum: run(q, s, EPS, is_sum)[:2], query, sources, is_sum)
    query, *exact = in_float64(query, *sources)
    assert_near(actual, everything(reference, query, exact, is_sum), SLACK)
    assert [grad.shape for grad in actual[3:]] == [source.shape for source in sources]


@pytest.mark.gpu
def test_gradients_of_later_reads_and_second_derivatives_are_added():
    def twice(attend: Callable, query: Tensor, sources: list[Tensor]) -> tuple[Tensor, ...]:
        result, weights, later = attend(query, sources)
        value = loss(result, weights) + (later[0] * result).double().square().sum()
        first = torch.autograd.grad(value, (query, *sources), create_graph=True)
        second = torch.autograd.grad(sum(grad.double().square().sum() for grad in first), (query, *sources))
        result, weights, later = attend(query, sources)
        plain = torch.autograd.grad((later[0] * result).double().sum(), (query, *sources))
        return *first, *second, *plain

    query, sources = make(3, (2,), 64)
    run = IMPLEMENTATIONS["fla"].run
    actual = twice(lambda q, s: run(q, s, EPS, True, fuse_later_grads=True), query, sources)
    query, *sources = in_float64(query, *sources)
    expected = twice(lambda q, s: (*reference(q, s, True), s), query, sources)
    assert_near(actual, expected, 10 * SLACK)


class OnGPU(Tensor):
    """A tensor whose `is_cuda` is true on any device."""

    is_cuda = True


def reason(sources: list[Tensor]) -> str | None:
    return fla.supports(torch.ones(sources[0].shape[-1]).as_subclass(OnGPU), sources)


def freed(source: Tensor) -> Tensor:
    source = source.clone()
    source.untyped_storage().resize_(0)
    return source


@pytest.mark.skipif(DEVICE == "cuda", reason="there is a GPU")
def test_tensors_that_no_kernel_can_take_are_refused():
    sources = [torch.ones(3, 64) for _ in range(2)]
    assert reason(sources) is None
    assert fla.supports(torch.ones(64), sources) == "the sources are on cpu, not on a GPU"
    assert "of float32" in reason([*sources, sources[0].double()])
    assert "plain tensors" in reason([*sources, sources[0].as_subclass(OnGPU)])
    assert "plain tensors" in reason([source.to("meta") for source in sources])
    assert "one token" in reason([source[:0] for source in sources])
    assert "was freed" in reason([*sources, freed(sources[0])])
    assert "16 bytes" in reason([torch.ones(3, 63)])
    assert "16 bytes" in reason([torch.ones(3 * 64 + 1)[1:].view(3, 64)])


@pytest.fixture
def real_operation(monkeypatch) -> Callable:
    """Return the function that loads the library, without what earlier calls have found."""
    monkeypatch.undo()
    fla.operation.cache_clear()
    yield fla.operation
    fla.operation.cache_clear()


@pytest.mark.parametrize(
    "module, message",
    [
        (SimpleNamespace(**dict.fromkeys(fla.ARGUMENTS, lambda q: None)), "takes other arguments than that of"),
        (SimpleNamespace(), "fla-core does not load"),
        (None, "fla-core is not installed"),
    ],
)
def test_a_library_that_is_absent_or_of_another_release_is_refused_in_one_line(
    module, message, real_operation, monkeypatch
):
    package = None if module is None else SimpleNamespace(fused=module)
    monkeypatch.setitem(sys.modules, "fla.ops.attnres", package)
    assert message in real_operation()


def test_the_installed_operation_takes_the_expected_arguments(real_operation):
    if find_spec("fla") is None:
        pytest.skip("needs fla-core")
    assert not isinstance(real_operation(), str)


def test_auto_never_takes_it():
    query, sources = make(17, (3,), 64)
    assert not fla.IMPLEMENTATION.pays(query, sources)
    assert fla.IMPLEMENTATION not in registration.OF_AUTO.values()
