"""The loops of `cpu_kernels_attnres`, compiled by `numba` for the processor at hand: seconds at first, then cached.

All take the address of what [`cpu_kernels_attnres._run`] wrote: sizes, and the addresses of tensors. Statistics are in
float32; rows of bfloat16 are converted as they are read and written.
"""

from functools import cache

import torch

try:
    import numba
    import numpy as np
except ImportError as error:  # within `try`: for who loads this file as remote code, these packages are optional
    raise ImportError("the kernels for CPUs need `numba`") from error

from .cpu_rows_attnres import (
    derive,
    dot,
    dots_and_square,
    mix,
    mix_for_each,
    pointer,
    prefetch,
    scale,
)

# Of weights, before they are divided by their sum: smaller ones make denormal numbers of what they are multiplied by,
# for each of which processors take a hundred times as long.
_SMALLEST = np.float32(1e-36)
_FLOAT, _HALF = np.float32(0), np.uint16(0)  # numbers like those of a row: float32, and the bits of bfloat16

_jit = numba.njit(cache=True, nogil=True, error_model="numpy")
_parallel_jit = numba.njit(cache=True, nogil=True, parallel=True)


@_jit
def _vector(address, width, like):
    return numba.carray(pointer(address, like), (width,))


@_jit
def _arguments(address, others, each):
    """What [`cpu_kernels_attnres._run`] wrote there, with the addresses of `others`, and of `each` of the sources."""
    n = _vector(address, 5, np.int64(0))[2]
    numbers = _vector(address, 5 + others + each * n, np.int64(0))
    return numbers[0], numbers[1], n, numbers[3], numbers[4], numbers[5:]


@_jit
def _exponentials(logits, largest, weights):
    """Writes what is not divided by its sum yet, and returns that sum."""
    total = np.float32(0)
    for i in range(len(logits)):
        weights[i] = np.exp(logits[i] - largest)
        if weights[i] < _SMALLEST:
            weights[i] = 0
        total += weights[i]
    return total


@_jit
def _softmax(logits, multiplier, weights, mixing):
    """Weights, and what the sources are multiplied by: exactly one at equal logits, if it is the sum."""
    total = _exponentials(logits, logits.max(), weights)
    for i in range(len(logits)):
        mixing[i] = weights[i] * np.float32(multiplier) / total
        weights[i] = weights[i] / total


@_jit
def _merge(statistics, logits, multiplier, mixing):
    """[`_softmax`] over more sources, of which others are summed up in phase one; what that sum is multiplied by."""
    largest, exponentials = statistics[0], statistics[1]
    for i in range(len(logits)):
        largest = max(largest, logits[i])
    factor = np.exp(statistics[0] - largest)
    total = factor * exponentials + _exponentials(logits, largest, mixing)
    for i in range(len(logits)):
        mixing[i] = mixing[i] * np.float32(multiplier) / total
    return factor * np.float32(multiplier) / total


@_jit
def _logit(dot_product, square, width, eps):
    """A row's product with the query, and its sum of squares, as its logit; and one over its root mean square."""
    inverse_rms = np.float32(1) / np.sqrt(square / np.float32(width) + np.float32(eps))
    return dot_product * inverse_rms, inverse_rms


@_jit
def _enter(tokens, chunk, chunks, sources, size):
    """The tokens of a chunk; the rows of the first are on their way."""
    first, end = chunk * tokens // chunks, (chunk + 1) * tokens // chunks
    if first < end:
        for i in range(len(sources)):
            prefetch(sources[i] + first * size, size)
    return first, end


@_jit
def _normalise(row, eps, is_half, bits):
    """Divide a row by its root mean square, and return what that was multiplied by. Rounded where PyTorch's are."""
    if is_half:
        _round(row, bits)
    factor = np.float32(1) / np.sqrt(dot(row, row) / np.float32(len(row)) + np.float32(eps))
    scale(row, factor, row)
    if is_half:
        _round(row, bits)
    return factor


@_jit
def _round(row, bits):
    """Round a row to what bfloat16 holds."""
    scale(bits, np.float32(1), row)
    scale(row, np.float32(1), bits)


@_jit
def _derive_norm(grad, weight, normalised, factor, grad_weight):
    """Turn the gradient of `weight * normalised` into that of the row before it was normalised."""
    for d in range(len(grad)):
        grad_weight[d] += grad[d] * normalised[d]
        grad[d] *= weight[d]
    mean = dot(grad, normalised) / np.float32(len(grad))
    for d in range(len(grad)):
        grad[d] = factor * (grad[d] - mean * normalised[d])


@_jit
def forward_chunk(chunk, chunks, arguments, eps, norm_eps, like):
    tokens, width, n, multiplier, size, addresses = _arguments(arguments, 7, 1)
    sources, has_norm, has_phase = addresses[7:], addresses[4] != 0, addresses[5] != 0
    first, end = _enter(tokens, chunk, chunks, sources, size)
    query, all_weights = _vector(addresses[0], width, _FLOAT), _vector(addresses[2], n * tokens, _FLOAT)
    if addresses[3]:
        query = query * _vector(addresses[3], width, _FLOAT)
    logits, weights, mixing = np.empty((3, n), np.float32)
    rows, base, factor = np.empty(n, np.int64), np.zeros(width, np.float32), np.float32(0)
    own, norm, bits = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width, np.uint16)
    if has_norm:
        scale(norm, np.float32(1), _vector(addresses[4], width, like))
    for token in range(first, end):
        ahead = size if token + 1 < end else 0
        for i in range(n):
            rows[i] = sources[i] + token * size
            product, square = dots_and_square(_vector(rows[i], width, like), (query,), ahead)
            logits[i], _ = _logit(product, square, width, eps)
        if has_phase:
            factor = _merge(_vector(addresses[6] + token * 8, 2, _FLOAT), logits, multiplier, mixing)
            base = _vector(addresses[5] + token * width * 4, width, _FLOAT)
        else:
            _softmax(logits, multiplier, weights, mixing)
        if addresses[2]:
            for i in range(n):
                all_weights[i * tokens + token] = weights[i]
        result = _vector(addresses[1] + token * size, width, like)
        if has_norm:
            mix(like, own, factor, base, mixing, rows)
            _normalise(own, norm_eps, size == 2, bits)
            for d in range(width):
                own[d] *= norm[d]
            scale(result, np.float32(1), own)
        else:
            mix(like, result, factor, base, mixing, rows)


@_jit
def phase_one_chunk(chunk, chunks, arguments, eps, norm_eps, like):
    tokens, width, n, queries, size, addresses = _arguments(arguments, 3, 1)
    sources, fours = addresses[3:], queries - queries % 4
    first, end = _enter(tokens, chunk, chunks, sources, size)
    logits, mixing = np.empty((queries, n), np.float32), np.empty(queries * n, np.float32)
    rows, zeros = np.empty(n, np.int64), np.zeros(width, np.float32)
    for token in range(first, end):
        ahead = size if token + 1 < end else 0
        for i in range(n):
            rows[i] = sources[i] + token * size
            row = _vector(rows[i], width, like)
            for q in range(0, fours, 4):
                found = dots_and_square(row, _four(addresses[0] + q * width * 4, width, width), ahead)
                for k in range(4):
                    logits[q + k, i], _ = _logit(found[k], found[4], width, eps)
            for q in range(fours, queries):
                product, square = dots_and_square(row, (_vector(addresses[0] + q * width * 4, width, _FLOAT),), ahead)
                logits[q, i], _ = _logit(product, square, width, eps)
        for q in range(queries):
            statistics = _vector(addresses[2] + (q * tokens + token) * 8, 2, _FLOAT)
            statistics[0] = logits[q].max()
            statistics[1] = _exponentials(logits[q], statistics[0], mixing[q * n : (q + 1) * n])
        for q in range(0, fours, 4):
            results = _four(addresses[1] + (q * tokens + token) * width * 4, width, tokens * width)
            mix_for_each(like, results, mixing[q * n : (q + 4) * n], rows)
        for q in range(fours, queries):
            result = _vector(addresses[1] + (q * tokens + token) * width * 4, width, _FLOAT)
            mix(like, result, np.float32(0), zeros, mixing[q * n : (q + 1) * n], rows)


@_jit
def _four(address, width, apart):
    """Four rows of float32, so many numbers apart."""
    return (
        _vector(address, width, _FLOAT),
        _vector(address + 4 * apart, width, _FLOAT),
        _vector(address + 8 * apart, width, _FLOAT),
        _vector(address + 12 * apart, width, _FLOAT),
    )


@_jit
def backward_chunk(chunk, chunks, arguments, eps, norm_eps, like):
    tokens, width, n, multiplier, size, addresses = _arguments(arguments, 6, 3)
    sources, grad_sources, later_grads = addresses[6 : 6 + n], addresses[6 + n : 6 + 2 * n], addresses[6 + 2 * n :]
    has_norm = addresses[4] != 0
    first, end = _enter(tokens, chunk, chunks, sources, size)
    query, grad_query = (_vector(addresses[0], width, _FLOAT), _vector(addresses[3] + chunk * width * 4, width, _FLOAT))
    logits, inverse_rms, weights, mixing, similarity, weight_grads = np.zeros((6, n), np.float32)
    coefficients, (rows, targets, others) = np.empty(3 * n, np.float32), np.empty((3, n), np.int64)
    own, grad, zeros = np.empty(width, np.float32), np.empty(width, np.float32), np.zeros(width, np.float32)
    nowhere, bits = np.empty(width, np.float32), np.empty(width, np.uint16)
    norm, grad_norm = own, own
    if has_norm:
        norm, grad_norm = np.empty(width, np.float32), _vector(addresses[5] + chunk * width * 4, width, _FLOAT)
        scale(norm, np.float32(1), _vector(addresses[4], width, like))
    for token in range(first, end):
        ahead = size if token + 1 < end else 0
        scale(grad, np.float32(1), _vector(addresses[1] + token * size, width, like))
        for i in range(n):
            rows[i] = sources[i] + token * size
            targets[i] = grad_sources[i] + token * size if grad_sources[i] else nowhere.ctypes.data
            others[i] = later_grads[i] + token * size if later_grads[i] else zeros.ctypes.data
            product, similarity[i], square = dots_and_square(_vector(rows[i], width, like), (query, grad), ahead)
            logits[i], inverse_rms[i] = _logit(product, square, width, eps)
            if addresses[2]:
                weight_grads[i] = _vector(addresses[2] + (i * tokens + token) * 4, 1, _FLOAT)[0]
        _softmax(logits, multiplier, weights, mixing)
        if has_norm:
            mix(like, own, np.float32(0), zeros, mixing, rows)
            factor = _normalise(own, norm_eps, size == 2, bits)
            _derive_norm(grad, norm, own, factor, grad_norm)
            for i in range(n):
                similarity[i] = dot(_vector(rows[i], width, like), grad)
        mean_similarity, mean_weight_grad = dot(weights, similarity), dot(weights, weight_grads)
        for i in range(n):
            grad_logit = mixing[i] * (similarity[i] - mean_similarity)
            grad_logit += weights[i] * (weight_grads[i] - mean_weight_grad)
            coefficients[3 * i] = mixing[i]
            coefficients[3 * i + 1] = grad_logit * inverse_rms[i]
            coefficients[3 * i + 2] = -grad_logit * logits[i] * inverse_rms[i] * inverse_rms[i] / np.float32(width)
        derive(like, targets, others, rows, coefficients, grad, query, grad_query)


@_parallel_jit
def forward_chunks(chunks, arguments, eps, norm_eps, like):
    for chunk in numba.prange(chunks):
        forward_chunk(chunk, chunks, arguments, eps, norm_eps, like)


@_parallel_jit
def backward_chunks(chunks, arguments, eps, norm_eps, like):
    for chunk in numba.prange(chunks):
        backward_chunk(chunk, chunks, arguments, eps, norm_eps, like)


@_parallel_jit
def phase_one_chunks(chunks, arguments, eps, norm_eps, like):
    for chunk in numba.prange(chunks):
        phase_one_chunk(chunk, chunks, arguments, eps, norm_eps, like)


_LOOPS = {
    "forward": (forward_chunk, forward_chunks),
    "backward": (backward_chunk, backward_chunks),
    "phase one": (phase_one_chunk, phase_one_chunks),
}


def run(name: str, chunks: int, arguments: int, eps: float, norm_eps: float, is_half: bool) -> None:
    """Run the loops of that name over all chunks, on as many threads as PyTorch uses."""
    of_chunk, of_chunks = _LOOPS[name]
    like = _HALF if is_half else _FLOAT
    threads = torch.get_num_threads() if chunks > 1 else 1
    if threads == 1:
        for chunk in range(chunks):
            of_chunk(chunk, chunks, arguments, eps, norm_eps, like)
    else:
        _start_threads()
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
        of_chunks(chunks, arguments, eps, norm_eps, like)


@cache
def _start_threads() -> None:
    threads = torch.get_num_threads()
    numba.set_num_threads(1)  # the first call starts them, and tells OpenMP, which PyTorch shares, to use them all
    torch.set_num_threads(threads)


__all__ = ["run"]
