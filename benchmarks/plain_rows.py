"""Measure the row functions of `accelerated/numba/rows.py` against the same functions as plain numba loops.

`python -m benchmarks.plain_rows` builds the compiled loops a second time, with the functions of this file in place of
the hand-written ones, and prints for whole models how much longer they take. The sums here have a fixed order as well:
that of 64 lanes, which are added by halves at the end. `docs/guides/numba.md` says why, and what was measured.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from unittest.mock import patch

import numba
import numpy as np
import torch
from numba import types
from numba.core.caching import NullCache
from numba.extending import overload

from attnres.accelerated.numba import engine, loops, rows

from .shapes import CONNECTIONS, build, connect, llama, token_ids
from .timing import Ratio, Setting, interleave, keep_freed_memory
from .workloads import prefill, training_step

# Without `fastmath`, which would let LLVM choose the order of a sum. numba compares the names of parameters, and would
# count annotations, so functions for compiled code have none.
_jit = numba.njit(nogil=True, error_model="numpy")
_LANES, _BLOCKS = 64, 4  # lanes of a sum, and blocks of so many numbers that are added to the lanes at once
_SIXTEEN, _ZERO = np.uint32(16), np.float32(0)
pointer, prefetch = rows.pointer, rows.prefetch  # no numba function does what they do


def widen(number):
    """Convert a number of a row, float32 or the bits of bfloat16, to float32. Compiled code only."""


@overload(widen)
def _widen(number):
    if number == types.float32:
        return lambda number: number
    return lambda number: np.uint32(np.uint32(number) << _SIXTEEN).view(np.float32)


def narrow(number, like):
    """Convert a float32 to what a row like `like` holds. Compiled code only."""


@overload(narrow)
def _narrow(number, like):
    if like == types.float32:
        return lambda number, like: number

    def to_bits(number, like):
        bits = np.float32(number).view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> _SIXTEEN) & np.uint32(1))) >> _SIXTEEN
        return np.uint16(np.uint32(0x7FC0) if number != number else rounded)

    return to_bits


@_jit
def dot(row, other):
    """Do the same as `rows.dot`."""
    return _one_and_square(row, other)[0]


@_jit
def dot_ahead(row, other, ahead):
    """Do the same as `rows.dot_ahead`."""
    prefetch(row.ctypes.data + ahead, row.itemsize * len(row))
    return _one_and_square(row, other)[0]


def dots_and_square(row, others, ahead):
    """Do the same as `rows.dots_and_square`. Compiled code only."""


@overload(dots_and_square)
def _dots_and_square(row, others, ahead):
    def with_one(row, others, ahead):
        prefetch(row.ctypes.data + ahead, row.itemsize * len(row))
        return _one_and_square(row, others[0])

    def with_two(row, others, ahead):
        prefetch(row.ctypes.data + ahead, row.itemsize * len(row))
        return _two_and_square(row, others[0], others[1])

    def with_four(row, others, ahead):
        prefetch(row.ctypes.data + ahead, row.itemsize * len(row))
        first, second, square = _two_and_square(row, others[0], others[1])
        third, fourth, _ = _two_and_square(row, others[2], others[3])
        return first, second, third, fourth, square

    return {1: with_one, 2: with_two, 4: with_four}[len(others)]


@_jit
def _one_and_square(row, other):
    totals, squares = np.zeros(_LANES, np.float32), np.zeros(_LANES, np.float32)
    step = _BLOCKS * _LANES
    whole = len(row) - len(row) % step
    for start in range(0, whole, step):
        part, a = row[start : start + step], other[start : start + step]
        for k in range(_LANES):
            # Four blocks for each load and store of the lanes, which numba cannot keep in registers.
            p, q, r, s = widen(part[k]), widen(part[64 + k]), widen(part[128 + k]), widen(part[192 + k])
            totals[k] = totals[k] + p * a[k] + q * a[64 + k] + r * a[128 + k] + s * a[192 + k]
            squares[k] = squares[k] + p * p + q * q + r * r + s * s
    for start in range(whole, len(row), _LANES):
        part, a = row[start : start + _LANES], other[start : start + _LANES]
        for k in range(len(part)):
            value = widen(part[k])
            totals[k] += value * a[k]
            squares[k] += value * value
    return _by_halves(totals), _by_halves(squares)


@_jit
def _two_and_square(row, first, second):
    firsts, seconds = np.zeros(_LANES, np.float32), np.zeros(_LANES, np.float32)
    squares = np.zeros(_LANES, np.float32)
    step = _BLOCKS * _LANES
    whole = len(row) - len(row) % step
    for start in range(0, whole, step):
        part, a, b = row[start : start + step], first[start : start + step], second[start : start + step]
        for k in range(_LANES):
            p, q, r, s = widen(part[k]), widen(part[64 + k]), widen(part[128 + k]), widen(part[192 + k])
            firsts[k] = firsts[k] + p * a[k] + q * a[64 + k] + r * a[128 + k] + s * a[192 + k]
            seconds[k] = seconds[k] + p * b[k] + q * b[64 + k] + r * b[128 + k] + s * b[192 + k]
            squares[k] = squares[k] + p * p + q * q + r * r + s * s
    for start in range(whole, len(row), _LANES):
        part, a, b = row[start : start + _LANES], first[start : start + _LANES], second[start : start + _LANES]
        for k in range(len(part)):
            value = widen(part[k])
            firsts[k] += value * a[k]
            seconds[k] += value * b[k]
            squares[k] += value * value
    return _by_halves(firsts), _by_halves(seconds), _by_halves(squares)


@_jit
def _by_halves(lanes):
    half = _LANES // 2
    while half:
        for k in range(half):
            lanes[k] += lanes[k + half]
        half //= 2
    return lanes[0]


@_jit
def scale(result, factor, row):
    """Do the same as `rows.scale`."""
    for d in range(len(result)):
        result[d] = narrow(factor * widen(row[d]), result[d])


@_jit
def _row(address, width, like):
    return numba.carray(pointer(address, like), (width,))


@_jit
def mix(like, result, base_factor, base, factors, addresses):
    """Do the same as `rows.mix`."""
    total = np.empty(len(result), np.float32)
    for d in range(len(result)):
        total[d] = base_factor * base[d]
    n = len(addresses)
    fours = n - n % 4
    for i in range(0, fours, 4):
        # Four rows for each load and store of the totals, which numba cannot keep in registers.
        first, second = _row(addresses[i], len(result), like), _row(addresses[i + 1], len(result), like)
        third, fourth = _row(addresses[i + 2], len(result), like), _row(addresses[i + 3], len(result), like)
        a, b, c, e = factors[i], factors[i + 1], factors[i + 2], factors[i + 3]
        for d in range(len(result)):
            total[d] = (
                total[d] + a * widen(first[d]) + b * widen(second[d]) + c * widen(third[d]) + e * widen(fourth[d])
            )
    for i in range(fours, n):
        row, factor = _row(addresses[i], len(result), like), factors[i]
        for d in range(len(result)):
            total[d] += factor * widen(row[d])
    for d in range(len(result)):
        result[d] = narrow(total[d], result[d])


@_jit
def mix_for_each(like, results, factors, addresses):
    """Do the same as `rows.mix_for_each` for four results."""
    first, second, third, fourth = results
    n, width = len(addresses), len(first)
    for result in results:
        result[:] = 0
    for i in range(n):
        row = _row(addresses[i], width, like)
        a, b, c, e = factors[i], factors[n + i], factors[2 * n + i], factors[3 * n + i]
        for d in range(width):
            value = widen(row[d])
            first[d] += a * value
            second[d] += b * value
            third[d] += c * value
            fourth[d] += e * value


@_jit
def derive(like, targets, others, addresses, coefficients, grad, query, grad_query):
    """Do the same as `rows.derive`."""
    width = len(query)
    for i in range(len(addresses)):
        m, a, b = coefficients[3 * i], coefficients[3 * i + 1], coefficients[3 * i + 2]
        row, other = _row(addresses[i], width, like), _row(others[i], width, like)
        target = _row(targets[i], width, like)
        for d in range(width):
            value = widen(row[d])
            grad_query[d] += a * value
            target[d] = narrow(widen(other[d]) + (m * grad[d] + a * query[d] + b * value), like)


def plain_loops() -> ModuleType:
    """Return a second copy of the module `loops` that uses the row functions of this file."""
    spec = spec_from_file_location(f"{loops.__package__}.plain_loops", loops.__file__)
    copy = module_from_spec(spec)
    with patch.dict(sys.modules, {rows.__name__: sys.modules[__name__]}):
        spec.loader.exec_module(copy)
    for dispatcher in copy.DISPATCHERS:
        dispatcher._cache = NullCache()  # else it would load the machine code of the hand-written ones
    return copy


@contextmanager
def use(module: ModuleType) -> Iterator[None]:
    """Run the loops of a module."""
    with patch.object(engine, "_loops", lambda: (module.LOOPS, module.LIKE)):
        yield


def main() -> None:
    """Print the ratios of whole models, plain loops over hand-written ones."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=9, help="turns of each row (default: 9)")
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch and numba (default: 1)")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a pass (default: 512)")
    parser.add_argument("--only", nargs="+", default=["Block S=4", "Full"], help="residual connections")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="dtypes of the models")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    plain = plain_loops()
    for shape, config in {"12 x 1024": llama(), "24 x 512": llama(width=512, layers=24)}.items():
        for dtype in options.dtypes:
            standard = build(config, getattr(torch, dtype), "cpu")
            ids = token_ids(config, options.tokens, 1, "cpu")
            for connection in options.only:
                model = connect(standard, **CONNECTIONS[connection])
                for workload, prepare in {"training step": training_step, "prefill": prefill}.items():
                    way = prepare({"model": model}, ids)["model"]
                    ways = {"hand-written": _with(loops, way), "plain": _with(plain, way)}
                    times = interleave(ways, Setting(options.threads, options.repeats), calls=1)
                    # Of the processor's time: it hardly counts what other processes take of the machine.
                    ratio = Ratio.of(times["plain"].cpu, times["hand-written"].cpu)
                    print(f"{shape}  {dtype}  {connection}  {workload}: plain / hand-written {ratio}", flush=True)


def _with(module: ModuleType, way: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        with use(module):
            way()

    return run


if __name__ == "__main__":
    main()
