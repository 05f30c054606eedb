"""The loops of `cpu_kernels_attnres`, compiled by `numba` for the processor at hand: seconds at first, then cached.

All take the address of what [`cpu_kernels_attnres._run`] wrote: sizes, and the addresses of tensors. Statistics are in
float32; rows of bfloat16 are converted as they are read and written.
"""

from functools import cache

import torch

try:
    import numba
    import numpy as np
    from llvmlite import ir
    from numba.core import types
    from numba.extending import intrinsic
except ImportError as error:  # within `try`: for who loads this file as remote code, these packages are optional
    raise ImportError("the kernels for CPUs need `numba`") from error


_WORD = ir.IntType(32)
# Of weights, before they are divided by their sum: smaller ones make denormal numbers of what they are multiplied by,
# for each of which processors take a hundred times as long.
_SMALLEST = np.float32(1e-36)


@intrinsic
def _pointer(typing_context, address, like):
    """The number `address` as a pointer to what `like` is."""

    def generate(context, builder, signature, values):
        return builder.inttoptr(values[0], context.get_value_type(signature.return_type))

    return types.CPointer(like)(types.int64, like), generate


# In 32 bits throughout: numba's own integers are of 64, of which vector instructions take half as many.
@intrinsic
def _widen(typing_context, half):
    """A bfloat16, given by its bits, as float32."""

    def generate(context, builder, signature, values):
        bits = builder.shl(builder.zext(values[0], _WORD), _WORD(16))
        return builder.bitcast(bits, context.get_value_type(signature.return_type))

    return types.float32(types.uint16), generate


@intrinsic
def _narrow(typing_context, number):
    """The bits of the bfloat16 next to a float32, of the even one where two are as near; a NaN stays one."""

    def generate(context, builder, signature, values):
        bits = builder.bitcast(values[0], _WORD)
        is_odd = builder.and_(builder.lshr(bits, _WORD(16)), _WORD(1))
        rounded = builder.lshr(builder.add(builder.add(bits, _WORD(0x7FFF)), is_odd), _WORD(16))
        is_nan = builder.fcmp_unordered("uno", values[0], values[0])
        return builder.trunc(builder.select(is_nan, _WORD(0x7FC0), rounded), ir.IntType(16))

    return types.uint16(types.float32), generate


# Sums over a row in any order, for vector instructions. Nothing that makes `n / n` differ from one.
_jit = numba.njit(cache=True, nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})
_parallel_jit = numba.njit(cache=True, nogil=True, parallel=True)


@_jit
def _vector(address, width):
    return numba.carray(_pointer(address, np.float32(0)), (width,))


@_jit
def _arguments(address, others, each):
    """What [`_run`] wrote there, with the addresses of `others`, and of `each` of the sources."""
    n = numba.carray(_pointer(address, np.int64(0)), (5,))[2]
    numbers = numba.carray(_pointer(address, np.int64(0)), (5 + others + each * n,))
    return numbers[0], numbers[1], n, numbers[3] != 0, numbers[4] != 0, numbers[5:]


# Loops over a row, each a function that the compiler vectorises.
@_jit
def _widen_row(half, row):
    for d in range(len(row)):
        row[d] = _widen(half[d])


@_jit
def _narrow_row(row, half):
    for d in range(len(row)):
        half[d] = _narrow(row[d])


@_jit
def _dot(row, other):
    total = np.float32(0)
    for d in range(len(row)):
        total += row[d] * other[d]
    return total


@_jit
def _dot_and_square(row, query):
    dot, square = np.float32(0), np.float32(0)
    for d in range(len(row)):
        dot += row[d] * query[d]
        square += row[d] * row[d]
    return dot, square


@_jit
def _set_scaled(result, factor, row):
    for d in range(len(row)):
        result[d] = factor * row[d]


@_jit
def _add_scaled(result, factor, row):
    for d in range(len(row)):
        result[d] += factor * row[d]


@_jit
def _set_sum(result, factors, first, second, third):
    a, b, c = factors
    for d in range(len(first)):
        result[d] = a * first[d] + b * second[d] + c * third[d]


@_jit
def _read(address, token, is_half, row):
    """A token's row in float32: the one in memory, or what is written to `row`."""
    width = len(row)
    if not is_half:
        return _vector(address + token * width * 4, width)
    _widen_row(numba.carray(_pointer(address + token * width * 2, np.uint16(0)), (width,)), row)
    return row


@_jit
def _row(sources, i, token, is_half, rows):
    """The row of a source that was read before: those of bfloat16 stand in `rows`."""
    return rows[i] if is_half else _read(sources[i], token, False, rows[i])


@_jit
def _write(row, address, token):
    """A row of float32 to a tensor of bfloat16."""
    width = len(row)
    _narrow_row(row, numba.carray(_pointer(address + token * width * 2, np.uint16(0)), (width,)))


@_jit
def _softmax(logits, is_sum, weights, mixing):
    """Weights, and what the sources are multiplied by: exactly one at equal logits, if it is the sum."""
    largest, total = logits.max(), np.float32(0)
    for i in range(len(logits)):
        weights[i] = np.exp(logits[i] - largest)
        if weights[i] < _SMALLEST:
            weights[i] = 0
        total += weights[i]
    for i in range(len(logits)):
        mixing[i] = weights[i] * (np.float32(len(logits)) if is_sum else np.float32(1)) / total
        weights[i] = weights[i] / total


@_jit
def _read_all(sources, token, eps, is_half, query, rows, logits, inverse_rms):
    """The logits of a token's sources; rows of bfloat16 stay behind in `rows`, and others in the cache."""
    for i in range(len(sources)):
        dot, square = _dot_and_square(_read(sources[i], token, is_half, rows[i]), query)
        inverse_rms[i] = np.float32(1) / np.sqrt(square / np.float32(len(query)) + np.float32(eps))
        logits[i] = dot * inverse_rms[i]


@_jit
def forward_chunk(chunk, chunks, arguments, eps):
    tokens, width, n, is_sum, is_half, addresses = _arguments(arguments, 4, 1)
    query, all_weights = _vector(addresses[0], width), _vector(addresses[2], n * tokens)
    if addresses[3]:
        query = query * _vector(addresses[3], width)
    sources = addresses[4:]
    logits, inverse_rms, weights, mixing = np.empty((4, n), np.float32)
    rows, own = np.empty((n, width), np.float32), np.empty(width, np.float32)
    for token in range(chunk * tokens // chunks, (chunk + 1) * tokens // chunks):
        _read_all(sources, token, eps, is_half, query, rows, logits, inverse_rms)
        _softmax(logits, is_sum, weights, mixing)
        result = own if is_half else _vector(addresses[1] + token * width * 4, width)
        for i in range(n):
            all_weights[i * tokens + token] = weights[i]
            row = _row(sources, i, token, is_half, rows)
            if i == 0:
                _set_scaled(result, mixing[i], row)
            else:
                _add_scaled(result, mixing[i], row)
        if is_half:
            _write(result, addresses[1], token)


@_jit
def backward_chunk(chunk, chunks, arguments, eps):
    tokens, width, n, is_sum, is_half, addresses = _arguments(arguments, 4, 2)
    query, grad_query = _vector(addresses[0], width), _vector(addresses[3] + chunk * width * 4, width)
    sources, grad_sources = addresses[4 : 4 + n], addresses[4 + n :]
    logits, inverse_rms, weights, mixing, similarity = np.empty((5, n), np.float32)
    weight_grads = np.zeros(n, np.float32)
    rows, own, own_grad = np.empty((n, width), np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
    for token in range(chunk * tokens // chunks, (chunk + 1) * tokens // chunks):
        _read_all(sources, token, eps, is_half, query, rows, logits, inverse_rms)
        _softmax(logits, is_sum, weights, mixing)
        grad = _read(addresses[1], token, is_half, own_grad)
        for i in range(n):
            similarity[i] = _dot(_row(sources, i, token, is_half, rows), grad)
            if addresses[2]:
                weight_grads[i] = _vector(addresses[2] + (i * tokens + token) * 4, 1)[0]
        mean_similarity, mean_weight_grad = _dot(weights, similarity), _dot(weights, weight_grads)
        for i in range(n):
            row = _row(sources, i, token, is_half, rows)
            grad_logit = mixing[i] * (similarity[i] - mean_similarity)
            grad_logit += weights[i] * (weight_grads[i] - mean_weight_grad)
            along_query = grad_logit * inverse_rms[i]
            along_source = -grad_logit * logits[i] * inverse_rms[i] * inverse_rms[i] / np.float32(width)
            _add_scaled(grad_query, along_query, row)
            if grad_sources[i]:
                result = own if is_half else _vector(grad_sources[i] + token * width * 4, width)
                _set_sum(result, (mixing[i], along_query, along_source), grad, query, row)
                if is_half:
                    _write(result, grad_sources[i], token)


@_parallel_jit
def forward_chunks(chunks, arguments, eps):
    for chunk in numba.prange(chunks):
        forward_chunk(chunk, chunks, arguments, eps)


@_parallel_jit
def backward_chunks(chunks, arguments, eps):
    for chunk in numba.prange(chunks):
        backward_chunk(chunk, chunks, arguments, eps)


def run(is_forward: bool, chunks: int, arguments: int, eps: float) -> None:
    """Run the forward or backward loops over all chunks, on as many threads as PyTorch uses."""
    threads = torch.get_num_threads() if chunks > 1 else 1
    if threads == 1:
        for chunk in range(chunks):
            (forward_chunk if is_forward else backward_chunk)(chunk, chunks, arguments, eps)
    else:
        _start_threads()
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
        (forward_chunks if is_forward else backward_chunks)(chunks, arguments, eps)


@cache
def _start_threads() -> None:
    threads = torch.get_num_threads()
    numba.set_num_threads(1)  # the first call starts them, and tells OpenMP, which PyTorch shares, to use them all
    torch.set_num_threads(threads)


__all__ = ["run"]
