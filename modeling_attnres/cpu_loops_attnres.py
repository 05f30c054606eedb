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
    from numba.core import cgutils, types
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


_LANES, _UNROLLED = 16, 4  # numbers in a vector, and vectors that are added up beside each other


# Not left to the compiler: where it may choose the order of a sum, it does not make the same of a function for one
# thread and for many, or as it compiles and as it loads what it compiled before. A resumed run has to follow exactly.
@intrinsic
def _dot(typing_context, row, other):
    """The sum of products of two rows of float32, in an order that depends on nothing but their length."""

    def generate(context, builder, signature, values):
        return _sums(context, builder, signature, values, ((0, 1),))[0]

    return types.float32(row, other), generate


@intrinsic
def _dot_and_square(typing_context, row, other):
    """[`_dot`] of a row and another, and of the row and itself."""

    def generate(context, builder, signature, values):
        sums = _sums(context, builder, signature, values, ((0, 1), (0, 0)))
        return context.make_tuple(builder, signature.return_type, sums)

    return types.UniTuple(types.float32, 2)(row, other), generate


def _sums(context, builder, signature, values, products):
    """Instructions for the sum over all places of each of the `products`, of a number of one row and one of another."""
    number, index = ir.FloatType(), ir.IntType(64)
    vector = ir.VectorType(number, _LANES)
    rows = [context.make_array(kind)(context, builder, value) for kind, value in zip(signature.args, values)]
    length = builder.extract_value(rows[0].shape, 0)
    step = index(_LANES * _UNROLLED)
    whole = builder.mul(builder.udiv(length, step), step)

    def add_up(totals, start, kind):
        found = []
        for row in rows:
            address = builder.bitcast(builder.gep(row.data, [start]), kind.as_pointer())
            found.append(builder.load(address, align=4))
        for total, (i, j) in zip(totals, products):
            builder.store(builder.fadd(builder.load(total), builder.fmul(found[i], found[j])), total)

    zero = ir.Constant(vector, [0.0] * _LANES)
    vectors = [[cgutils.alloca_once_value(builder, zero) for _ in products] for _ in range(_UNROLLED)]
    with cgutils.for_range_slice(builder, index(0), whole, step, intp=index) as (start, _):
        for i, totals in enumerate(vectors):
            add_up(totals, builder.add(start, index(i * _LANES)), vector)
    rest = [cgutils.alloca_once_value(builder, number(0.0)) for _ in products]
    with cgutils.for_range_slice(builder, whole, length, index(1), intp=index) as (start, _):
        add_up(rest, start, number)

    sums = []
    for i, total in enumerate(rest):
        parts = [builder.load(totals[i]) for totals in vectors]
        while len(parts) > 1:
            parts = [builder.fadd(*pair) for pair in zip(parts[::2], parts[1::2])]
        lanes = [builder.extract_element(parts[0], ir.IntType(32)(lane)) for lane in range(_LANES)]
        while len(lanes) > 1:
            lanes = [builder.fadd(*pair) for pair in zip(lanes[::2], lanes[1::2])]
        sums.append(builder.fadd(lanes[0], builder.load(total)))
    return sums


_jit = numba.njit(cache=True, nogil=True, error_model="numpy")
_parallel_jit = numba.njit(cache=True, nogil=True, parallel=True)


@_jit
def _vector(address, width):
    return numba.carray(_pointer(address, np.float32(0)), (width,))


@_jit
def _arguments(address, others, each):
    """What [`_run`] wrote there, with the addresses of `others`, and of `each` of the sources."""
    n = numba.carray(_pointer(address, np.int64(0)), (5,))[2]
    numbers = numba.carray(_pointer(address, np.int64(0)), (5 + others + each * n,))
    return numbers[0], numbers[1], n, numbers[3], numbers[4] != 0, numbers[5:]


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
def _set_scaled(result, factor, row):
    for d in range(len(row)):
        result[d] = factor * row[d]


@_jit
def _add_scaled(result, factor, row):
    for d in range(len(row)):
        result[d] += factor * row[d]


@_jit
def _set_product(result, row, other):
    for d in range(len(row)):
        result[d] = row[d] * other[d]


@_jit
def _round_scaled(row, factor):
    """Multiply a row, and round it to what bfloat16 holds."""
    for d in range(len(row)):
        row[d] = _widen(_narrow(factor * row[d]))


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
def _read_all(sources, token, eps, is_half, query, rows, logits, inverse_rms):
    """The logits of a token's sources; rows of bfloat16 stay behind in `rows`, and others in the cache."""
    for i in range(len(sources)):
        dot, square = _dot_and_square(_read(sources[i], token, is_half, rows[i]), query)
        inverse_rms[i] = np.float32(1) / np.sqrt(square / np.float32(len(query)) + np.float32(eps))
        logits[i] = dot * inverse_rms[i]


@_jit
def _mix(result, mixing, sources, token, is_half, rows):
    """The result of a token, from rows that were read before."""
    _set_scaled(result, mixing[0], _row(sources, 0, token, is_half, rows))
    _add_all(result, 1, mixing, sources, token, is_half, rows)


@_jit
def _add_all(result, first, mixing, sources, token, is_half, rows):
    for i in range(first, len(sources)):
        _add_scaled(result, mixing[i], _row(sources, i, token, is_half, rows))


@_jit
def _normalise(row, eps, is_half):
    """Divide a row by its root mean square, and return what that was multiplied by. Rounded where PyTorch's are."""
    if is_half:
        _round_scaled(row, np.float32(1))
    factor = np.float32(1) / np.sqrt(_dot(row, row) / np.float32(len(row)) + np.float32(eps))
    if is_half:
        _round_scaled(row, factor)
    else:
        _set_scaled(row, factor, row)
    return factor


@_jit
def _derive_norm(grad, weight, normalised, factor, grad_weight):
    """Turn the gradient of `weight * normalised` into that of the row before it was normalised."""
    for d in range(len(grad)):
        grad_weight[d] += grad[d] * normalised[d]
        grad[d] *= weight[d]
    mean = _dot(grad, normalised) / np.float32(len(grad))
    for d in range(len(grad)):
        grad[d] = factor * (grad[d] - mean * normalised[d])


@_jit
def forward_chunk(chunk, chunks, arguments, eps, norm_eps):
    tokens, width, n, multiplier, is_half, addresses = _arguments(arguments, 7, 1)
    query, all_weights = _vector(addresses[0], width), _vector(addresses[2], n * tokens if addresses[2] else 0)
    if addresses[3]:
        query = query * _vector(addresses[3], width)
    sources, has_norm, has_phase = addresses[7:], addresses[4] != 0, addresses[5] != 0
    logits, inverse_rms, weights, mixing = np.empty((4, n), np.float32)
    rows, own, norm = np.empty((n, width), np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
    if has_norm:
        norm = _read(addresses[4], 0, is_half, norm)
    for token in range(chunk * tokens // chunks, (chunk + 1) * tokens // chunks):
        _read_all(sources, token, eps, is_half, query, rows, logits, inverse_rms)
        result = own if is_half else _vector(addresses[1] + token * width * 4, width)
        mixed = own if has_norm else result
        if has_phase:
            factor = _merge(_vector(addresses[6] + token * 8, 2), logits, multiplier, mixing)
            _set_scaled(mixed, factor, _vector(addresses[5] + token * width * 4, width))
            _add_all(mixed, 0, mixing, sources, token, is_half, rows)
        else:
            _softmax(logits, multiplier, weights, mixing)
            _mix(mixed, mixing, sources, token, is_half, rows)
        if len(all_weights):
            for i in range(n):
                all_weights[i * tokens + token] = weights[i]
        if has_norm:
            _normalise(own, norm_eps, is_half)
            _set_product(result, norm, own)
        if is_half:
            _write(result, addresses[1], token)


@_jit
def phase_one_chunk(chunk, chunks, arguments, eps, norm_eps):
    tokens, width, n, queries, is_half, addresses = _arguments(arguments, 3, 1)
    sources = addresses[3:]
    logits, mixing, rows = np.empty((queries, n), np.float32), np.empty(n, np.float32), np.empty((n, width), np.float32)
    for token in range(chunk * tokens // chunks, (chunk + 1) * tokens // chunks):
        for i in range(n):
            row = _read(sources[i], token, is_half, rows[i])
            inverse_rms = np.float32(1) / np.sqrt(_dot(row, row) / np.float32(width) + np.float32(eps))
            for q in range(queries):
                logits[q, i] = _dot(row, _vector(addresses[0] + q * width * 4, width)) * inverse_rms
        for q in range(queries):
            place = q * tokens + token
            statistics = _vector(addresses[2] + place * 8, 2)
            statistics[0] = logits[q].max()
            statistics[1] = _exponentials(logits[q], statistics[0], mixing)
            _mix(_vector(addresses[1] + place * width * 4, width), mixing, sources, token, is_half, rows)


@_jit
def backward_chunk(chunk, chunks, arguments, eps, norm_eps):
    tokens, width, n, multiplier, is_half, addresses = _arguments(arguments, 6, 2)
    query, grad_query = _vector(addresses[0], width), _vector(addresses[3] + chunk * width * 4, width)
    sources, grad_sources, has_norm = addresses[6 : 6 + n], addresses[6 + n :], addresses[4] != 0
    logits, inverse_rms, weights, mixing, similarity = np.empty((5, n), np.float32)
    weight_grads = np.zeros(n, np.float32)
    rows, own, own_grad = np.empty((n, width), np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
    norm, grad_norm = own, own
    if has_norm:
        norm = _read(addresses[4], 0, is_half, np.empty(width, np.float32))
        grad_norm = _vector(addresses[5] + chunk * width * 4, width)
    for token in range(chunk * tokens // chunks, (chunk + 1) * tokens // chunks):
        _read_all(sources, token, eps, is_half, query, rows, logits, inverse_rms)
        _softmax(logits, multiplier, weights, mixing)
        grad = _read(addresses[1], token, is_half, own_grad)
        if has_norm:
            _set_scaled(own_grad, np.float32(1), grad)
            _mix(own, mixing, sources, token, is_half, rows)
            factor = _normalise(own, norm_eps, is_half)
            _derive_norm(own_grad, norm, own, factor, grad_norm)
            grad = own_grad
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
def forward_chunks(chunks, arguments, eps, norm_eps):
    for chunk in numba.prange(chunks):
        forward_chunk(chunk, chunks, arguments, eps, norm_eps)


@_parallel_jit
def backward_chunks(chunks, arguments, eps, norm_eps):
    for chunk in numba.prange(chunks):
        backward_chunk(chunk, chunks, arguments, eps, norm_eps)


@_parallel_jit
def phase_one_chunks(chunks, arguments, eps, norm_eps):
    for chunk in numba.prange(chunks):
        phase_one_chunk(chunk, chunks, arguments, eps, norm_eps)


_LOOPS = {
    "forward": (forward_chunk, forward_chunks),
    "backward": (backward_chunk, backward_chunks),
    "phase one": (phase_one_chunk, phase_one_chunks),
}


def run(name: str, chunks: int, arguments: int, eps: float, norm_eps: float) -> None:
    """Run the loops of that name over all chunks, on as many threads as PyTorch uses."""
    of_chunk, of_chunks = _LOOPS[name]
    threads = torch.get_num_threads() if chunks > 1 else 1
    if threads == 1:
        for chunk in range(chunks):
            of_chunk(chunk, chunks, arguments, eps, norm_eps)
    else:
        _start_threads()
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
        of_chunks(chunks, arguments, eps, norm_eps)


@cache
def _start_threads() -> None:
    threads = torch.get_num_threads()
    numba.set_num_threads(1)  # the first call starts them, and tells OpenMP, which PyTorch shares, to use them all
    torch.set_num_threads(threads)


__all__ = ["run"]
