"""Compile every kernel for a GPU that this machine may lack, and write Triton's output of each.

python triton_compile_session.py CAPABILITY DIR
"""

import sys
from pathlib import Path

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from attnres.accelerated.triton import direct, launch

CAPABILITY, FOLDER = int(sys.argv[1]), Path(sys.argv[2])


class NoGPU:
    """A driver with no more than Triton needs to compile."""

    def get_current_target(self):
        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_only(self, *args, grid, warmup, run=JITFunction.run, **kwargs):
    kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
    stem = FOLDER / f"{kernel.name}-{len(list(FOLDER.glob('*.ttir')))}"
    stem.with_suffix(".ttir").write_text(kernel.asm["ttir"])
    stem.with_suffix(".cubin").write_bytes(kernel.asm["cubin"])


FOLDER.mkdir(parents=True)
JITFunction.run = compile_only
driver.set_active(NoGPU())
for n, width, dtype in ((2, 7, torch.float32), (9, 1264, torch.bfloat16), (64, 8192, torch.float16)):
    query, *sources = [torch.ones(3, width, dtype=dtype) for _ in range(n + 1)]
    query = query[0].float()
    result, statistics = launch.forward(query, sources, 1e-6, True)
    for grad_weights, needs_sources, later in (
        (None, False, []),
        (statistics[0], True, []),
        (statistics[0], True, sources),
    ):
        launch.backward(result, grad_weights, later, query, sources, statistics, True, needs_sources)
    kind = result.shape, dtype, result.device, query.shape, torch.float32, dtype
    for norm_weight in (None, query.to(dtype)):
        # The launches of `host.cpp`.
        sizes = direct.ReadSizes(n, *kind, norm_weight is not None)
        padded, weights = (*sources, *sources[:1] * sizes.padding), (query, query.to(dtype))
        hidden, partial = None if norm_weight is None else result, torch.empty(sizes.partial_shape)
        numbers = sizes.tokens, n, float(n)
        phase = None, None, None
        sizes.forward(padded, *weights, *phase, norm_weight, result, hidden, statistics, *numbers, 1e-6, 1e-6)
        backward = sizes.backward(False, True, False)
        saved = hidden, norm_weight, statistics
        backward(result, None, padded, *weights, *saved, statistics[0], partial, padded, None, *numbers, 1e-6)
        sizes.finish(partial, *weights, *weights, norm_weight, sizes.programs)
    phase = tuple(part[0] for part in launch.phase_one(query.repeat(6, 1), 1e-6, *sources))
    launch.read_fused(query, 1e-6, 1, [], phase, dtype)
    for begun in (None, phase):
        launch.read_fused(query, 1e-6, 1, sources, begun, None, sources[0][0], 1e-6)
