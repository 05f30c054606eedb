"""PyTorch's default dtype and device change no result, because every allocation names both."""

import pytest

pytest.importorskip("numba")

CODE = """
import torch
from attnres.accelerated.numba import IMPLEMENTATION, call, kernels

def numbers(dtype):
    given = torch.Generator("cpu").manual_seed(0)
    new = dict(generator=given, device="cpu", dtype=torch.float32)
    query = torch.randn(300, **new).requires_grad_()
    sources = [torch.randn(99, 300, **new).to(dtype).requires_grad_() for _ in range(3)]
    assert IMPLEMENTATION.supports(query, sources) is None
    result, weights, later = IMPLEMENTATION.run(query, sources, 1e-6, True, True)
    grads = torch.autograd.grad((result.float() * later[0].float()).sum() + weights.square().sum(), [query, *sources])
    with torch.no_grad():
        plain = [source.detach() for source in sources]
        sums, statistics = kernels.phase_one(query.detach()[None], 1e-6, call.checked(plain))
    return [result, weights, sums, statistics, *grads]

for dtype in (torch.float32, torch.bfloat16):
    expected = numbers(dtype)
    {change}
    {scope}:
        actual = numbers(dtype)
    torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) and a.dtype is b.dtype for a, b in zip(actual, expected))
print("the same")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "scope"),
    [
        ("torch.set_default_dtype(torch.bfloat16)", "if True"),
        ("torch.set_default_dtype(torch.float16)", "if True"),
        ("torch.set_default_dtype(torch.float64)", "if True"),
        ("pass", "with torch.device('meta')"),
    ],
)
def test_the_numbers_are_the_same_under_other_defaults(printed, change, scope):
    assert printed(CODE.format(change=change, scope=scope)) == "the same"
