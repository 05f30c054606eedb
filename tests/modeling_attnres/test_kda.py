"""Delta attention without GPU kernels: equal to the recurrence, however strong the decay, at a fraction of the cost."""

import inspect
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear

from attnres.accelerated import delta_attention
from attnres.accelerated.delta_attention import chunk_kda, decayed_products

# The function of `transformers`, before a fixture replaces it by the family's.
UPSTREAM = inspect.unwrap(kimi_linear.chunk_kimi_delta_attention)
NAMES = ("query", "key", "value", "g", "beta", "initial_state")


def make_inputs(batch=1, length=64, heads=2, size=8, decay=1.0, seed=0) -> dict[str, Tensor]:
    """Draw inputs; the logarithms of the decay are uniform between `-decay` and 0."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = torch.randn(3, batch, length, heads, size, generator=generator)
    g = -decay * torch.rand(batch, length, heads, size, generator=generator)
    beta = torch.rand(batch, length, heads, generator=generator)
    state = torch.randn(batch, heads, size, size, generator=generator)
    return dict(zip(NAMES, (query, key, value, g, beta, state)))


def recurrence(query, key, value, g, beta, initial_state) -> tuple[Tensor, Tensor]:
    """Compute the equation token by token."""
    state, outputs = initial_state, []
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    for t in range(query.shape[1]):
        state = g[:, t].exp()[..., None] * state
        read = torch.einsum("bhkv,bhk->bhv", state, key[:, t])
        delta = beta[:, t, :, None] * (value[:, t] - read)
        state = state + torch.einsum("bhk,bhv->bhkv", key[:, t], delta)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]) * query.shape[-1] ** -0.5)
    return torch.stack(outputs, 1), state


def in_chunks(compute: Callable = chunk_kda, **inputs) -> tuple[Tensor, Tensor]:
    return compute(**inputs, output_final_state=True, use_qk_l2norm_in_kernel=True)


def with_gradients(compute: Callable, inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    leaves = {name: tensor.to(dtype).requires_grad_() for name, tensor in inputs.items()}
    output, state = compute(**leaves)
    (output.square().sum() + state.square().sum()).backward()
    return {"output": output, "state": state} | {name: leaf.grad for name, leaf in leaves.items()}


def relative_errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    scale = {name: tensor.abs().max() + 1e-30 for name, tensor in expected.items()}
    return {name: ((found[name] - expected[name]).abs().max() / scale[name]).item() for name in expected}


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(
    length=st.integers(1, 200),
    decay=st.sampled_from([0.0, 0.1, 1.0, 10.0]),
    batch=st.integers(1, 2),
    seed=st.integers(0, 2**20),
)
@example(length=2, decay=10.0, batch=1, seed=2)  # gives the small difference described below
def test_outputs_state_and_gradients_equal_those_of_the_recurrence(length, decay, batch, seed):
    draw = partial(make_inputs, batch, length, decay=decay, seed=seed)
    expected = with_gradients(recurrence, draw(), torch.float64)
    errors = relative_errors(with_gradients(in_chunks, draw(), torch.float32), expected)
    # The gradient of a normalised key may be a small difference of large numbers, in the recurrence too.
    own = relative_errors(with_gradients(recurrence, draw(), torch.float32), expected)
    assert all(error < max(1e-5, 4 * own[name]) for name, error in errors.items()), (errors, own)


@pytest.mark.parametrize("decay", [10.0, 100.0, 10_000.0])
def test_a_strong_decay_gives_finite_results_more_exact_than_those_of_transformers(decay):
    inputs = make_inputs(length=150, decay=decay)
    expected = with_gradients(recurrence, inputs, torch.float64)
    found, theirs = (
        relative_errors(with_gradients(partial(in_chunks, compute=compute), inputs, torch.float32), expected)
        for compute in (chunk_kda, UPSTREAM)
    )
    assert max(found["output"], found["state"]) < 1e-5
    assert sum(found.values()) < 0.5 * sum(theirs.values())


@given(length=st.sampled_from([1, 2, 4, 8, 32]), seed=st.integers(0, 2**20))
def test_the_products_of_pairs_are_sums_over_channels_times_the_decay_between(length, seed):
    generator = torch.Generator().manual_seed(seed)
    readers = torch.randn(2, 3, length, 5, generator=generator)
    sources, g = torch.randn(3, length, 5, generator=generator), -5 * torch.rand(3, length, 5, generator=generator)
    expected = torch.zeros(2, 3, length, length, dtype=torch.float64)
    for t in range(length):
        for s in range(t + 1):
            decay = g[:, s + 1 : t + 1].double().sum(1).exp()
            expected[:, :, t, s] = (readers[:, :, t].double() * sources[:, s].double() * decay).sum(-1)
    torch.testing.assert_close(decayed_products(readers, sources, g).double(), expected, rtol=0, atol=1e-5)


def test_low_precision_and_autocast_compute_in_float32():
    inputs = {name: tensor.bfloat16() for name, tensor in make_inputs().items()}
    expected, state = in_chunks(**{name: tensor.float() for name, tensor in inputs.items()})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, found = in_chunks(**inputs)
    assert (output.dtype, found.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(output, expected.bfloat16())
    assert torch.equal(found, state)


def test_the_model_uses_the_accelerated_form_and_does_not_change_kimi_linear(tiny_model, token_ids, monkeypatch):
    calls, name = [], "chunk_kimi_delta_attention"
    monkeypatch.setattr(delta_attention, name, lambda *args, **kwargs: calls.append(1) or chunk_kda(*args, **kwargs))
    before = kimi_linear.KimiLinearDeltaAttention.forward
    model = tiny_model()
    model(token_ids)
    assert len(calls) == model.config.layer_types.count("linear_attention") == 2
    assert kimi_linear.KimiLinearDeltaAttention.forward is before
    assert UPSTREAM.__module__ == kimi_linear.__name__


@settings(deadline=None, max_examples=8)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=4),
    decay=st.sampled_from([0.0, 1.0, 10.0]),
    seed=st.integers(0, 2**20),
)
def test_documents_of_a_row_have_the_outputs_and_gradients_of_separate_recurrences(lengths, decay, seed):
    draw = partial(make_inputs, length=sum(lengths), decay=decay, seed=seed)
    starts = torch.zeros(1, sum(lengths), dtype=torch.bool)
    starts[0, torch.tensor([0, *lengths[:-1]]).cumsum(0)] = True

    def one_by_one(initial_state, **inputs):
        parts = zip(*(tensor.split(lengths, 1) for tensor in inputs.values()))
        found = [recurrence(*part, initial_state=torch.zeros_like(initial_state)) for part in parts]
        return torch.cat([output for output, _ in found], 1), found[-1][1]

    def with_zero_gradient(compute, dtype):
        """Compute gradients without that of the state before the row, which the first document forgets."""
        leaves = {key: value for key, value in draw().items() if key != "initial_state"}
        compute = partial(compute, initial_state=torch.ones(1, 2, 8, 8, dtype=dtype))
        return with_gradients(compute, leaves, dtype)

    expected = with_zero_gradient(one_by_one, torch.float64)
    found = with_zero_gradient(partial(in_chunks, partial(chunk_kda, starts=starts)), torch.float32)
    own = relative_errors(with_zero_gradient(one_by_one, torch.float32), expected)
    errors = relative_errors(found, expected)
    assert all(error < max(1e-5, 4 * own[name]) for name, error in errors.items()), (errors, own)


KERNELS = """
def fail(*args, **kwargs):
    raise RuntimeError("0 active drivers ([]). There should only be one.")

chunk_kda = fused_recurrent_kda = causal_conv1d_fn = causal_conv1d_update = fail
"""
SESSION = """
import torch
from transformers import KimiLinearForCausalLM
from attnres import AttnResConfig, AttnResForCausalLM
config = AttnResConfig.from_json_file("config.json")
model = AttnResForCausalLM(config).eval()
ids = torch.randint(3, 99, (2, 9))
model(ids, labels=ids).loss.backward()
print(model.generate(ids, max_new_tokens=3, do_sample=False).shape)
try:
    KimiLinearForCausalLM(config)(ids)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.slow
def test_kernel_packages_are_not_used_without_a_gpu(tiny_config, tmp_path):
    """The packages fail like Triton without a GPU; the models of `transformers` use them if they are installed."""
    for package in ("fla", "causal_conv1d"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(KERNELS)
    tiny_config().to_json_file(tmp_path / "config.json")
    done = subprocess.run(
        [sys.executable, "-c", SESSION],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == ["torch.Size([2, 12])", "0 active drivers ([]). There should only be one."]


@pytest.mark.slow
def test_a_training_step_takes_a_fourth_of_the_time_and_memory_of_transformers(peak_bytes):
    inputs = make_inputs(batch=2, length=512, heads=4, size=64)

    def step(compute: Callable) -> None:
        with_gradients(partial(in_chunks, compute=compute), inputs, torch.float32)

    seconds: dict[Callable, list[float]] = {chunk_kda: [], UPSTREAM: []}
    for _ in range(5):
        for compute, times in seconds.items():
            start = time.process_time()
            step(compute)
            times.append(time.process_time() - start)
    assert median(seconds[UPSTREAM]) > 4 * median(seconds[chunk_kda])
    ours, theirs = (peak_bytes(partial(step, compute)) for compute in (chunk_kda, UPSTREAM))
    assert theirs > 4 * ours
