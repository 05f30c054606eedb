"""Run the loops on tensors between pages without access: a read or write beyond a tensor's ends kills this process.

numba_guard_pages_session.py DTYPE [beyond]

`test_guard_pages.py` runs it. It prints the number of cases; with `beyond` it then writes beyond a tensor.
"""

import ctypes
import math
import mmap
import sys

import torch

from attnres.accelerated.autograd import BackwardRequest
from attnres.accelerated.numba import call, kernels

PAGE = mmap.PAGESIZE
WIDTHS = sorted(
    {*range(1, 35), *(2**k + i for k in range(5, 11) for i in (-1, 0, 1)), 37, 53, 97, 131, 257, 331, 521, 769, 997}
)
libc = ctypes.CDLL(None, use_errno=True)


class Guarded:
    """Makes tensors that begin where a page begins, or end where a page ends. The next page has no access."""

    def __init__(self, at_end: bool):
        self.at_end, self.maps = at_end, []

    def empty(self, shape, dtype: torch.dtype) -> torch.Tensor:
        count = math.prod(shape)
        size = max(1, count) * dtype.itemsize
        pages = -(-size // PAGE)
        memory = mmap.mmap(-1, (pages + 2) * PAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for guard in (start, start + (pages + 1) * PAGE):
            if libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(PAGE), 0) != 0:
                raise OSError(ctypes.get_errno(), "mprotect")
        self.maps.append((memory, start))
        offset = PAGE + (pages * PAGE - size if self.at_end else 0)
        return torch.frombuffer(memory, dtype=dtype, count=max(1, count), offset=offset)[:count].view(shape)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.empty(tensor.shape, tensor.dtype).copy_(tensor)


def case(guarded: Guarded, width: int, n: int, tokens: int, dtype: torch.dtype) -> None:
    shape, float32 = (tokens, width), torch.float32
    query = guarded.copy(torch.randn(width))
    sources = [guarded.copy(torch.randn(shape).to(dtype)) for _ in range(n)]
    weights = guarded.empty((n, tokens), float32)
    result, normed = guarded.empty(shape, dtype), guarded.empty(shape, dtype)
    norm_weight = guarded.copy(torch.ones(width, dtype=dtype))
    rows = call.checked(sources)
    kept, normed_kept = (guarded.empty((tokens, call.kept_size(n)), float32) for _ in range(2))
    call.forward(query, rows, result, weights, n, 1e-6, kept=kept)
    call.forward(query, rows, normed, None, n, 1e-6, norm_weight, 1e-6, kept=normed_kept)
    expected, expected_weights, saved = kernels.forward(
        query.clone(), [source.clone() for source in sources], 1e-6, True
    )
    assert torch.equal(result, expected) and torch.equal(weights, expected_weights)

    grad, grad_weights = guarded.copy(torch.randn(shape).to(dtype)), guarded.copy(torch.randn(n, tokens))
    later = [guarded.copy(torch.randn(shape).to(dtype)) if i % 2 else None for i in range(n)]
    needs_sources = [i % 3 != 1 for i in range(n)]
    request = BackwardRequest(
        grad.clone(), grad_weights.clone(), later, query.clone(), sources, saved, 1e-6, True, True, needs_sources
    )
    for norm in (None, norm_weight):
        if norm is not None:
            request = request._replace(saved=(normed_kept.clone(),))
        grad_query, grad_norm = (guarded.copy(torch.zeros(call.chunks(result.shape), width)) for _ in range(2))
        grad_norm = None if norm is None else grad_norm
        grad_sources = [guarded.empty(shape, dtype) if needed else None for needed in needs_sources]
        call.backward(
            query, grad, grad_weights, grad_query, rows, grad_sources, later, n,
            kept if norm is None else normed_kept, norm, grad_norm,
        )  # fmt: skip
        expected_query, expected_norm, expected_sources = kernels.backward_with_norm(request, norm)
        assert torch.equal(grad_query.sum(0), expected_query)
        assert norm is None or torch.equal(grad_norm.sum(0), expected_norm)
        for ours, right in zip(grad_sources, expected_sources):
            assert (ours is None) == (right is None) and (ours is None or torch.equal(ours, right))

    begun = max(1, n - 2)
    queries = guarded.copy(torch.stack([query] * 5))
    sums, statistics = guarded.empty((5, *shape), float32), guarded.empty((5, tokens, 2), float32)
    call.phase_one(queries, call.checked(sources[:begun]), sums, statistics, 1e-6)
    completed = guarded.empty(shape, dtype)
    phase = (guarded.copy(sums[0]), guarded.copy(statistics[0]))  # all queries are equal
    call.forward(query, rows.after(begun), completed, None, n, 1e-6, phase=phase)
    torch.testing.assert_close(completed.float(), expected.float(), rtol=0.02, atol=0.02)
    call.forward(query, rows.after(begun), completed, None, n, 1e-6, norm_weight, 1e-6, phase)
    torch.testing.assert_close(completed.float(), normed.float(), rtol=0.02, atol=0.02)


def situ_case(guarded: Guarded, width: int, tokens: int, dtype: torch.dtype) -> None:
    # Gate and up are halves of longer rows, and the last row of `up` ends where the memory ends.
    gate, up = guarded.copy(torch.randn(tokens, 2 * width).to(dtype)).chunk(2, -1)
    result, grad_gate, grad_up = (guarded.empty((tokens, width), dtype) for _ in range(3))
    call.situ(gate, up, result, 4.0, 25.0)
    again, of_gate, of_up = (torch.empty(tokens, width, dtype=dtype) for _ in range(3))
    call.situ(gate.clone(), up.clone(), again, 4.0, 25.0)
    assert torch.equal(result, again)
    grad = guarded.copy(torch.randn(tokens, width).to(dtype))
    call.situ_grads(gate, up, grad, grad_gate, grad_up, 4.0, 25.0)
    call.situ_grads(gate.clone(), up.clone(), grad.clone(), of_gate, of_up, 4.0, 25.0)
    assert torch.equal(grad_gate, of_gate) and torch.equal(grad_up, of_up)


def main() -> None:
    dtype = getattr(torch, sys.argv[1])
    torch.manual_seed(0)
    torch.set_num_threads(1)
    done = 0
    for at_end in (False, True):
        for i, width in enumerate(WIDTHS):
            for n, tokens in ((1 + i % 5, 1 + i % 3), (1 + 7 * i % 40, 1 + (i + 2) % 5)):
                case(Guarded(at_end), width, n, tokens, dtype)
                situ_case(Guarded(at_end), width, tokens, dtype)
                done += 1
    print(done, flush=True)
    if sys.argv[2:] == ["beyond"]:  # shows that the guards work: this write must kill the process
        guarded = Guarded(True)
        short = guarded.empty((2, 64), dtype)
        ctypes.memset(short.data_ptr(), 0, short.numel() * dtype.itemsize + 1)


main()
