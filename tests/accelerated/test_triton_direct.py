"""The direct path of a read: it computes the readable form, takes only tensors that it can, and costs the host little.

Without Triton, stand-ins in PyTorch's operations replace the kernels (`triton_stand_ins`).
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from attnres import depth_attention, depth_attention_reference
from attnres.accelerated.triton import direct, launch
from attnres.functional_attnres import attend

from .triton_cases import DEVICE, DTYPES, EPS, RUNS, in_float64, loss, make
from .triton_stand_ins import Compiled, Kernel

IS_RIGHT_ON = direct.is_right_on  # which the fixture replaces
pytestmark = pytest.mark.usefixtures("kernels")


def read(query: Tensor, sources: list[Tensor], weight: Tensor, is_sum: bool = True, fuse: bool = True) -> tuple:
    attended = direct.attend(query, sources, weight, EPS, is_sum, fuse)
    assert attended is not None
    return attended


def by_reference(query: Tensor, sources: list[Tensor], weight: Tensor, is_sum: bool = True, fuse: bool = True) -> tuple:
    kind = {"scale": "sum" if is_sum else "mean", "return_weights": True}
    return *depth_attention_reference(query.view(-1), sources, weight, EPS, **kind), sources


def chain(attend: Callable, query: Tensor, sources: list[Tensor], weight: Tensor, is_sum: bool, fuse: bool) -> Tensor:
    """Return a loss over two reads. The second reads the sources that the first returned, and its result."""
    result, weights, later = attend(query, sources, weight, is_sum, fuse)
    again, _, _ = attend(query, [*later, result], weight, is_sum, fuse)
    return loss(result, weights) + again.double().square().sum() / 64  # gradients fit float16


def inputs(n: int, dtype=torch.float32, shape=(2, 4), width=16) -> tuple[Tensor, list[Tensor], Tensor]:
    query, sources = make(n, shape, width, dtype)
    weight = torch.linspace(0.5, 2, width).to(DEVICE, query.dtype).requires_grad_()
    return query, sources, weight


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n, is_sum, fuse, rows", [(1, True, False, 0), (3, False, True, 1), (9, True, True, 1)])
def test_reads_and_their_gradients_are_those_of_the_readable_form(n, is_sum, fuse, rows, dtype):
    query, sources, weight = inputs(n, dtype)
    query = query.detach().view(*[1] * rows, -1).to(dtype).requires_grad_()
    weight = weight.detach().to(dtype if n == 9 else torch.float32).requires_grad_()
    sources[-1].requires_grad_(n == 1)  # the last of several needs no gradient
    leaves = [query, weight, *(source for source in sources if source.requires_grad)]
    exact = in_float64(query, weight, *sources)
    expected = torch.autograd.grad(chain(by_reference, exact[0], exact[2:], exact[1], is_sum, fuse), exact)
    for _ in range(2):  # the second launches compiled kernels
        actual = torch.autograd.grad(chain(read, query, sources, weight, is_sum, fuse), leaves)
        for leaf, grad, right in zip(leaves, actual, expected):
            assert (grad.dtype, grad.shape) == (leaf.dtype, leaf.shape)
            slack = 1e-4 if dtype == torch.float32 else 16 * torch.finfo(dtype).eps
            torch.testing.assert_close(grad.double(), right, rtol=0, atol=slack * max(1, right.abs().max().item()))


@pytest.mark.gpu
def test_second_derivatives_are_those_of_the_readable_form():
    def penalty(attend: Callable, query: Tensor, weight: Tensor, *sources: Tensor) -> tuple[Tensor, ...]:
        leaves = [query, weight, *sources]
        first = torch.autograd.grad(chain(attend, query, [*sources], weight, True, True), leaves, create_graph=True)
        return torch.autograd.grad(sum(grad.double().square().sum() for grad in first), leaves)

    query, sources, weight = inputs(3)
    expected = penalty(by_reference, *in_float64(query, weight, *sources))
    for actual, right in zip(penalty(read, query, weight, *sources), expected, strict=True):
        torch.testing.assert_close(actual.double(), right, rtol=0, atol=1e-4 * max(1, right.abs().max().item()))


def test_weights_that_are_not_needed_are_left_out_and_change_no_gradient():
    query, sources, weight = inputs(3)
    leaves = [query, weight, *sources]
    grads = []
    for needs_weights in (True, False):
        result, weights, later = direct.attend(query, sources, weight, EPS, True, True, needs_weights=needs_weights)
        assert (weights is None) != needs_weights
        grads.append(torch.autograd.grad(result.square().sum() + later[1].sum(), leaves))
    torch.testing.assert_close(*grads, rtol=0, atol=0)
    with torch.no_grad():
        assert direct.attend(query, sources, weight, EPS, True, True, needs_weights=False)[1] is None


def test_models_and_the_public_function_take_the_direct_path_by_name(kernels):
    name = "triton"
    query, sources, weight = inputs(3)
    expected = by_reference(query, sources, weight, is_sum=False)[0]
    for _ in range(2):
        actual, _, later = attend(query, sources, weight, EPS, False, name, fuse_later_grads=True)
        torch.testing.assert_close(actual, expected)
    assert isinstance(later, tuple)
    torch.testing.assert_close(depth_attention(query, sources, weight, EPS, implementation=name), expected)
    with torch.no_grad():
        assert attend(query, sources, weight, EPS, False, name)[2] is sources
    assert RUNS or kernels.forward_kernel.launches == {"bound": 1, "compiled": 3}


class Wrapped(Tensor):
    """A subclass, whose memory may be elsewhere."""


def freed(source: Tensor) -> Tensor:
    source = source.detach().clone()
    source.untyped_storage().resize_(0)
    return source


@pytest.mark.parametrize(
    "change",
    [
        lambda source: source[..., :8],
        lambda source: source.double(),
        lambda source: source.half(),
        lambda source: source.transpose(0, 1).contiguous().transpose(0, 1),
        lambda source: torch.cat([source.flatten(), source.flatten()])[1 : 1 + source.numel()].view_as(source),
        lambda source: source.as_subclass(Wrapped),
        lambda source: source.to("meta"),
        torch._neg_view,
        freed,
    ],
)
@torch.no_grad()
def test_sources_that_kernels_cannot_take_as_they_are_go_another_way(change):
    query, sources, weight = inputs(3)
    read(query, sources, weight)  # makes the plan
    assert direct.attend(query, [*sources[:2], change(sources[2])], weight, EPS, True, True) is None


@torch.no_grad()
def test_weights_and_shapes_that_do_not_fit_go_another_way():
    query, sources, weight = inputs(3)
    for wrong in (query[:8], query.view(-1, 1), query.double(), query.to("meta"), query.as_subclass(Wrapped)):
        assert direct.attend(wrong, sources, weight, EPS, True, True) is None
        assert direct.attend(query, sources, wrong, EPS, True, True) is None
    assert direct.attend(torch.ones(1), [torch.ones(())], torch.ones(1), EPS, True, True) is None
    with pytest.raises(ValueError, match="`query` has shape"):
        depth_attention(query.view(1, -1), sources, weight)
    for shape, width in (((3,), 5), ((1,), 4), ((0,), 8)):  # parts of an allocation would begin between 16 bytes
        query, sources, weight = inputs(1, shape=shape, width=width)
        assert direct.attend(query, sources, weight, EPS, True, True) is None


@torch.no_grad()
def test_programs_that_compile_backward_passes_take_the_general_path():
    query, sources, weight = inputs(3)
    read(query, sources, weight)  # makes the plan
    with torch._dynamo.config.patch(compiled_autograd=True):
        direct.training_plan([(SimpleNamespace(weight=query), None, None)])  # as each pass of a model does
        assert direct.attend(query, sources, weight, EPS, True, True) is None
    read(query, sources, weight)


def test_a_gradient_at_another_alignment_goes_the_general_way(monkeypatch):
    taken = []
    monkeypatch.setattr(
        launch, "backward", lambda *arguments: taken.append(arguments[0]) or (torch.ones(1, 16), [None])
    )
    query, sources, weight = inputs(1)
    result, *_ = read(query, sources, weight, fuse=False)
    misaligned = torch.ones(1 + result.numel(), device=DEVICE)[1:].view_as(result)
    torch.autograd.grad(result, query, misaligned, retain_graph=True)
    assert [grad.data_ptr() for grad in taken] == [misaligned.data_ptr()]
    torch.autograd.grad(result, query, misaligned.clone())
    assert len(taken) == 1


def fail(*values: object) -> None:
    raise TypeError("an argument is missing")


@pytest.mark.skipif(RUNS, reason="Triton's compiled kernels take what they take")
def test_compiled_kernels_that_take_other_arguments_are_left_to_triton(kernels, monkeypatch):
    device = torch.device(DEVICE)
    monkeypatch.setattr(direct, "_right_on", {})
    assert IS_RIGHT_ON(device)
    assert all(kernel.launches == {"bound": 1, "compiled": 1} for kernel in vars(kernels).values())

    call = Compiled.__getitem__

    def reverse_sources(kernel: Compiled, grid: tuple) -> Callable:
        return lambda first, *rest: call(kernel, grid)(first[::-1] if isinstance(first, tuple) else first, *rest)

    for changed, reason in ((reverse_sources, "computes other numbers"), (lambda *_: fail, "fails .*an argument is")):
        monkeypatch.setattr(Compiled, "__getitem__", changed)
        monkeypatch.setattr(direct, "_right_on", {})
        with pytest.warns(UserWarning, match=f"direct path of a read {reason}"):
            assert not IS_RIGHT_ON(device)
        assert not IS_RIGHT_ON(device)  # without another trial

    monkeypatch.setattr(direct, "is_right_on", lambda device: False)
    query, sources, weight = inputs(2)
    assert direct.attend(query, sources, weight, EPS, True, True) is None


def test_as_many_plans_are_kept_as_a_program_needs(monkeypatch):
    monkeypatch.setattr(direct, "_MOST_PLANS", 2)
    for tokens in (4, 8, 12):
        query, sources, weight = inputs(2, shape=(tokens,))
        read(query, sources, weight)
        assert 1 <= len(direct._plans) <= 2


@contextmanager
def counted() -> Iterator[Counter]:
    """Count calls of this package's functions as `call`, and allocations of tensors as `allocations`."""
    counts = Counter()

    def profile(frame, event: str, argument: object) -> None:
        if event == "call":
            counts["call"] += frame.f_globals["__name__"].startswith("attnres.")

    with torch.autograd.profiler.profile() as operations:
        sys.setprofile(profile)
        try:
            yield counts
        finally:
            sys.setprofile(None)
    counts["allocations"] = sum(e.name in ("aten::empty", "aten::empty_strided") for e in operations.function_events)


def cost(n: int) -> dict[str, object]:
    """Return the counts of the third read of its kind and of its backward pass."""
    query, sources, weight = inputs(n)
    leaves = [query, weight, *sources]
    saved = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    for _ in range(3):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), counted() as there:
            result, *_ = attend(query, sources, weight, EPS, True, "triton", fuse_later_grads=True)
        grad = torch.ones_like(result)
        with counted() as back:
            torch.autograd.grad(result, leaves, grad)
    return {"forward": there["call"], "backward": back["call"], "saved": len(saved) - n} | {
        "allocations": (there["allocations"], back["allocations"])
    }


@pytest.mark.skipif(RUNS, reason="Triton's launches would be counted too")
def test_the_cost_of_a_read_does_not_grow_with_the_number_of_sources(kernels, monkeypatch):
    monkeypatch.setattr(Kernel, "compute", lambda kernel, arguments: None)  # the stand-ins allocate too
    few, many = cost(2), cost(17)
    assert few == many
    # Beside its sources a read saves the query, the norm's weight and the statistics.
    assert few["saved"] == 3
    # Forward the result and the statistics; backward scratch, parts of the query's gradient, that gradient, the one of
    # the norm's weight, and all others.
    assert few["allocations"] == (2, 5)
    assert few["forward"] <= 6
    assert few["backward"] <= 5
    assert all(kernel.launches == {"bound": 2, "compiled": 4} for kernel in vars(kernels).values())
