"""Run every kernel in Triton's interpreter on tensors between pages without access.

    python triton_guard_pages_session.py end|begin WIDTH...

A read or write beyond the end, or before the beginning, of a tensor kills this process with a signal.
"""

import ctypes
import math
import mmap
import sys

import torch
from torch import Tensor

from attnres.accelerated.triton import launch

LIBRARY = ctypes.CDLL(None, use_errno=True)
PAGE, NO_ACCESS = mmap.PAGESIZE, 0
KEPT = []  # keeps the pages as long as the process lives


def guarded(shape: tuple[int, ...], dtype: torch.dtype, at_end: bool) -> Tensor:
    """Return an uninitialised tensor between two pages without access, next to the second or to the first."""
    size = max(1, math.prod(shape) * dtype.itemsize)
    pages = -(-size // PAGE)
    memory = mmap.mmap(-1, (pages + 2) * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (start, start + (pages + 1) * PAGE):
        assert LIBRARY.mprotect(ctypes.c_void_p(page), PAGE, NO_ACCESS) == 0, ctypes.get_errno()
    offset = PAGE + (pages * PAGE - size if at_end else 0)
    buffer = (ctypes.c_char * size).from_address(start + offset)
    KEPT.extend((memory, buffer))
    return torch.frombuffer(buffer, dtype=dtype, count=math.prod(shape)).view(shape)


def main(width: int, at_end: bool) -> None:
    launch._empty = lambda like, shape, dtype: guarded(tuple(shape), dtype, at_end)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return guarded(shape, dtype, at_end).copy_(torch.randn(shape))

    for dtype in launch.DTYPES:
        for n, tokens in ((1, 1), (3, 9)):
            query, grad = random(width), random(tokens, width, dtype=dtype)
            sources = [random(tokens, width, dtype=dtype) for _ in range(n)]
            result, *saved = launch.forward(query, sources, 1e-6, True)
            for later in ([], [random(tokens, width, dtype=dtype) for _ in range(n)]):
                launch.backward(grad, random(n, tokens), later, query, sources, *saved, True, True)
            phase = launch.phase_one(random(3, width), 1e-6, *sources)
            begun, weight = tuple(guarded_copy(part[1], at_end) for part in phase), random(width, dtype=dtype)
            for fresh, phase in ((sources, None), ([], begun), (sources, begun)):
                launch.read_fused(query, 1e-6, 1, fresh, phase, dtype, weight, 1e-6)
            assert bool(result.isfinite().all())


def guarded_copy(tensor: Tensor, at_end: bool) -> Tensor:
    return guarded(tuple(tensor.shape), tensor.dtype, at_end).copy_(tensor)


if __name__ == "__main__":
    side, *widths = sys.argv[1:]
    if side == "beyond":  # shows that the guards work: this read must kill the process
        ctypes.string_at(guarded((4,), torch.float32, True).data_ptr() + 16, 1)
    for width in widths:
        main(int(width), side == "end")
    print("unharmed")
