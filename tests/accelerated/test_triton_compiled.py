"""The kernels under `torch.compile` and in CUDA graphs, and compiled for GPUs that this machine lacks."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attnres.accelerated.triton import implementation, read_fused

from .triton_cases import EPS, begin, everything, fused, make, needs_triton, on_gpu, run, with_kernels

SESSION = Path(__file__).with_name("triton_compile_session.py")


@with_kernels
@pytest.mark.slow
def test_torch_compile_makes_one_graph_for_any_number_of_tokens():
    def attend(query: Tensor, sources: list[Tensor], is_sum: bool) -> tuple[Tensor, Tensor]:
        assert implementation._tried_on(query.device) is None or not query.is_cuda
        sources = [2 * sources[0], *sources[1:]]
        for factor in (1.5, -0.5):
            result, weights, sources = run(factor * query, sources, is_sum, fuse_later_grads=True)
            sources = [*sources, 2 * result]
        return result + sources[1], weights

    def in_phases(query: Tensor, sources: list[Tensor]) -> tuple[Tensor, Tensor]:
        phase, weight = begin(query, sources), torch.ones_like(query)
        alone = read_fused(query, EPS, 3, [], phase, torch.float16)
        return alone, read_fused(query, EPS, 5, [2 * sources[0], sources[1]], phase, None, weight, 0.1)

    torch._dynamo.reset()
    compiled, compiled_phases = (torch.compile(function, fullgraph=True) for function in (attend, in_phases))
    for tokens in (5, 7, 9):
        query, sources = make(3, (2, tokens), 24)
        actual, expected = (everything(function, query, sources, True) for function in (compiled, attend))
        torch.testing.assert_close(actual, expected)
        with torch.no_grad():
            torch.testing.assert_close(compiled_phases(query, sources), in_phases(query, sources))


@on_gpu
def test_a_cuda_graph_replays_the_kernels_on_new_sources():
    query, sources = make(3, (8,), 1024, torch.bfloat16)
    with torch.no_grad():
        fused(query, sources, False)  # compiles them
        read_fused(query, EPS, 1, sources[1:], begin(query, sources[:1]))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result, _ = fused(query, sources, False)
            read = read_fused(query, EPS, 1, sources[1:], begin(query, sources[:1]))
        for source in sources:
            source.mul_(torch.rand_like(source))
        graph.replay()
        assert torch.equal(result, fused(query, sources, False)[0])
        assert torch.equal(read, read_fused(query, EPS, 1, sources[1:], begin(query, sources[:1])))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Iterator[Path]:
    """Return a folder with Triton's first representation and the machine code of each kernel, by capability."""
    folder = tmp_path_factory.mktemp("compiled")
    for capability in (80, 90):
        environment = os.environ | {"TRITON_CACHE_DIR": str(folder / f"cache{capability}")}
        command = [sys.executable, str(SESSION), str(capability), str(folder / str(capability))]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    yield folder


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernels_compile_for_a_gpu_that_this_machine_lacks(capability, compiled):
    kernels = [path.name.partition("-")[0] for path in (compiled / str(capability)).glob("*.ttir")]
    assert {name: kernels.count(name) for name in set(kernels)} == {
        "forward_kernel": 3 * (3 + 3),
        "backward_kernel": 3 * 5,
        "finish_kernel": 3 * 2,
        "phase_one_kernel": 3,
    }
    assert all(
        (compiled / str(capability)).joinpath(f"{path.stem}.cubin").stat().st_size
        for path in compiled.glob("80/*.ttir")
    )


@needs_triton
@pytest.mark.slow
def test_every_product_with_the_number_of_tokens_has_64_bits(compiled):
    """The statistics of 64 sources of 2^26 tokens are more than 2^31 numbers. So are the rows of 2^20 tokens."""
    paths = list((compiled / "90").glob("*.ttir"))
    for path in paths:
        products = [line for line in path.read_text().splitlines() if "arith.muli" in line and "%tokens" in line]
        assert not [line for line in products if "i32" in line.rpartition(":")[2]], path.name
    assert paths
