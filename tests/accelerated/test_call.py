"""The loops get the addresses only of tensors with the shape, dtype and layout that they expect."""

from array import array
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attnres.accelerated.numba import IMPLEMENTATION, call, engine, kernels
from attnres.accelerated.numba.layout import MAGIC, Backward, Call, Forward, PhaseOne, SiTU, SiTUGrads

pytest.importorskip("numba")

QUERY = torch.ones(8)


def freed(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


ODD = {
    "mean": lambda source: source.mean((0, 1), keepdim=True),
    "narrow": lambda source: source[:, :, :4].contiguous(),
    "flat": lambda source: source.view(-1, 8),
    "float64": lambda source: source.double(),
    "bfloat16": lambda source: source.bfloat16(),
    "meta": lambda source: source.to("meta"),
    "sparse": lambda source: source.to_sparse(),
    "freed": freed,
}


# The last two are copied by `call.checked`.
NOT_READY = ODD | {"negated": torch._neg_view, "transposed": lambda source: source.mT.contiguous().mT}
UNFIT_WEIGHTS = {"short": lambda w: w[:-1], "float64": torch.Tensor.double, "negated": torch._neg_view, "freed": freed}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_a_source_unlike_the_first_is_refused(odd: Callable[[Tensor], Tensor]):
    sources = [torch.ones(2, 3, 8), odd(torch.ones(2, 3, 8))]
    with pytest.raises(ValueError):
        IMPLEMENTATION.run(QUERY, sources, 1e-6, True)


@pytest.mark.parametrize("name", ["query", "result", "weights", "norm_weight", "sums", "statistics"])
@pytest.mark.parametrize("change", [lambda t: t[..., :-1], lambda t: t.double(), lambda t: t[None], lambda t: t.mT])
def test_each_tensor_of_a_call_is_checked(name, change):
    rows = call.checked([torch.ones(5, 8)] * 2)
    given = {"query": QUERY, "result": torch.empty(5, 8), "weights": torch.empty(2, 5), "norm_weight": torch.ones(8)}
    given |= {"sums": torch.zeros(5, 8), "statistics": torch.zeros(5, 2)}
    tensor = given[name]
    if tensor.ndim == 1 and change(torch.ones(2, 3)).shape == (3, 2):
        pytest.skip("a vector has no transpose")
    given[name] = change(tensor)
    has_phase = name in ("sums", "statistics")
    phase = (given["sums"], given["statistics"]) if has_phase else None
    weights = None if has_phase else given["weights"]
    with pytest.raises(call.Unfit, match=r"a tensor must be"):
        call.forward(given["query"], rows, given["result"], weights, 1, 1e-6, given["norm_weight"], 1e-6, phase)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("is_sum", [False, True])
@pytest.mark.parametrize(("tokens", "count"), [(1, 1), (1, 7), (16, 3), (17, 2)])
def test_few_tokens_get_the_same_bits_as_by_checks_one_by_one(tokens, count, is_sum, has_norm, dtype):
    queries = torch.randn(3, 40)
    sources = tuple(torch.randn(2, tokens, 40).to(dtype) for _ in range(count))
    result, expected = torch.empty_like(sources[0]), torch.empty_like(sources[0])
    norm_weight = torch.randn(40).to(dtype) if has_norm else None
    few, multiplier = call.FewTokens(queries, sources[0].shape, dtype), count if is_sum else 1
    assert call.read_few(few, 2, sources, result, is_sum, 1e-6, norm_weight, 1e-5) is has_norm
    call.forward(queries[2], call.checked(sources), expected, None, multiplier, 1e-6, norm_weight, 1e-5)
    assert torch.equal(result, expected)


@pytest.mark.parametrize("place", ["source", "result"])
@pytest.mark.parametrize("odd", NOT_READY.values(), ids=NOT_READY)
def test_few_tokens_unlike_the_others_are_not_read(place, odd: Callable[[Tensor], Tensor]):
    sources, result = [torch.ones(2, 3, 8), torch.ones(2, 3, 8)], torch.zeros(2, 3, 8)
    few = call.FewTokens(torch.ones(1, 8), result.shape, result.dtype)
    given = (sources, odd(result)) if place == "result" else ([sources[0], odd(sources[1])], result)
    assert call.read_few(few, 0, *given, True, 1e-6, None, 0.0) is None
    assert place == "result" or not result.any()


@pytest.mark.parametrize("odd", UNFIT_WEIGHTS.values(), ids=UNFIT_WEIGHTS)
def test_few_tokens_are_read_without_a_norm_whose_weight_does_not_fit(odd: Callable[[Tensor], Tensor]):
    sources, result = [torch.ones(2, 3, 8)] * 2, torch.zeros(2, 3, 8)
    few = call.FewTokens(torch.ones(1, 8), result.shape, result.dtype)
    assert call.read_few(few, 0, sources, result, True, 1e-6, odd(torch.full((8,), 9.0)), 0.0) is False
    assert (result == 2).all()


def test_a_view_with_a_pending_negation_is_negated():
    source = torch.randn(3, 8)
    views = [source, torch._neg_view(source)]
    result, _, _ = IMPLEMENTATION.run(QUERY, views, 1e-6, True)
    torch.testing.assert_close(result, kernels.forward(QUERY, [source, -source], 1e-6, True)[0])


@pytest.mark.parametrize("change", [(0, MAGIC + 1), (1, 5), (1, 0)], ids=["other magic", "fewer", "none"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("name", "others", "of_sources"),
    [
        ("forward", Forward, 1),
        ("phase one", PhaseOne, 1),
        ("backward", Backward, 3),
        ("situ", SiTU, 0),
        ("situ grads", SiTUGrads, 0),
    ],
)
def test_the_loops_refuse_arguments_of_another_layout(change, threads, name, others, of_sources):
    count = len(others._fields) + of_sources
    if count == change[1]:
        change = 1, count + 1
    numbers = array("q", [*Call(MAGIC, count, 0, 8, min(1, of_sources), 1, 4), *[0] * count])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        engine.run(name, 2, numbers.buffer_info()[0], 1e-6, 0.0, 4)  # without tokens the call does nothing
        numbers[change[0]] = change[1]
        with pytest.raises(ValueError, match=r"laid out|number of addresses"):
            engine.run(name, 2, numbers.buffer_info()[0], 1e-6, 0.0, 4)
    finally:
        torch.set_num_threads(before)
