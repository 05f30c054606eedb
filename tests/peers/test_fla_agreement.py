"""Depth attention agrees with flash-linear-attention's reference: result, weights and every gradient, to 1e-5.

`fla-core` and `triton` live in a directory of their own, `.peer/` in the checkout: where `transformers` finds them, it
uses them for Kimi Linear, also on a CPU, where those kernels do not run.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from attnres import depth_attention, depth_attention_reference

PACKAGES = ("fla-core==0.6.0", "einops==0.8.2", "triton==3.9.0")
CASES = {
    "one source": dict(n=1, shape=(2, 5, 16), eps=1e-6),
    "two sources, one vector each": dict(n=2, shape=(24,), eps=1e-6),
    "five sources": dict(n=5, shape=(3, 11, 32), eps=1e-6),
    "ten sources, large eps": dict(n=10, shape=(2, 7, 64), eps=1e-2),
    "wide": dict(n=4, shape=(1, 3, 512), eps=1e-5, query_scale=0.1),
    "zero query": dict(n=6, shape=(2, 9, 48), eps=1e-6, query_scale=0.0),
}


def random_case(n: int, shape: tuple[int, ...], eps: float, query_scale: float = 0.3) -> dict:
    generator = torch.Generator().manual_seed(n)
    normal = lambda *size: torch.randn(size, generator=generator)  # noqa: E731
    return {
        "query": query_scale * normal(shape[-1]),
        "key_norm_weight": 1 + 0.5 * normal(shape[-1]),
        "sources": [(1 + i / n) * normal(*shape) for i in range(n)],
        "eps": eps,
        "grad_result": normal(*shape) / shape[-1] ** 0.5,  # gradients of about one, whatever the width
        "grad_weights": normal(n, *shape[:-1]),
    }


@pytest.fixture(scope="module")
def fla_packages(pytestconfig) -> Path:
    """The directory that holds fla-core and what it needs beside torch; installed when it is not there."""
    target = pytestconfig.rootpath / ".peer" / PACKAGES[0].replace("==", "-")
    target.parent.mkdir(exist_ok=True)
    with FileLock(target.with_name(f"{target.name}.lock")):
        if not target.exists():
            unfinished = target.with_name(f"{target.name}.{os.getpid()}")
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(unfinished)]
            subprocess.run([*command, *PACKAGES], check=True)
            unfinished.rename(target)
    return target


@pytest.fixture(scope="module")
def golden_values(fla_packages, tmp_path_factory) -> dict[str, list[torch.Tensor]]:
    """By case: result, weights, gradients of query, key-norm weight and every source."""
    inputs, outputs = (tmp_path_factory.mktemp("fla") / name for name in ("inputs.pt", "outputs.pt"))
    torch.save([random_case(**case) for case in CASES.values()], inputs)
    script = Path(__file__).with_name("fla_golden.py")
    environment = os.environ | {"PYTHONPATH": str(fla_packages)}
    subprocess.run([sys.executable, str(script), str(inputs), str(outputs)], env=environment, check=True)
    return dict(zip(CASES, torch.load(outputs)))


@pytest.mark.slow
@pytest.mark.parametrize("function", [depth_attention, depth_attention_reference])
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_flash_linear_attention(name, function, golden_values):
    case = random_case(**CASES[name])
    leaves = [tensor.requires_grad_() for tensor in (case["query"], case["key_norm_weight"], *case["sources"])]
    query, key_norm_weight, *sources = leaves

    outputs = function(query, sources, key_norm_weight, case["eps"], return_weights=True)
    gradients = torch.autograd.grad(outputs, leaves, (case["grad_result"], case["grad_weights"]))

    kinds = ["result", "weights", "gradient of query", "gradient of key_norm_weight"]
    kinds += [f"gradient of source {i}" for i in range(len(sources))]
    for kind, ours, theirs in zip(kinds, (*outputs, *gradients), golden_values[name], strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=1e-5, atol=1e-5, msg=lambda difference, kind=kind: f"{kind}: {difference}"
        )
