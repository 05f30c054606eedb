"""The loops over tokens. `numba` compiles them for the processor at hand, in seconds; later processes load them.

    l_i = r_i (query . s_i),  r_i = 1 / sqrt(mean(s_i^2) + eps),   a = softmax(l),   h = sum_i a_i s_i

SiTU, the activation of Kimi K3, and its packed weights have loops beside those of depth attention.

Each loop takes the address of the arguments that `call` has written (see `layout`), and computes one chunk of tokens.
Statistics are in float32. Rows of bfloat16 are converted when they are read and written. `docs/guides/numba.md`
explains how to change and debug the loops.
"""

from collections.abc import Callable
from itertools import chain

import numba
import numpy as np

from .cache import MachineCode
from .elementwise import as_like, situ, situ_grads
from .fp4 import fp4_decode, fp4_dot
from .layout import MAGIC, Backward, Call, Forward, PackedProduct, PhaseOne, SiTU, SiTUGrads, Unpacked
from .rows import (
    derive,
    dot,
    dot_ahead,
    dots_and_square,
    mix,
    mix_for_each,
    pointer,
    prefetch,
    scale,
)

# Smaller weights, before they are divided by their sum, are set to zero. Their products would be denormal numbers, for
# which processors take a hundred times as long.
_SMALLEST = np.float32(1e-36)
# Bytes that sources are prefetched ahead of a token: computing these takes about as long as memory takes to answer.
_AHEAD = 1024
# The argument `like` of a loop is one of these. numba infers the type of a row's numbers from it: float32, or the bits
# of bfloat16.
_FLOAT, _HALF = np.float32(0), np.uint16(0)

# Named tuples of indices: `_CALL.width` is the place of `width` in the array of arguments.
_CALL, _FORWARD = Call(*range(len(Call._fields))), Forward(*range(len(Forward._fields)))
_PHASE_ONE, _BACKWARD = PhaseOne(*range(len(PhaseOne._fields))), Backward(*range(len(Backward._fields)))
_PACKED_PRODUCT, _UNPACKED = PackedProduct(*range(len(PackedProduct._fields))), Unpacked(*range(len(Unpacked._fields)))
_SITU, _SITU_GRADS = SiTU(*range(len(SiTU._fields))), SiTUGrads(*range(len(SiTUGrads._fields)))

_jit = numba.njit(nogil=True, error_model="numpy")
_parallel_jit = numba.njit(nogil=True, parallel=True)


@_jit
def _vector(address, width, like):
    """Return the `width` numbers at an address as an array."""
    return numba.carray(pointer(address, like), (width,))


@_jit
def _arguments(address, others, each):
    """Return the numbers of a call and its addresses, which must be `others` and `each` more for every source."""
    call = _vector(address, len(_CALL), np.int64(0))
    if call[_CALL.magic] != MAGIC:
        raise ValueError("the arguments of a loop must be laid out as it was compiled for, got another version")
    n, addresses = call[_CALL.sources], call[_CALL.addresses]
    if addresses != others + each * n:
        raise ValueError("the number of addresses must be that of the loop's tensors, got another number of addresses")
    numbers = _vector(address + 8 * len(_CALL), addresses, np.int64(0))
    return call[_CALL.tokens], call[_CALL.width], n, call[_CALL.number], call[_CALL.item], numbers


@_jit
def _largest(logits, largest):
    """Return the largest of the logits and of one number beside them."""
    for i in range(len(logits)):
        largest = max(largest, logits[i])
    return largest


@_jit
def _exponentials(logits, largest, weights):
    """Write the weights that are not yet divided by their sum, and return the sum."""
    total = np.float32(0)
    for i in range(len(logits)):
        weights[i] = np.exp(logits[i] - largest)
        if weights[i] < _SMALLEST:
            weights[i] = 0
        total += weights[i]
    return total


@_jit
def _softmax(logits, multiplier, weights, mixing):
    """Write the weights, and the factors of the sources, which at equal logits are exactly one for the scale `sum`."""
    total = _exponentials(logits, _largest(logits, logits[0]), weights)
    for i in range(len(logits)):
        mixing[i] = weights[i] * np.float32(multiplier) / total
        weights[i] = weights[i] / total


@_jit
def _merge(statistics, logits, multiplier, mixing):
    """Continue a softmax that phase one has begun with other sources.

    Writes the factors of the newer sources to `mixing`, and returns the factor of phase one's sum.
    """
    largest, exponentials = _largest(logits, statistics[0]), statistics[1]
    factor = np.exp(statistics[0] - largest)
    total = factor * exponentials + _exponentials(logits, largest, mixing)
    for i in range(len(logits)):
        mixing[i] = mixing[i] * np.float32(multiplier) / total
    return factor * np.float32(multiplier) / total


@_jit
def _logit(dot_product, square, width, eps):
    """Return the logit of a row, from its product with the query and its sum of squares, and `1 / rms`."""
    inverse_rms = np.float32(1) / np.sqrt(square / np.float32(width) + np.float32(eps))
    return dot_product * inverse_rms, inverse_rms


@_jit
def _enter(tokens, chunk, chunks, sources, size):
    """Return the first token of a chunk, its end, and how many rows ahead to prefetch. Prefetch the first rows."""
    first, end = chunk * tokens // chunks, (chunk + 1) * tokens // chunks
    rows = min(max(1, _AHEAD // max(1, size)), end - first)
    for i in range(len(sources)):
        prefetch(sources[i] + first * size, rows * size)
    return first, end, rows


@_jit
def _ahead(token, end, rows, size):
    """Return how many bytes ahead to prefetch at a token; 0 near the end of a chunk."""
    return rows * size if token + rows < end else 0


@_jit
def _normalise(row, eps, is_half, bits):
    """Divide a row in float32 by its root mean square, and round it where the module of a norm rounds.

    Returns the factor, `1 / rms`.
    """
    if is_half:
        _round(row, bits)
    factor = np.float32(1) / np.sqrt(dot(row, row) / np.float32(len(row)) + np.float32(eps))
    _multiply(row, factor, is_half, bits)
    return factor


@_jit
def _multiply(row, factor, is_half, bits):
    """Multiply a row in float32, and round the product if the rows are of bfloat16."""
    scale(row, factor, row)
    if is_half:
        _round(row, bits)


@_jit
def _round(row, bits):
    """Round a row in float32 to numbers of bfloat16; `bits` is scratch."""
    scale(bits, np.float32(1), row)
    scale(row, np.float32(1), bits)


@_jit
def forward_chunk(chunk, chunks, arguments, eps, norm_eps, like):
    """Compute depth attention for one chunk, continued from phase one and normed if these are given.

    For the backward pass it keeps of each token the logits, `1 / rms` and factors of the sources, and `1 / rms` of the
    result if it is normed.
    """
    tokens, width, n, multiplier, item, addresses = _arguments(arguments, len(_FORWARD), 1)
    sources, size = addresses[len(_FORWARD) :], width * item
    has_norm, has_phase = addresses[_FORWARD.norm_weight] != 0, addresses[_FORWARD.sums] != 0
    has_weights, has_kept = addresses[_FORWARD.weights] != 0, addresses[_FORWARD.kept] != 0
    first, end, rows_ahead = _enter(tokens, chunk, chunks, sources, size)
    query = _vector(addresses[_FORWARD.query], width, _FLOAT)
    all_weights = _vector(addresses[_FORWARD.weights], n * tokens, _FLOAT)
    logits, inverse_rms, weights, mixing = np.empty((4, n), np.float32)
    rows, base, factor = np.empty(n, np.int64), np.zeros(width, np.float32), np.float32(0)
    wide, norm, bits = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width, np.uint16)
    if has_norm:
        scale(norm, np.float32(1), _vector(addresses[_FORWARD.norm_weight], width, like))
    for token in range(first, end):
        ahead = _ahead(token, end, rows_ahead, size)
        for i in range(n):
            rows[i] = sources[i] + token * size
            product, square = dots_and_square(_vector(rows[i], width, like), (query,), ahead)
            logits[i], inverse_rms[i] = _logit(product, square, width, eps)
        if has_phase:
            statistics = _vector(addresses[_FORWARD.statistics] + token * 8, 2, _FLOAT)
            factor = _merge(statistics, logits, multiplier, mixing)
            base = _vector(addresses[_FORWARD.sums] + token * width * 4, width, _FLOAT)
        else:
            _softmax(logits, multiplier, weights, mixing)
        if has_weights:
            for i in range(n):
                all_weights[i * tokens + token] = weights[i]
        inverse = np.float32(0)
        result = _vector(addresses[_FORWARD.result] + token * size, width, like)
        if has_norm:
            mix(like, wide, factor, base, mixing, rows)
            inverse = _normalise(wide, norm_eps, item == 2, bits)
            for d in range(width):
                wide[d] *= norm[d]
            scale(result, np.float32(1), wide)
        else:
            mix(like, result, factor, base, mixing, rows)
        if has_kept:
            kept = _vector(addresses[_FORWARD.kept] + token * (3 * n + 1) * 4, 3 * n + 1, _FLOAT)
            for i in range(n):
                kept[i], kept[n + i], kept[2 * n + i] = logits[i], inverse_rms[i], mixing[i]
            kept[3 * n] = inverse


@_jit
def phase_one_chunk(chunk, chunks, arguments, eps, norm_eps, like):
    """Compute phase one for one chunk. Four queries share each reading of a source, and the rest read it singly."""
    tokens, width, n, queries, item, addresses = _arguments(arguments, len(_PHASE_ONE), 1)
    sources, size, fours = addresses[len(_PHASE_ONE) :], width * item, queries - queries % 4
    all_queries, all_sums = addresses[_PHASE_ONE.queries], addresses[_PHASE_ONE.sums]
    first, end, rows_ahead = _enter(tokens, chunk, chunks, sources, size)
    logits, mixing = np.empty((queries, n), np.float32), np.empty(queries * n, np.float32)
    rows, zeros = np.empty(n, np.int64), np.zeros(width, np.float32)
    for token in range(first, end):
        ahead = _ahead(token, end, rows_ahead, size)
        for i in range(n):
            rows[i] = sources[i] + token * size
            row = _vector(rows[i], width, like)
            for q in range(0, fours, 4):
                products = dots_and_square(row, _four(all_queries + q * width * 4, width, width), ahead)
                for k in range(4):
                    logits[q + k, i], _ = _logit(products[k], products[4], width, eps)
            for q in range(fours, queries):
                product, square = dots_and_square(row, (_vector(all_queries + q * width * 4, width, _FLOAT),), ahead)
                logits[q, i], _ = _logit(product, square, width, eps)
        for q in range(queries):
            statistics = _vector(addresses[_PHASE_ONE.statistics] + (q * tokens + token) * 8, 2, _FLOAT)
            statistics[0] = _largest(logits[q], logits[q, 0])
            statistics[1] = _exponentials(logits[q], statistics[0], mixing[q * n : (q + 1) * n])
        for q in range(0, fours, 4):
            results = _four(all_sums + (q * tokens + token) * width * 4, width, tokens * width)
            mix_for_each(like, results, mixing[q * n : (q + 4) * n], rows)
        for q in range(fours, queries):
            result = _vector(all_sums + (q * tokens + token) * width * 4, width, _FLOAT)
            mix(like, result, np.float32(0), zeros, mixing[q * n : (q + 1) * n], rows)


@_jit
def _four(address, width, apart):
    """Return four rows of float32 that begin `apart` numbers from each other."""
    return (
        _vector(address, width, _FLOAT),
        _vector(address + 4 * apart, width, _FLOAT),
        _vector(address + 8 * apart, width, _FLOAT),
        _vector(address + 12 * apart, width, _FLOAT),
    )


@_jit
def backward_chunk(chunk, chunks, arguments, eps, norm_eps, like):
    """Compute the gradients of one chunk, from the numbers that the forward pass has kept of each token.

    With c_i = grad . s_i, the gradient of a logit is m_i (c_i - sum_j a_j c_j), where m_i are the factors of the
    sources. The gradient of a source has a part along `grad`, one along the query and one along the source itself.
    """
    tokens, width, n, multiplier, item, addresses = _arguments(arguments, len(_BACKWARD), 3)
    size, per_source = width * item, addresses[len(_BACKWARD) :]
    sources, grad_sources, later_grads = per_source[:n], per_source[n : 2 * n], per_source[2 * n :]
    all_weight_grads, has_norm = addresses[_BACKWARD.grad_weights], addresses[_BACKWARD.norm_weight] != 0
    first, end, rows_ahead = _enter(tokens, chunk, chunks, sources, size)
    query = _vector(addresses[_BACKWARD.query], width, _FLOAT)
    grad_query = _vector(addresses[_BACKWARD.grad_query] + chunk * width * 4, width, _FLOAT)
    grad_norm = _vector(addresses[_BACKWARD.grad_norm] + chunk * width * 4, width, _FLOAT)
    weights, similarity, weight_grads = np.zeros((3, n), np.float32)
    coefficients, (rows, targets, others) = np.empty(3 * n, np.float32), np.empty((3, n), np.int64)
    grad, zeros, nowhere = np.empty(width, np.float32), np.zeros(width, np.float32), np.empty(width, np.float32)
    norm, normed, bits = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width, np.uint16)
    if has_norm:
        scale(norm, np.float32(1), _vector(addresses[_BACKWARD.norm_weight], width, like))
    for token in range(first, end):
        ahead = _ahead(token, end, rows_ahead, size)
        kept = _vector(addresses[_BACKWARD.kept] + token * (3 * n + 1) * 4, 3 * n + 1, _FLOAT)
        logits, inverse_rms, mixing = kept[:n], kept[n : 2 * n], kept[2 * n : 3 * n]
        scale(grad, np.float32(1), _vector(addresses[_BACKWARD.grad] + token * size, width, like))
        for i in range(n):
            rows[i] = sources[i] + token * size
            # Gradients that are not needed go to `nowhere`. Missing later gradients come from `zeros`.
            targets[i] = grad_sources[i] + token * size if grad_sources[i] else nowhere.ctypes.data
            others[i] = later_grads[i] + token * size if later_grads[i] else zeros.ctypes.data
            weights[i] = mixing[i] / np.float32(multiplier)
        if has_norm:
            mix(like, normed, np.float32(0), zeros, mixing, rows)  # the result again, which was not kept
            if item == 2:
                _round(normed, bits)
            _multiply(normed, kept[3 * n], item == 2, bits)
            _pass_norm(grad, normed, norm, kept[3 * n], grad_norm)
        for i in range(n):
            similarity[i] = dot_ahead(_vector(rows[i], width, like), grad, ahead)
            if all_weight_grads:
                weight_grads[i] = _vector(all_weight_grads + (i * tokens + token) * 4, 1, _FLOAT)[0]
        mean_similarity, mean_weight_grad = np.float32(0), np.float32(0)
        for i in range(n):
            mean_similarity += weights[i] * similarity[i]
            mean_weight_grad += weights[i] * weight_grads[i]
        for i in range(n):
            grad_logit = mixing[i] * (similarity[i] - mean_similarity)
            grad_logit += weights[i] * (weight_grads[i] - mean_weight_grad)
            coefficients[3 * i] = mixing[i]
            coefficients[3 * i + 1] = grad_logit * inverse_rms[i]
            coefficients[3 * i + 2] = -grad_logit * logits[i] * inverse_rms[i] * inverse_rms[i] / np.float32(width)
        derive(like, targets, others, rows, coefficients, grad, query, grad_query)


@_jit
def _pass_norm(grad, normed, weight, inverse_rms, grad_weight):
    """Turn the gradient of `weight * normed` into that of the row before the norm, and add to the weight's gradient.

    d = (weight * grad - normed mean(weight * grad * normed)) / rms
    """
    for d in range(len(grad)):
        grad_weight[d] += grad[d] * normed[d]
        grad[d] *= weight[d]
    mean = dot(grad, normed) / np.float32(len(grad))
    for d in range(len(grad)):
        grad[d] = (grad[d] - normed[d] * mean) * inverse_rms


@_jit
def situ_chunk(chunk, chunks, arguments, beta, linear_beta, like):
    """Compute SiTU for one chunk."""
    tokens, width, _, _, item, places = _arguments(arguments, len(_SITU), 0)
    for token in range(chunk * tokens // chunks, (chunk + 1) * tokens // chunks):
        gate = _vector(places[_SITU.gate] + token * places[_SITU.gate_step] * item, width, like)
        up = _vector(places[_SITU.up] + token * places[_SITU.up_step] * item, width, like)
        situ(gate, up, _vector(places[_SITU.result] + token * width * item, width, like), beta, linear_beta, like)


@_jit
def situ_grads_chunk(chunk, chunks, arguments, beta, linear_beta, like):
    """Compute the gradients of SiTU for one chunk."""
    tokens, width, _, _, item, places = _arguments(arguments, len(_SITU_GRADS), 0)
    for token in range(chunk * tokens // chunks, (chunk + 1) * tokens // chunks):
        gate = _vector(places[_SITU_GRADS.gate] + token * places[_SITU_GRADS.gate_step] * item, width, like)
        up = _vector(places[_SITU_GRADS.up] + token * places[_SITU_GRADS.up_step] * item, width, like)
        row = token * width * item
        grad = _vector(places[_SITU_GRADS.grad] + row, width, like)
        grad_gate = _vector(places[_SITU_GRADS.grad_gate] + row, width, like)
        grad_up = _vector(places[_SITU_GRADS.grad_up] + row, width, like)
        situ_grads(gate, up, grad, grad_gate, grad_up, beta, linear_beta, like)


@_jit
def packed_product_chunk(chunk, chunks, arguments, _first, _second, like):
    """Compute the products of one chunk of a packed weight's rows with each of a few vectors.

    Here the tokens of a call are the rows of the weight.
    """
    rows, columns, _, vectors, item, places = _arguments(arguments, len(_PACKED_PRODUCT), 0)
    groups = columns // 32
    for row in range(chunk * rows // chunks, (chunk + 1) * rows // chunks):
        codes = places[_PACKED_PRODUCT.codes] + row * groups * 16
        scales = places[_PACKED_PRODUCT.scales] + row * groups
        for i in range(vectors):
            product = fp4_dot(codes, scales, places[_PACKED_PRODUCT.vectors] + i * columns * 4, groups)
            result = _vector(places[_PACKED_PRODUCT.result] + (i * rows + row) * item, 1, like)
            result[0] = as_like(product, like)


@_jit
def unpack_chunk(chunk, chunks, arguments, _first, _second, like):
    """Write the values of one chunk of a packed weight's rows, which are the tokens of the call."""
    rows, columns, _, _, item, places = _arguments(arguments, len(_UNPACKED), 0)
    groups = columns // 32
    for row in range(chunk * rows // chunks, (chunk + 1) * rows // chunks):
        codes = places[_UNPACKED.codes] + row * groups * 16
        result = places[_UNPACKED.result] + row * columns * item
        fp4_decode(codes, places[_UNPACKED.scales] + row * groups, result, groups, like)


def _over_chunks(name: str, jit: Callable, over_chunk: Callable, others: int, each: int) -> Callable:
    """Return a compiled loop over all chunks. To call `over_chunk` from Python would take longer than a chunk.

    Args:
        name: name of the loop, which machine code carries too, so each needs its own.
        jit: compiles the loop for one thread or for several.
        over_chunk: the compiled loop over one chunk.
        others: number of its addresses beside those of the sources.
        each: number of addresses for every source.
    """

    def run(chunks, arguments, first, second, like):
        _arguments(arguments, others, each)  # checks them here, because a thread must not raise
        for chunk in numba.prange(chunks):
            over_chunk(chunk, chunks, arguments, first, second, like)

    run.__name__ = run.__qualname__ = name
    return jit(run)


# Name -> the loop over one chunk, and the numbers of its addresses; see `_over_chunks`.
_OVER_CHUNK = {
    "forward": (forward_chunk, len(_FORWARD), 1),
    "backward": (backward_chunk, len(_BACKWARD), 3),
    "phase one": (phase_one_chunk, len(_PHASE_ONE), 1),
    "situ": (situ_chunk, len(_SITU), 0),
    "situ grads": (situ_grads_chunk, len(_SITU_GRADS), 0),
    "packed product": (packed_product_chunk, len(_PACKED_PRODUCT), 0),
    "unpack": (unpack_chunk, len(_UNPACKED), 0),
}
_KINDS = {"on one thread": _jit, "on several": _parallel_jit}
# Name -> the loops over all chunks on one thread, and on several.
LOOPS = {
    name: tuple(_over_chunks(f"{name} {kind}".replace(" ", "_"), jit, *loop) for kind, jit in _KINDS.items())
    for name, loop in _OVER_CHUNK.items()
}
LIKE = {4: _FLOAT, 2: _HALF}  # bytes of a number -> the argument `like`

# The loops of both kinds call the loops over a chunk, which are compiled once.
DISPATCHERS = (*(loop for loop, *_ in _OVER_CHUNK.values()), *chain.from_iterable(LOOPS.values()))
for _dispatcher in DISPATCHERS:
    # `numba` has no public way to set a function's cache.
    # pyrefly: ignore[missing-attribute]  # `njit` makes a dispatcher of a function
    _dispatcher._cache = MachineCode(_dispatcher.__name__)

__all__ = ["DISPATCHERS", "LIKE", "LOOPS"]
