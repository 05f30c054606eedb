"""`depth_attention` equals its readable reference, has the right derivatives, and copies no sources."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnres import DEPTH_ATTENTION, depth_attention, depth_attention_reference

# No deadline, because machines differ; derandomised, so that all machines run the same examples.
EXAMPLES = settings(deadline=None, derandomize=True, max_examples=30)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
BOTH = pytest.mark.parametrize("attend", [depth_attention, depth_attention_reference])


@pytest.fixture(params=["kernels", "operations"], scope="module", autouse=True)
def formulation(request):
    """Run each test with the CPU kernels, where they apply, and with PyTorch's operations alone."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "operations":
            patch.setitem(DEPTH_ATTENTION._global_mapping, "auto", DEPTH_ATTENTION["eager"])
        else:
            request.getfixturevalue("cpu_kernels")
        yield request.param


@dataclass
class Problem:
    query: Tensor
    sources: list[Tensor]
    key_norm_weight: Tensor | None
    eps: float
    scale: str

    def arguments(self, dtype: torch.dtype | None = None) -> tuple[tuple, dict]:
        tensors = [self.query, *self.sources, self.key_norm_weight]
        query, *sources, norm = [tensor if tensor is None else tensor.to(dtype) for tensor in tensors]
        return (query, sources, norm, self.eps), {"scale": self.scale, "return_weights": True}

    def solve(self, attend=depth_attention, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        args, kwargs = self.arguments(dtype)
        return attend(*args, **kwargs)

    def gradients(self, attend, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Compute the gradients of the query, the norm weight and every source through both results."""
        (query, sources, norm, eps), kwargs = self.arguments(dtype)
        leaves = [tensor.clone().requires_grad_() for tensor in (query, norm, *sources) if tensor is not None]
        query, norm, sources = leaves[0], (None if norm is None else leaves[1]), leaves[-len(sources) :]
        result, weights = attend(query, sources, norm, eps, **kwargs)
        direction = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).reshape(result.shape)
        loss = (result.double() * direction).sum() + (weights.double() * direction.sum(-1)).square().sum()
        return list(torch.autograd.grad(loss, leaves))


def make_problem(
    n=3, shape=(2, 3), width=8, dtype=torch.float32, has_norm=True, scale="mean", eps=1e-5, seed=0
) -> Problem:
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    sources = [normal(*shape, width) for _ in range(n)]
    return Problem(normal(width), sources, 1 + 0.3 * normal(width) if has_norm else None, eps, scale)


@st.composite
def problems(draw, dtypes=DTYPES) -> Problem:
    return make_problem(
        n=draw(st.integers(1, 12)),
        shape=tuple(draw(st.lists(st.integers(0, 4), max_size=3))),
        width=draw(st.integers(1, 24)),
        dtype=draw(st.sampled_from(dtypes)),
        has_norm=draw(st.booleans()),
        scale=draw(st.sampled_from(("mean", "sum"))),
        eps=draw(st.sampled_from((0.0, 1e-6, 0.1))),
        seed=draw(st.integers(0, 2**16)),
    )


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype, slack: float = 1) -> None:
    """Assert equality up to one rounding to `dtype`, and the rounding of statistics in float32 (float64)."""
    rounding = 0.501 * torch.finfo(dtype).eps if dtype in (torch.bfloat16, torch.float16) else 0
    statistics = slack * (1e-12 if dtype == torch.float64 else 2e-5)
    torch.testing.assert_close(actual.double(), expected.double(), rtol=rounding + statistics, atol=statistics)


@EXAMPLES
@given(problems())
def test_fast_path_and_reference_are_the_float64_result_rounded_once(problem):
    dtype = problem.sources[0].dtype
    statistics = torch.promote_types(dtype, torch.float32)
    expected, expected_weights = problem.solve(depth_attention_reference, torch.float64)
    for attend in (depth_attention, depth_attention_reference):
        result, weights = problem.solve(attend)
        assert (result.dtype, weights.dtype) == (dtype, statistics)
        assert result.shape == problem.sources[0].shape
        assert weights.shape == (len(problem.sources), *result.shape[:-1])
        close(result, expected, dtype)
        close(weights, expected_weights, statistics)


def test_depth_attention_gives_a_result_computed_by_hand():
    # RMSNorm maps the sources to (1, 1) and (0, sqrt(2)), so that the logits are log 3 and 0.
    query = torch.tensor([torch.tensor(3.0).log(), 0.0], dtype=torch.float64)
    sources = [torch.tensor([5.0, 5.0], dtype=torch.float64), torch.tensor([0.0, 8.0], dtype=torch.float64)]
    for attend in (depth_attention, depth_attention_reference):
        result, weights = attend(query, sources, eps=0.0, return_weights=True)
        torch.testing.assert_close(weights, torch.tensor([0.75, 0.25], dtype=torch.float64))
        torch.testing.assert_close(result, torch.tensor([3.75, 5.75], dtype=torch.float64))
        result = attend(query, sources, torch.tensor([2.0, 7.0], dtype=torch.float64), 0.0, scale="sum")
        torch.testing.assert_close(result, torch.tensor([9.0, 10.6], dtype=torch.float64))


@EXAMPLES
@given(problems())
def test_without_gradients_the_result_is_the_same(problem):
    expected, expected_weights = problem.solve()
    with torch.no_grad():
        result, weights = problem.solve()
    close(result, expected.double(), result.dtype, slack=2)
    close(weights, expected_weights.double(), weights.dtype, slack=2)


def test_many_tokens_are_divided_among_threads_and_the_gradients_do_not_depend_on_how_many():
    problem = make_problem(n=4, shape=(3, 67), width=20)
    (query, sources, norm, eps), kwargs = problem.arguments(torch.float64)
    expected, _ = depth_attention_reference(query, sources, norm, eps, **kwargs)
    threads, gradients = torch.get_num_threads(), []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            close(problem.solve()[0], expected, torch.float32)
            gradients.append(problem.gradients(depth_attention))
    finally:
        torch.set_num_threads(threads)
    for alone, divided, right in zip(*gradients, problem.gradients(depth_attention_reference, torch.float64)):
        assert torch.equal(alone, divided)
        close(alone, right, torch.float32, slack=50)


@EXAMPLES
@given(problems())
def test_weights_are_optional_and_sum_to_one_for_either_scale(problem):
    result, weights = problem.solve()
    alone = depth_attention(problem.query, problem.sources, problem.key_norm_weight, problem.eps, scale=problem.scale)
    assert torch.equal(alone, result)
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(0), torch.ones_like(weights[0]))


@EXAMPLES
@given(problems(dtypes=(torch.float32, torch.float64)), st.randoms(use_true_random=False))
def test_order_of_sources_does_not_matter(problem, random):
    order = random.sample(range(len(problem.sources)), len(problem.sources))
    result, weights = problem.solve()
    problem.sources = [problem.sources[i] for i in order]
    reordered, reordered_weights = problem.solve()
    torch.testing.assert_close(reordered, result)
    torch.testing.assert_close(reordered_weights, weights[order])


@EXAMPLES
@given(problems(dtypes=(torch.float32, torch.float64)), st.floats(1e-3, 1e3))
def test_weights_do_not_depend_on_the_size_of_a_source(problem, factor):
    problem.eps = 0.0
    _, weights = problem.solve()
    problem.sources[-1] = problem.sources[-1] * factor
    _, scaled = problem.solve()
    torch.testing.assert_close(scaled, weights, rtol=1e-4, atol=1e-5)


@EXAMPLES
@given(problems())
def test_the_result_for_one_source_is_the_source(problem):
    problem.sources = problem.sources[:1]
    result, weights = problem.solve()
    assert torch.equal(result, problem.sources[0])
    assert torch.equal(weights, torch.ones_like(weights))


@EXAMPLES
@given(problems())
def test_zero_query_gives_the_mean_of_the_sources(problem):
    problem.query, problem.scale = torch.zeros_like(problem.query), "mean"
    result, weights = problem.solve()
    assert torch.equal(weights, torch.full_like(weights, 1 / len(problem.sources)))
    close(result, torch.stack(problem.sources).double().mean(0), result.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_query_with_scale_sum_is_the_plain_sum_to_the_last_bit(dtype):
    for n in range(1, 65):
        problem = make_problem(n=n, width=33, dtype=dtype, scale="sum", seed=n)
        problem.query.zero_()
        running = problem.sources[0]
        for source in problem.sources[1:]:
            running = running + source
        assert torch.equal(problem.solve()[0], running)


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_logits_and_large_sources_do_not_overflow(attend, dtype):
    problem = make_problem(n=5, width=64, dtype=dtype)
    problem.query = problem.query * 1e3
    problem.sources = [source * 1e4 for source in problem.sources]
    result, weights = problem.solve(attend)
    assert result.isfinite().all()
    assert weights.amax() > 0.999
    winner = torch.stack(problem.sources).gather(0, weights.argmax(0)[None, ..., None].expand(1, *result.shape))[0]
    sure = weights.amax(0) == 1
    assert sure.any()
    assert torch.equal(result[sure], winner[sure])


@pytest.mark.parametrize(
    ("n", "scale", "part", "has_norm"),
    [
        (1, "mean", "both", True),
        (1, "sum", "result", False),
        (2, "mean", "weights", False),
        (2, "sum", "both", True),
        (7, "mean", "result", True),
        (7, "sum", "weights", True),
        (7, "mean", "both", False),
    ],
)
def test_derivatives_equal_finite_differences(n, scale, part, has_norm):
    problem = make_problem(n, shape=(2, 2), width=5, dtype=torch.float64, has_norm=has_norm, scale=scale, eps=1e-2)
    leaves = [problem.query, *problem.sources] + ([problem.key_norm_weight] if has_norm else [])

    def attend(query, *rest):
        norm = rest[n] if has_norm else None
        both = depth_attention(query, rest[:n], norm, problem.eps, scale=scale, return_weights=True)
        return {"result": both[0], "weights": both[1], "both": both}[part]

    assert torch.autograd.gradcheck(attend, [leaf.requires_grad_() for leaf in leaves])


@EXAMPLES
@given(problems())
def test_gradients_equal_those_of_the_float64_reference(problem):
    dtype = problem.sources[0].dtype
    problem.eps = max(problem.eps, 1e-2)  # a source near zero has a key gradient of 1 / eps
    expected = problem.gradients(depth_attention_reference, torch.float64)
    size = max([1.0, *(gradient.abs().amax().item() for gradient in expected if gradient.numel())])
    for gradient, reference in zip(problem.gradients(depth_attention), expected, strict=True):
        assert gradient.dtype == dtype
        rounding = 0.51 * torch.finfo(dtype).eps
        # The gradients of the results arrive in the dtype of the results: rounded once more.
        arriving = 4 * len(problem.sources) * rounding
        tolerance = size * (1e-11 if dtype == torch.float64 else 1e-4 + arriving)
        torch.testing.assert_close(gradient.double(), reference, rtol=rounding, atol=tolerance)


def test_a_source_given_twice_gets_both_gradients():
    problem = make_problem(n=2, dtype=torch.float64)
    source = problem.sources[0].requires_grad_()
    depth_attention(problem.query, [source, problem.sources[1], source]).square().sum().backward()
    actual, source.grad = source.grad, None
    depth_attention_reference(problem.query, [source, problem.sources[1], source]).square().sum().backward()
    torch.testing.assert_close(actual, source.grad)


def test_only_tensors_that_require_a_gradient_get_one():
    for wanted in ("query", "key_norm_weight", "source"):
        problem = make_problem(n=3)
        leaves = {"query": problem.query, "key_norm_weight": problem.key_norm_weight, "source": problem.sources[1]}
        leaves[wanted].requires_grad_()
        problem.solve()[0].square().sum().backward()
        assert leaves.pop(wanted).grad.abs().sum() > 0
        assert all(leaf.grad is None for leaf in [*leaves.values(), problem.sources[0], problem.sources[2]])


@pytest.mark.parametrize("scale", ["mean", "sum"])
def test_second_derivatives_equal_those_of_the_reference(scale):
    def hessian_times(attend) -> list[Tensor]:
        problem = make_problem(dtype=torch.float64, scale=scale)
        leaves = [tensor.requires_grad_() for tensor in (problem.query, *problem.sources)]
        # One source is computed from another, so its gradient through the read must not be counted twice.
        sources = [leaves[1], leaves[2] + leaves[1].square(), *leaves[3:]]
        result, weights = attend(leaves[0], sources, scale=scale, return_weights=True)
        loss = result.square().sum() + weights.pow(3).sum()
        gradients = torch.autograd.grad(loss, leaves, create_graph=True)
        return list(torch.autograd.grad(sum(gradient.sin().sum() for gradient in gradients), leaves))

    for ours, expected in zip(hessian_times(depth_attention), hessian_times(depth_attention_reference)):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


def test_functional_transforms_give_per_sample_gradients():
    problem = make_problem(shape=(5, 3))

    def loss(query: Tensor, *sources: Tensor) -> Tensor:
        return depth_attention(query, sources, problem.key_norm_weight).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, *[0] * len(problem.sources)))
    gradients = per_sample(problem.query, *problem.sources)
    for i, gradient in enumerate(gradients):
        query = problem.query.clone().requires_grad_()
        loss(query, *(source[i] for source in problem.sources)).backward()
        torch.testing.assert_close(gradient, query.grad, rtol=1e-4, atol=1e-5)


@BOTH
def test_sources_of_mixed_dtypes_give_their_common_dtype(attend):
    half, single, double = (make_problem(n=1, dtype=dtype).sources[0] for dtype in DTYPES[1:])
    bfloat = make_problem(n=1, dtype=torch.bfloat16).sources[0]
    query = torch.linspace(-1, 1, 8)
    for sources, common in (
        ([bfloat, bfloat], torch.bfloat16),
        ([bfloat, half], torch.float32),
        ([bfloat, single], torch.float32),
        ([single, half], torch.float32),
        ([half, double, bfloat], torch.float64),
    ):
        leaves = [source.clone().requires_grad_() for source in sources]
        result, weights = attend(query, leaves, return_weights=True)
        assert result.dtype == common
        assert weights.dtype == torch.promote_types(common, torch.float32)
        expected = depth_attention_reference(query.double(), [source.double() for source in sources])
        close(result, expected, common)
        result.sum().backward()
        assert [leaf.grad.dtype for leaf in leaves] == [source.dtype for source in sources]


def test_strided_sources_give_the_same_as_contiguous_ones():
    problem = make_problem(n=4, shape=(3, 5), width=6, dtype=torch.float64)
    expected, gradients = problem.solve()[0], problem.gradients(depth_attention)
    problem.sources = [source.permute(2, 0, 1).contiguous().permute(1, 2, 0) for source in problem.sources]
    torch.testing.assert_close(problem.solve()[0], expected)
    for actual, gradient in zip(problem.gradients(depth_attention), gradients, strict=True):
        torch.testing.assert_close(actual, gradient)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_autocast_changes_nothing(dtype):
    problem = make_problem(n=4, dtype=dtype)
    results, gradients = problem.solve(), problem.gradients(depth_attention)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for actual, expected in zip(problem.solve(), results):
            assert actual.dtype == expected.dtype
            assert torch.equal(actual, expected)
        for actual, expected in zip(problem.gradients(depth_attention), gradients):
            assert torch.equal(actual, expected)


@BOTH
def test_meta_tensors_give_shapes(attend):
    problem = make_problem(n=2, shape=(5,), dtype=torch.bfloat16)
    problem.query, problem.key_norm_weight = problem.query.to("meta"), problem.key_norm_weight.to("meta")
    problem.sources = [source.to("meta") for source in problem.sources]
    result, weights = problem.solve(attend)
    assert (result.shape, result.dtype, weights.shape) == ((5, 8), torch.bfloat16, (2, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fast_path_never_holds_a_stack_of_the_sources(peak_bytes, dtype):
    n, tokens, width = 16, 256, 128
    problem = make_problem(n=n, shape=(tokens,), width=width, dtype=dtype)
    one_source = 4 * tokens * width  # in the dtype of the statistics

    assert peak_bytes(lambda: problem.solve(depth_attention)) < 4 * one_source
    assert peak_bytes(lambda: problem.solve(depth_attention_reference)) > n * one_source

    query = problem.query.requires_grad_()
    assert peak_bytes(lambda: problem.solve()[0].sum().backward()) < 6 * one_source
    problem.sources = [source.requires_grad_() for source in problem.sources]
    leaves = [query, *problem.sources]
    gradients = n * tokens * width * problem.sources[0].element_size()
    fast, reference = (
        peak_bytes(lambda: torch.autograd.grad(problem.solve(attend)[0].sum(), leaves))  # noqa: B023
        for attend in (depth_attention, depth_attention_reference)
    )
    assert fast < gradients + 6 * one_source
    assert reference > gradients + n * one_source


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_backward_pass_saves_the_sources_and_no_copies(dtype):
    n, tokens, width = 6, 32, 64
    problem = make_problem(n=n, shape=(tokens,), width=width, dtype=dtype)
    problem.sources = [source.requires_grad_() for source in problem.sources]
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda x: x):
        problem.solve()
    large = [tensor for tensor in saved if tensor.numel() >= tokens * width]  # statistics are smaller than a source
    assert {tensor.data_ptr() for tensor in large} == {source.data_ptr() for source in problem.sources}
    assert len(large) == n


@BOTH
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sources": []}, "`sources` is empty"),
        ({"sources": [torch.ones(2, 4), torch.ones(2, 4), torch.ones(3, 4)]}, r"source 2 .*\(3, 4\).*\(2, 4\)"),
        ({"sources": [torch.ones(2, 4), torch.ones(2, 5)]}, r"source 1 .*\(2, 5\)"),
        ({"sources": [torch.tensor(1.0)]}, r"source 0 .*\(\)"),
        ({"query": torch.ones(5)}, r"`query` .*\(5,\).*\[4\]"),
        ({"query": torch.ones(1, 4)}, r"`query` .*\(1, 4\).*\[4\]"),
        ({"key_norm_weight": torch.ones(3)}, r"`key_norm_weight` .*\(3,\).*\[4\]"),
        ({"scale": "max"}, "`scale` is 'max', .*'mean', 'sum'"),
        ({"scale": None}, "`scale` is None"),
    ],
)
def test_a_wrong_argument_is_named(attend, arguments, message):
    right = {"query": torch.ones(4), "sources": [torch.ones(2, 4)] * 2, "key_norm_weight": torch.ones(4)}
    attend(**right)
    with pytest.raises(ValueError, match=message):
        attend(**{**right, **arguments})
