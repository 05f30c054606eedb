"""SiTU by the compiled loops: its formula at all sizes, its gradients, and the same bits for the same row."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnres import accelerated
from attnres.accelerated.numba import activation, call
from attnres.kimi_k3_attnres import situ

pytest.importorskip("numba")

BETAS = [(4.0, 25.0), (4.0, None), (1.5, 0.5)]
WIDTHS = [activation.WIDE, activation.WIDE + 1, activation.WIDE + 15, 1000]


def exact(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    gate, up = gate.double(), up.double()
    up = up if linear_beta is None else linear_beta * torch.tanh(up / linear_beta)
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 8).to(dtype)


# A number below the least normal one has few bits, and loses more of them when it is divided by a bound.
@given(st.lists(st.floats(width=32, allow_subnormal=False), min_size=1, max_size=20), st.sampled_from(BETAS))
@settings(deadline=None, max_examples=30)
def test_the_loops_compute_the_formula_for_every_number(numbers, betas):
    row = torch.tensor(numbers).repeat(activation.WIDE)
    gate, up = row, row.roll(1)
    result = accelerated.situ(gate, up, *betas)
    expected = exact(gate, up, *betas)
    assert torch.equal(result.isnan(), expected.isnan())
    kept = ~expected.isnan()
    # Numbers below the least normal one may be zero.
    torch.testing.assert_close(result[kept], expected[kept].float(), rtol=1.2e-6, atol=4e-37)


@pytest.mark.parametrize("betas", BETAS, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_gradients_are_those_of_the_formula(width, betas):
    gate, up, grad = (random(5, width, seed=seed) for seed in range(3))
    inputs = [x.double().requires_grad_() for x in (gate, up)]
    exact(*inputs, *betas).backward(grad.double())
    for ours, x in zip(accelerated.situ_grads(gate, up, grad, *betas), inputs, strict=True):
        # `1 - tanh^2` of a large number is a difference of nearly equal ones, here as in PyTorch's own derivative.
        torch.testing.assert_close(ours.double(), x.grad, rtol=1e-5, atol=1e-6 * x.grad.abs().max().item())


@pytest.mark.parametrize("width", WIDTHS)
def test_bfloat16_is_the_rounded_result_of_float32(width):
    gate, up, grad = (random(3, width, dtype=torch.bfloat16, seed=seed) for seed in range(3))
    wide = [x.float() for x in (gate, up, grad)]
    assert torch.equal(accelerated.situ(gate, up, 4.0, 25.0), accelerated.situ(*wide[:2], 4.0, 25.0).bfloat16())
    ours, expected = accelerated.situ_grads(gate, up, grad, 4.0, 25.0), accelerated.situ_grads(*wide, 4.0, 25.0)
    assert all(torch.equal(x, y.bfloat16()) for x, y in zip(ours, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_alone_and_among_others_and_on_any_number_of_threads(dtype):
    both = random(70, 2 * 300, dtype=dtype)
    grad = random(70, 300, dtype=dtype, seed=1)
    gate, up = both.chunk(2, -1)
    whole, grads = accelerated.situ(gate, up, 4.0, 25.0), accelerated.situ_grads(gate, up, grad, 4.0, 25.0)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert torch.equal(accelerated.situ(gate, up, 4.0, 25.0), whole)
            again = accelerated.situ_grads(gate, up, grad, 4.0, 25.0)
            assert all(map(torch.equal, again, grads))
    finally:
        torch.set_num_threads(before)
    for row in (0, 33, 69):
        assert torch.equal(accelerated.situ(gate[row], up[row].contiguous(), 4.0, 25.0), whole[row])


@pytest.mark.parametrize("shape", [(300,), (4, 300), (2, 3, 300), (0, 300)], ids=str)
def test_the_model_calls_the_loops_forward_and_backward(shape, monkeypatch):
    called = []
    for name in ("situ", "situ_grads"):
        run = getattr(call, name)
        monkeypatch.setattr(call, name, lambda *args, name=name, run=run: (called.append(name), run(*args)))
    both = random(*shape[:-1], 2 * shape[-1]).requires_grad_()
    result = situ(*both.chunk(2, -1), 4.0, 25.0)
    result.sum().backward()
    assert called == ["situ", "situ_grads"]
    assert result.shape == shape
    torch.testing.assert_close(result.double(), exact(*both.detach().chunk(2, -1), 4.0, 25.0), rtol=1e-6, atol=1e-6)


def test_second_derivatives_are_those_of_the_formula():
    def second_derivatives(compute: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        inputs = [x.requires_grad_() for x in inputs]
        first = torch.autograd.grad(compute(*inputs, 4.0, 25.0).sum(), inputs, create_graph=True)
        return torch.autograd.grad((first[0] * first[1]).sum(), inputs)

    gate, up = random(2, 300) / 8, random(2, 300, seed=1) / 8
    expected = second_derivatives(exact, gate.double(), up.double())
    for ours, reference in zip(second_derivatives(situ, gate, up), expected, strict=True):
        torch.testing.assert_close(ours.double(), reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, activation.WIDE - 1),
        torch.ones(2, 300).double(),
        torch.ones(2, 300).half(),
        torch.ones(2, 300, device="meta"),
        torch.ones(2, 300).to_sparse(),
        torch.tensor(1.0),
    ],
    ids=["narrow", "float64", "float16", "meta", "sparse", "a number"],
)
def test_other_tensors_are_left_to_pytorch(tensor):
    assert accelerated.situ(tensor, tensor, 4.0, 25.0) is None
    assert accelerated.situ_grads(tensor, tensor, tensor, 4.0, 25.0) is None


def test_tensors_of_several_dtypes_or_shapes_are_left_to_pytorch():
    gate = torch.ones(2, 300)
    for up in (gate.bfloat16(), gate[:1], gate[:, :299]):
        assert accelerated.situ(gate, up, 4.0, 25.0) is None


@pytest.mark.parametrize("change", [lambda x: x[:, :-1], lambda x: x.double(), lambda x: x.mT, lambda x: x[None]])
@pytest.mark.parametrize("place", range(5))
def test_each_tensor_of_a_call_is_checked(place, change):
    tensors = [torch.ones(3, 5) for _ in range(5)]
    tensors[place] = change(tensors[place])
    with pytest.raises(call.Unfit):
        call.situ_grads(*tensors, 4.0, 25.0)
    if place < 3:
        with pytest.raises(call.Unfit):
            call.situ(*tensors[:3], 4.0, 25.0)


def test_nothing_is_read_from_freed_memory():
    gate, up, result = (torch.ones(2, 300) for _ in range(3))
    gate.untyped_storage().resize_(0)
    with pytest.raises(call.Unfit, match="not freed"):
        call.situ(gate, up, result, 4.0, 25.0)
