"""The operations of other libraries: what they lack is added, and tensors that they do not take are refused.

On a GPU their kernels run. Elsewhere functions with the same arguments and results replace them.
"""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from attnres.accelerated.triton import IMPLEMENTATIONS, LIBRARIES, choices, direct, direct_of_auto
from attnres.functional_attnres import DEPTH_ATTENTION

from .triton_cases import DEVICE, EPS, everything, in_float64, loss, make, reference

MODULES = {"fla": "fla", "liger": "liger_kernel", "fast-attnres": "fast_attnres"}
RUNS = {name: DEVICE == "cuda" and find_spec(module) is not None for name, module in MODULES.items()}
every_library = pytest.mark.parametrize("name", MODULES)


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


def attn_res_forward(blocks, w_query, w_norm, eps=1e-6):
    assert blocks.is_contiguous() and w_norm.dtype == torch.float32
    stacked = blocks.reshape(len(blocks), -1, blocks.shape[-1])
    result, rstd, logit = average(w_query * w_norm, stacked.unbind(), eps)
    return result.view(blocks.shape[1:]), stacked, logit.softmax(0).t().contiguous(), rstd.t().contiguous()


def attn_res_backward(dh, V_3d, w_query, w_norm, Alpha, RSTD, eps=1e-6):
    assert Alpha.shape == RSTD.shape == V_3d.shape[1::-1] and V_3d.ndim == 3
    grad_query, *grads = grads_of_average(dh.reshape(V_3d.shape[1:]), w_query * w_norm, V_3d.unbind(), eps)
    return torch.stack(grads), grad_query, None


def fast_forward(sources, query, eps, scale):
    assert query.dtype == torch.bfloat16 and scale == 1
    result, rstd, logit = average(query.float(), sources, eps)
    fast_forward.eps = eps  # the real kernels take 1 / RMS alone
    return [result, None, rstd, logit.reshape(len(sources), -1), None]


def fast_backward(
    sources, query, saved_mixed, grad_output, saved_inv_rms, saved_logit, softmax_stats, scale
):  # fmt: skip
    grad_query, *grads = grads_of_average(grad_output, query.float(), sources, fast_forward.eps)
    return [*grads, grad_query.to(query.dtype)]


STAND_INS = {
    "fla": SimpleNamespace(fused_attnres_fwd=fla_forward, fused_attnres_bwd=fla_backward),
    "liger": SimpleNamespace(attn_res_forward=attn_res_forward, attn_res_backward=attn_res_backward),
    "fast-attnres": SimpleNamespace(forward=fast_forward, backward=fast_backward),
}


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    for name, library in LIBRARIES.items():
        if not RUNS[name]:
            monkeypatch.setitem(vars(library), "operation", STAND_INS[name])


def inputs(name: str, n: int, shape: tuple[int, ...]) -> tuple[Tensor, list[Tensor], float]:
    """Return a query, sources of a dtype that the library takes, and how far results may be from float64."""
    query, sources = make(n, shape, 64, LIBRARIES[name].dtypes[0])
    is_rounded = sources[0].dtype == torch.bfloat16
    if is_rounded:  # what the library rounds is no error here
        query = query.detach().to(torch.bfloat16).float().requires_grad_()
    return query, sources, 3e-2 if is_rounded else 1e-4


def assert_near(actual: list[Tensor], expected: list[Tensor], slack: float) -> None:
    for tensor, exact in zip(actual, expected, strict=True):
        torch.testing.assert_close(tensor.double(), exact, rtol=slack, atol=slack * max(0.1, exact.abs().max().item()))


@pytest.mark.gpu
@every_library
@pytest.mark.parametrize("is_sum", [False, True])
@pytest.mark.parametrize("n, shape", [(1, (2, 3)), (3, ()), (9, (5,))])
def test_the_result_the_weights_and_all_gradients_are_those_of_the_reference(n, shape, is_sum, name):
    query, sources, slack = inputs(name, n, shape)
    run = IMPLEMENTATIONS[name].run
    actual = everything(lambda q, s, is_sum: run(q, s, EPS, is_sum)[:2], query, sources, is_sum)
    query, *exact = in_float64(query, *sources)
    assert_near(actual, everything(reference, query, exact, is_sum), slack)
    assert [grad.shape for grad in actual[3:]] == [source.shape for source in sources]


@pytest.mark.gpu
@every_library
def test_gradients_of_later_reads_and_second_derivatives_are_added(name):
    def twice(attend: Callable, query: Tensor, sources: list[Tensor]) -> tuple[Tensor, ...]:
        result, weights, later = attend(query, sources)
        value = loss(result, weights) + (later[0] * result).double().square().sum()
        first = torch.autograd.grad(value, (query, *sources), create_graph=True)
        second = torch.autograd.grad(sum(grad.double().square().sum() for grad in first), (query, *sources))
        result, weights, later = attend(query, sources)
        plain = torch.autograd.grad((later[0] * result).double().sum(), (query, *sources))
        return *first, *second, *plain

    query, sources, slack = inputs(name, 3, (2,))
    run = IMPLEMENTATIONS[name].run
    actual = twice(lambda q, s: run(q, s, EPS, True, fuse_later_grads=True), query, sources)
    query, *sources = in_float64(query, *sources)
    expected = twice(lambda q, s: (*reference(q, s, True), s), query, sources)
    assert_near(actual, expected, 10 * slack if slack < 1e-3 else 2 * slack)


class OnGPU(Tensor):
    """A tensor whose `is_cuda` is true on any device."""

    is_cuda = True


def reason(name: str, sources: list[Tensor]) -> str | None:
    query = torch.ones(sources[0].shape[-1]).as_subclass(OnGPU)
    return LIBRARIES[name].supports(query, sources)


def freed(source: Tensor) -> Tensor:
    source = source.clone()
    source.untyped_storage().resize_(0)
    return source


@pytest.mark.skipif(DEVICE == "cuda", reason="there is a GPU")
@every_library
def test_tensors_that_no_kernel_can_take_are_refused(name):
    other = LIBRARIES[name]
    sources = [torch.ones(3, 64, dtype=other.dtypes[0]) for _ in range(2)]
    assert reason(name, sources) is None
    assert other.supports(torch.ones(64), sources) == "the sources are on cpu, not on a GPU"
    assert f"of {str(other.dtypes[0])[6:]}" in reason(name, [*sources, sources[0].half().double()])
    assert "plain tensors" in reason(name, [*sources, sources[0].as_subclass(OnGPU)])
    assert "plain tensors" in reason(name, [source.to("meta") for source in sources])
    assert "one token" in reason(name, [source[:0] for source in sources])
    assert "was freed" in reason(name, [*sources, freed(sources[0])])


@pytest.mark.skipif(DEVICE == "cuda", reason="there is a GPU")
def test_limits_of_one_library_are_named(monkeypatch):
    assert "16 bytes" in reason("fla", [torch.ones(3, 63)])
    assert "16 bytes" in reason("fla", [torch.ones(3 * 64 + 1)[1:].view(3, 64)])
    assert "up to 16384" in reason("liger", [torch.ones(1, 16385)])
    rows = torch.ones(1, 64).expand(2**24, 64)
    assert "counts in 32 bits, and the sources have 2,147,483,648" in reason("liger", [rows, rows])
    assert reason("liger", [rows]) is None
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert "in any order" in reason("liger", [torch.ones(3, 64)])
    few = torch.ones(3, 64, dtype=torch.bfloat16)
    assert "not 130 of 64" in reason("fast-attnres", [few] * 130)
    assert "not 1 of 8193" in reason("fast-attnres", [few.new_ones(1, 8193)])
    assert "one dtype, of bfloat16" in reason("fast-attnres", [torch.ones(3, 64)])


@every_library
def test_a_library_that_is_absent_or_of_another_release_is_refused_in_one_line(name, monkeypatch):
    library = type(LIBRARIES[name])()
    monkeypatch.setattr(library, "load", lambda: SimpleNamespace(**dict.fromkeys(library.arguments, lambda q: None)))
    assert library.operation == (
        f"the operation of this {library.package} takes other arguments than that of {library.release}"
    )
    library = type(LIBRARIES[name])()
    monkeypatch.setattr(library, "load", lambda: SimpleNamespace())
    assert library.operation.startswith(f"{library.package} does not load")
    monkeypatch.setitem(sys.modules, MODULES[name], None)
    library = type(LIBRARIES[name])()
    assert library.operation.startswith(f"{library.package} is not installed")
    assert library.install in library.operation and library.package in library.install


@every_library
def test_the_installed_operation_takes_the_expected_arguments(name):
    if find_spec(MODULES[name]) is None:
        pytest.skip(f"needs {LIBRARIES[name].package}")
    assert not isinstance(type(LIBRARIES[name])().operation, str)


@pytest.fixture
def liger_from_nine(monkeypatch):
    monkeypatch.setattr(choices, "TRAINING", ((1, "triton"), (9, "liger")))


def test_our_kernels_are_chosen_until_a_table_names_a_library():
    query, sources = make(17, (3,), 64)
    assert not any(library.pays(query, sources) for library in LIBRARIES.values())
    assert direct_of_auto() is direct.attend


def test_the_table_chooses_by_number_of_sources_and_by_whether_gradients_are_recorded(liger_from_nine, monkeypatch):
    monkeypatch.setattr(direct, "attend", lambda *_: "ours")
    attend, query = direct_of_auto(), torch.ones(64)
    for count, trains, name in ((8, True, "triton"), (9, True, "liger"), (17, True, "liger"), (17, False, "triton")):
        with torch.set_grad_enabled(trains):
            assert choices.chosen(count, trains) == name
            assert attend(query, [query] * count) == ("ours" if name == "triton" else None)
            assert LIBRARIES["liger"].pays(query, [query] * count) == (name == "liger")


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU would run our kernels")
def test_auto_runs_the_chosen_library_if_it_can(liger_from_nine, monkeypatch):
    query, sources = make(9, (3,), 64)
    expected, _, _ = DEPTH_ATTENTION["eager"](query, sources, EPS, True)
    called = []
    run = LIBRARIES["liger"].compute
    monkeypatch.setattr(LIBRARIES["liger"], "compute", lambda *arguments: called.append(1) or run(*arguments))
    torch.testing.assert_close(DEPTH_ATTENTION["auto"](query.as_subclass(OnGPU), sources, EPS, True)[0], expected)
    assert called == [1]
    torch.testing.assert_close(DEPTH_ATTENTION["auto"](query, sources, EPS, True)[0], expected)
    assert called == [1]
