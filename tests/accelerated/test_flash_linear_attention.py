"""The operation of flash-linear-attention: what it lacks is added, and tensors that it does not take are refused.

On a GPU its kernels run. Elsewhere two functions with the same arguments and results replace them.
"""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from attnres.accelerated.triton import IMPLEMENTATIONS, flash_linear_attention

from .triton_cases import DEVICE, EPS, everything, in_float64, loss, make, reference

FLA = IMPLEMENTATIONS["fla"]
RUNS = DEVICE == "cuda" and find_spec("fla") is not None


def forward(q, residuals, res, w, ow, eps, scale, checkpoint_level):
    assert len(res) in (8, 16) and ow is None and checkpoint_level == 1
    assert all(source.is_contiguous() for source in residuals)
    values = torch.stack(residuals).float()
    rstd = (values.square().mean(-1) + eps).rsqrt()
    logit = (values * (q * w)).sum(-1) * rstd
    result = ((logit * scale).softmax(0).unsqueeze(-1) * values).sum(0)
    return result.to(residuals[0].dtype), None, rstd, logit, (logit * scale).logsumexp(0)


def backward(do, q, residuals, res, w, ow, o_pre, rstd, logit, lse, eps, scale, checkpoint_level):
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in (q, w, *residuals)]
        result, *_ = forward(leaves[0], tuple(leaves[2:]), res, leaves[1], ow, eps, scale, checkpoint_level)
        grad_q, grad_w, *grads = torch.autograd.grad(result, leaves, do)
    return grads, grad_q, grad_w, None


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    if not RUNS:
        fused = SimpleNamespace(fused_attnres_fwd=forward, fused_attnres_bwd=backward)
        monkeypatch.setattr(flash_linear_attention, "_operations", lambda: fused)


def by_fla(query: Tensor, sources: list[Tensor], is_sum: bool) -> tuple[Tensor, Tensor]:
    return FLA.run(query, sources, EPS, is_sum)[:2]


@pytest.mark.gpu
@pytest.mark.parametrize("is_sum", [False, True])
@pytest.mark.parametrize("n", [1, 3, 9])
def test_the_result_the_weights_and_all_gradients_are_those_of_the_reference(n, is_sum):
    query, sources = make(n, (2, 3), 64)
    actual = everything(by_fla, query, sources, is_sum)
    query, *sources = in_float64(query, *sources)
    for tensor, exact in zip(actual, everything(reference, query, sources, is_sum), strict=True):
        torch.testing.assert_close(tensor.double(), exact, rtol=1e-4, atol=1e-4 * exact.abs().max().item())


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
    actual = twice(lambda q, s: FLA.run(q, s, EPS, True, fuse_later_grads=True), query, sources)
    query, *sources = in_float64(query, *sources)
    expected = twice(lambda q, s: (*reference(q, s, True), s), query, sources)
    for tensor, exact in zip(actual, expected, strict=True):
        torch.testing.assert_close(tensor.double(), exact, rtol=1e-3, atol=1e-4 * exact.abs().max().item())


class OnGPU(Tensor):
    """A tensor whose `is_cuda` is true on any device."""

    is_cuda = True


@pytest.mark.skipif(DEVICE == "cuda", reason="there is a GPU")
@pytest.mark.parametrize(
    "width, change, reason",
    [
        (64, lambda sources: [*sources, sources[0].half()], "one dtype"),
        (64, lambda sources: [*sources, sources[0].as_subclass(OnGPU)], "plain tensors"),
        (63, lambda sources: sources, "16 bytes"),
        (64, lambda sources: [source[:0] for source in sources], "one token"),
        (64, lambda sources: [source.double() for source in sources], "float32"),
    ],
)
def test_tensors_that_its_kernels_cannot_take_are_refused(width, change, reason):
    query, sources = make(2, (3,), width)
    sources = [source.detach() for source in sources]
    assert reason in FLA.supports(query.detach().as_subclass(OnGPU), change(sources))
    if width == 64:
        assert FLA.supports(query.detach().as_subclass(OnGPU), sources) is None
    assert not FLA.pays(query, sources)


@pytest.mark.skipif(find_spec("fla") is None, reason="needs fla-core")
def test_the_installed_operation_takes_the_expected_arguments(monkeypatch):
    monkeypatch.undo()
    assert not isinstance(flash_linear_attention._operations(), str)


def test_an_operation_with_other_arguments_is_refused(monkeypatch):
    monkeypatch.undo()
    flash_linear_attention._operations.cache_clear()
    fused = SimpleNamespace(fused_attnres_fwd=lambda q: None, fused_attnres_bwd=lambda q: None)
    modules = {"fla": SimpleNamespace(), "fla.ops": SimpleNamespace(), "fla.ops.attnres": SimpleNamespace(fused=fused)}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(flash_linear_attention, "version", lambda name: "9.9")
    try:
        assert flash_linear_attention._operations().startswith("the operation of fla-core 9.9 takes other arguments")
    finally:
        flash_linear_attention._operations.cache_clear()
