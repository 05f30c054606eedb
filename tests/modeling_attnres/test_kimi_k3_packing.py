"""MXFP4 is packed as compressed-tensors packs it, and gives back every weight that it can hold."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnres.kimi_k3_packed_attnres import check_scales, decode_mxfp4
from attnres.kimi_k3_packing_attnres import encode_mxfp4

# No deadline, because machines differ; derandomised, so that all machines run the same examples.
EXAMPLES = settings(deadline=None, derandomize=True, max_examples=60)
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def encode_group(weights: list[float]) -> tuple[list[int], int]:
    """Encode 32 weights in Python's numbers: to the nearest code, of two equally near ones to the even one."""
    largest = max(map(abs, weights))
    scale = 0
    if largest:
        exponent = math.floor(math.log2(largest))
        exponent += largest < 2.0**exponent
        exponent += largest >= 1.75 * 2.0**exponent
        scale = min(max(exponent - 2 + 127, 0), 252)
    codes = []
    for weight in weights:
        number = abs(weight) / 2.0 ** (scale - 127)
        code = min(range(8), key=lambda c: (abs(VALUES[c] - number), c % 2))
        codes.append(code + 8 * (math.copysign(1, weight) < 0))
    return codes, scale


def assert_packed_as_expected(weight: Tensor) -> None:
    packed, scale = encode_mxfp4(weight)
    for row, (codes_of_row, scales_of_row) in enumerate(zip(packed.tolist(), scale.tolist(), strict=True)):
        codes = [code for byte in codes_of_row for code in (byte % 16, byte // 16)]
        for group, scale_of_group in enumerate(scales_of_row):
            part = slice(32 * group, 32 * group + 32)
            expected = encode_group(weight[row, part].double().tolist())
            assert (codes[part], scale_of_group) == expected, (row, group)


def weights(dtype: torch.dtype) -> st.SearchStrategy[Tensor]:
    """Weights `[2, 64]` of one size or of all, with ties, zeros of both signs, and the smallest numbers."""
    ties = st.sampled_from([0.0, -0.0, 0.25, 0.75, -1.25, 1.75, 2.5, -3.5, 5.0, 6.0, -6.99, 7.0, 7.5])
    one = st.one_of(ties, st.floats(-8, 8, width=16))
    exponents = st.integers(-149, 124)
    return st.builds(
        lambda values, exponent: (torch.tensor(values).double() * 2.0**exponent).to(dtype).view(2, 64),
        st.lists(one, min_size=128, max_size=128),
        exponents,
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@given(data=st.data())
@EXAMPLES
def test_any_weight_becomes_the_nearest_code_under_the_scale_of_the_rule(dtype, data):
    weight = data.draw(weights(dtype))
    assert_packed_as_expected(weight)
    check_scales("the scale", encode_mxfp4(weight)[1])


@given(
    codes=st.lists(st.integers(0, 255), min_size=64, max_size=64),
    scales=st.lists(st.integers(0, 252), min_size=4, max_size=4),
)
@EXAMPLES
def test_a_weight_that_mxfp4_can_hold_comes_back_with_its_signs(codes, scales):
    weight = decode_mxfp4(torch.tensor(codes, dtype=torch.uint8).view(2, 32), torch.tensor(scales).byte().view(2, 2))
    again = decode_mxfp4(*encode_mxfp4(weight))
    assert torch.equal(again, weight) and torch.equal(again.signbit(), weight.signbit())


def test_groups_with_a_large_code_keep_their_bytes():
    """Their scale follows from the largest weight. A group whose largest code is below 4 gets a smaller scale."""
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(256, (64, 32), generator=generator).byte()
    packed[:, ::16] = packed[:, ::16] & 0xF0 | 0x06 + 8 * (packed[:, ::16] & 1)  # the first of each group is 4 or -4
    scale = torch.randint(1, 252, (64, 2), generator=generator).byte()
    again = encode_mxfp4(decode_mxfp4(packed, scale))
    assert torch.equal(again[0], packed) and torch.equal(again[1], scale)
    smaller = encode_mxfp4(decode_mxfp4(torch.full((1, 16), 0x55, dtype=torch.uint8), torch.tensor([[127]]).byte()))
    assert smaller[0].unique().tolist() == [0x77] and smaller[1].tolist() == [[126]]


def test_stacked_experts_are_packed_one_by_one():
    weight = torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(0))
    packed, scale = encode_mxfp4(weight)
    assert (packed.shape, scale.shape) == ((3, 4, 32), (3, 4, 2))
    for expert in range(3):
        one = encode_mxfp4(weight[expert])
        assert torch.equal(packed[expert], one[0]) and torch.equal(scale[expert], one[1])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_not_finite_is_refused(value):
    weight = torch.zeros(2, 32)
    weight[1, 5] = value
    with pytest.raises(ValueError, match="NaN or infinite"):
        encode_mxfp4(weight)


def test_a_weight_of_another_width_is_refused():
    with pytest.raises(ValueError, match="32 inputs as a group, but the weight has 48"):
        encode_mxfp4(torch.zeros(2, 48))
