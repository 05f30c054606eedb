"""Compare delta attention without a GPU, `accelerated.delta_attention`, with the fallback of transformers.

It measures the time and the peak memory of a forward and a backward pass on 512 tokens, and the error of each against
the recurrence in float64.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import partial

import torch
from rich.table import Table
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear

from attnres.accelerated.delta_attention import chunk_kda

from .memory import peak_bytes
from .report import cell, make_table, verdict
from .timing import Setting, compare, interleave

UPSTREAM = inspect.unwrap(kimi_linear.chunk_kimi_delta_attention)
WAYS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {"ours": chunk_kda, "transformers": UPSTREAM}
LEAST_GAIN = 4  # target, in time and in memory
MOST_ERROR = 1e-5


def measure(setting: Setting) -> Iterator[dict]:
    """Yield one row per strength of the decay, with heads of the size in the paper's models."""
    length, heads, size = (32, 2, 8) if setting.quick else (512, 4, 128)
    for decay in (1.0,) if setting.quick else (0.1, 1.0, 10.0):
        inputs = make_inputs(length, heads, size, decay, setting.device)
        steps = {name: partial(gradients, compute, inputs) for name, compute in WAYS.items()}
        expected = gradients(recurrence, {name: tensor.double() for name, tensor in inputs.items()})
        errors = {name: largest_error(step(), expected) for name, step in steps.items()}
        peaks = {name: peak_bytes(step, setting.device) for name, step in steps.items()}
        times = compare(interleave(steps, setting), {"transformers / ours": ("transformers", "ours")})
        shape = {"tokens": length, "heads": heads, "d_k": size, "decay": decay}
        yield shape | times | {"errors": errors, "bytes": peaks, "bytes_ratio": peaks["transformers"] / peaks["ours"]}


def make_inputs(length: int, heads: int, size: int, decay: float, device: str) -> dict[str, Tensor]:
    """Return random inputs, `[1, length, heads, size]`; the logarithms of the decay are uniform in `[-decay, 0]`."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, length, heads, size, generator=generator)
    g = -decay * torch.rand(1, length, heads, size, generator=generator)
    beta = torch.rand(1, length, heads, generator=generator)
    inputs = {"query": query, "key": key, "value": value, "g": g, "beta": beta}
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def recurrence(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **options) -> tuple[Tensor, Tensor]:
    """Compute Kimi Delta Attention token by token, in the dtype of its inputs.

    Args:
        query: `[batch, seq, heads, d_k]`.
        key: `[batch, seq, heads, d_k]`.
        value: `[batch, seq, heads, d_v]`.
        g: logarithms of the decay, `[batch, seq, heads, d_k]`.
        beta: rates at which tokens write to the state, `[batch, seq, heads]`.
        **options: ignored; [`gradients`] passes them to every function.

    Returns:
        The output `[batch, seq, heads, d_v]` and the last state `[batch, heads, d_k, d_v]`.
    """
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    state, outputs = value.new_zeros(*value.shape[::2], key.shape[-1], value.shape[-1]), []
    for t in range(query.shape[1]):
        state = g[:, t].exp()[..., None] * state
        delta = beta[:, t, :, None] * (value[:, t] - torch.einsum("bhkv,bhk->bhv", state, key[:, t]))
        state = state + torch.einsum("bhk,bhv->bhkv", key[:, t], delta)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]) * query.shape[-1] ** -0.5)
    return torch.stack(outputs, 1), state


def gradients(compute: Callable[..., tuple[Tensor, Tensor]], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Run a forward and a backward pass. Return the output, and the gradients of the sum of its squares."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    output, _ = compute(**leaves, output_final_state=True, use_qk_l2norm_in_kernel=True)
    grads = torch.autograd.grad(output.square().sum(), leaves.values())
    return {"output": output.detach()} | dict(zip(leaves, grads))


def largest_error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest error of the output and all gradients, each relative to its largest entry."""
    return max(((actual[name] - exact).abs().max() / exact.abs().max()).item() for name, exact in expected.items())


def tables(rows: list[dict]) -> dict[str, Table]:
    """Return the table of all rows, by its name in the README."""

    def cells(row: dict) -> list[str]:
        time, ours, transformers = row["ratios"]["transformers / ours"]["median"], *row["errors"].values()
        return [
            f"exp(-{row['decay']:g})",
            *(cell(row, "transformers / ours"), verdict(time, LEAST_GAIN, at_least=True)),
            *(f"{row['bytes_ratio']:.2f}", verdict(row["bytes_ratio"], LEAST_GAIN, at_least=True)),
            *(f"{ours:.1e}", verdict(ours, MOST_ERROR), f"{transformers:.1e}"),
        ]

    columns = ["time, transformers / ours", "target", "memory, transformers / ours", "target"]
    return {
        "kda": make_table(
            f"Delta attention, forward and backward, {rows[0]['tokens']} tokens, {rows[0]['heads']} heads",
            ["decay down to", *columns, "error, ours", "target", "error, transformers"],
            map(cells, rows),
        )
    }
