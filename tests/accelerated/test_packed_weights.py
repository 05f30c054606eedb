"""Weights of four bits by the compiled loops: every code and scale, and products as with decoded weights."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attnres import accelerated
from attnres.accelerated.numba import call
from attnres.accelerated.numba.activation import WIDE
from attnres.kimi_k3_packed_attnres import MXFP4, decode_mxfp4, decode_nvfp4, packed_linear

pytest.importorskip("numba")

DTYPES = [torch.float32, torch.bfloat16]


def weight(rows: int, columns: int, scales: tuple[int, int] = (118, 131)) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(256, (rows, columns // 2), dtype=torch.uint8, generator=generator)
    return codes, torch.randint(*scales, (rows, columns // 32), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 100])
def test_every_code_and_scale_is_decoded_exactly(rows, dtype):
    codes, scales = weight(rows, 8192, (0, 253))
    decoded = accelerated.decode_mxfp4(codes, scales, dtype)
    bits = torch.int32 if dtype is torch.float32 else torch.int16  # a zero has a sign
    assert torch.equal(decoded.view(bits), decode_mxfp4(codes, scales, dtype).view(bits))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_of_nvfp4_are_decoded_by_the_loops_and_scaled_in_float32(dtype, monkeypatch):
    called = []
    unpack = call.unpack
    monkeypatch.setattr(call, "unpack", lambda *args: (called.append(args), unpack(*args)))
    codes, _ = weight(6, 2 * WIDE)
    scales = torch.arange(6 * WIDE // 8, dtype=torch.uint8).view(6, -1) % 127  # without the codes of NaN and of signs
    divisors = torch.tensor([3.0, 700.0])
    decoded = decode_nvfp4(codes, scales, divisors.view(torch.uint8), dtype)
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(1).int()
    values = magnitudes[nibbles & 7] * (1 - 2 * (nibbles >> 3))
    steps = scales.view(torch.float8_e4m3fn).float() / divisors.repeat_interleave(3)[:, None]
    assert called
    assert torch.equal(decoded, (values * steps.repeat_interleave(16, 1)).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 4])
@pytest.mark.parametrize("columns", [WIDE, WIDE + 32, 3584])
def test_products_are_those_with_the_decoded_weight(columns, tokens, dtype):
    codes, scales = weight(70, columns)
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(1)).to(dtype)
    product = accelerated.packed_linear(x, codes, scales)
    expected = F.linear(x.double(), decode_mxfp4(codes, scales, torch.float64))
    assert product.dtype is dtype
    # Sums are in float32, and bfloat16 is rounded once.
    assert (product - expected).norm() <= (2.0**-8 if dtype is torch.bfloat16 else 1e-6) * expected.norm()


def test_products_are_finite_for_inputs_as_large_as_they_get():
    codes, scales = weight(70, WIDE, (100, 101))
    x = torch.full((2, WIDE), 3e38)
    x[:, ::2] *= -1
    expected = F.linear(x.double(), decode_mxfp4(codes, scales, torch.float64))
    product = accelerated.packed_linear(x, codes, scales)
    assert (product - expected).norm() <= 1e-6 * expected.norm()


def test_inputs_may_lie_anyhow_in_memory():
    codes, scales = weight(8, WIDE)
    x = torch.randn(3, WIDE)
    for lies, plain in ((x.t().contiguous().t(), x), (x[:, :1].expand(3, WIDE), x[:, :1].repeat(1, WIDE))):
        assert torch.equal(*(accelerated.packed_linear(same, codes, scales) for same in (lies, plain)))


def test_threads_do_not_change_a_product():
    codes, scales = weight(500, WIDE)
    x, before = torch.randn(2, WIDE), torch.get_num_threads()
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(accelerated.packed_linear(x, codes, scales))
    torch.set_num_threads(before)
    assert torch.equal(*results)


def test_the_loops_leave_other_tensors_to_pytorch():
    codes, scales = weight(8, WIDE)
    x = torch.randn(1, WIDE)
    assert accelerated.packed_linear(torch.randn(5, WIDE), codes, scales) is None
    assert accelerated.packed_linear(x.double(), codes, scales) is None
    assert accelerated.packed_linear(x[:, :64], codes[:, :32], scales[:, :2]) is None
    assert accelerated.decode_mxfp4(codes, scales, torch.float64) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert accelerated.packed_linear(x, codes, scales) is None
    with pytest.raises(call.Unfit):
        call.unpack(codes, scales[:-1], torch.empty(8, WIDE))


def test_gradients_are_those_with_the_decoded_weight():
    codes, scales = weight(70, WIDE)
    plain = decode_mxfp4(codes, scales, torch.float32)
    for tokens in (2, 9):
        x = torch.randn(tokens, WIDE, requires_grad=True)
        (ours,) = torch.autograd.grad(packed_linear(x, MXFP4, (codes, scales)).square().sum(), x)
        (expected,) = torch.autograd.grad(F.linear(x, plain).square().sum(), x)
        assert (ours - expected).norm() <= 1e-6 * expected.norm()
