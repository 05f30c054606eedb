"""Depth attention by online softmax in Triton, one program for each tile of whole tokens.

    l_i = query . s_i / sqrt(mean(s_i^2) + eps),   a = softmax(l),   h = factor * sum_i a_i s_i

All arithmetic is in float32. The sources are separate tensors, given as a tuple of pointers. Only the first `count` are
sources; the tuple is padded to `N` by repeating one. A loop picks from a chunk of pointers. Unrolled over all sources,
it would need another kernel for each number of sources, minutes to compile, and more registers than there are. An
offset that depends on the number of tokens has 64 bits.
"""

import triton
import triton.language as tl


@triton.jit
def _pick(sources, i, FIRST: tl.constexpr, CHUNK: tl.constexpr, N: tl.constexpr):
    """Return pointer `i`, which must be from `FIRST` to `FIRST + CHUNK`; for another `i`, return any pointer."""
    pointer = sources[FIRST]
    for k in tl.static_range(1, CHUNK + 1):
        if FIRST + k < N:
            pointer = tl.where(i == FIRST + k, sources[FIRST + k], pointer)
    return pointer


@triton.jit
def _whole_tokens(tile, tokens, WIDTH: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return a tile's tokens, the mask of those that exist, the mask of its elements, and their offsets."""
    token = tl.cast(tile, tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, COLUMNS)
    is_token = token < tokens
    inside = is_token[:, None] & (column < WIDTH)[None, :]
    return token, is_token, inside, token[:, None] * WIDTH + column[None, :]


@triton.jit
def _query_row(query, key_norm, column, is_column, HAS_KEY_NORM: tl.constexpr):
    """Return the query `[1, columns]` in float32, times the key norm's weight where it is not part of the query yet."""
    row = tl.load(query + column, mask=is_column, other=0.0).to(tl.float32)
    if HAS_KEY_NORM:
        row *= tl.load(key_norm + column, mask=is_column, other=0.0).to(tl.float32)
    return row[None, :]


@triton.jit
def _load_next(
    sources, i, count, offset, is_token, column,
    FIRST: tl.constexpr, CHUNK: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Load the tile of source `i + 1`, so that it arrives while source `i` is reduced; zeros after the last source."""
    end = tl.where(i + 1 < count, WIDTH, 0)
    return tl.load(_pick(sources, i + 1, FIRST, CHUNK, N) + offset, mask=is_token & (column < end), other=0.0)


@triton.jit
def _join(maximum, normaliser, mixture, logit, source):
    """Add a source to the online softmax: maximum `[...]`, normaliser `[...]`, mixture `[..., columns]`."""
    highest = tl.maximum(maximum, logit)
    before, now = tl.exp(maximum - highest), tl.exp(logit - highest)
    mixture = mixture * before[:, None] + now[:, None] * source
    return highest, normaliser * before + now, mixture


@triton.jit
def _normalised(mixture, normaliser, factor):
    # At zero queries `factor / normaliser` is exactly one for the scale `sum`, so the result is the plain sum.
    return mixture * tl.div_rn(normaliser * 0.0 + factor, normaliser)[:, None]


@triton.jit
def forward_kernel(
    sources, query, key_norm, mixtures, maxima, normalisers, norm_weight, result, hidden, statistics,
    tokens, count, factor, eps, norm_eps,
    N: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, HAS_KEY_NORM: tl.constexpr, HAS_PHASE: tl.constexpr,
    HAS_NORM: tl.constexpr, KEEPS_STATISTICS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write `result` `[tokens, WIDTH]`, continued from an entry of phase one with `HAS_PHASE`, normed with `HAS_NORM`.

    For training it also writes to `statistics` `[3, count, tokens]` the weights, the logits and 1 / RMS of the sources.
    With `HAS_NORM` it then writes the norm's input to `hidden` `[tokens, WIDTH]`.
    """
    stride = tl.cast(tokens, tl.int64)  # between the statistics of two sources
    if KEEPS_STATISTICS:
        weights, logits, inverse_rms = statistics, statistics + count * stride, statistics + 2 * count * stride
    token, is_token, inside, offset = _whole_tokens(tl.program_id(0), tokens, WIDTH, TOKENS, COLUMNS)
    column = tl.arange(0, COLUMNS)
    is_column = column < WIDTH
    query_row = _query_row(query, key_norm, column, is_column, HAS_KEY_NORM)
    if HAS_PHASE:
        maximum = tl.load(maxima + token, mask=is_token, other=0.0)
        normaliser = tl.load(normalisers + token, mask=is_token, other=1.0)
        mixture = tl.load(mixtures + offset, mask=inside, other=0.0)
    else:
        maximum = tl.full([TOKENS], float("-inf"), tl.float32)
        normaliser = tl.zeros([TOKENS], tl.float32)
        mixture = tl.zeros([TOKENS, COLUMNS], tl.float32)
    coming = tl.load(sources[0] + offset, mask=inside, other=0.0)
    for first in tl.static_range(0, N, CHUNK):
        for i in range(first, tl.minimum(first + CHUNK, count)):
            source = coming.to(tl.float32)
            coming = _load_next(sources, i, count, offset, is_token[:, None], column[None, :], first, CHUNK, N, WIDTH)
            rms = tl.rsqrt(tl.sum(source * source, 1) / WIDTH + eps)
            logit = tl.sum(source * query_row, 1) * rms
            if KEEPS_STATISTICS:
                tl.store(inverse_rms + i * stride + token, rms, mask=is_token)
                tl.store(logits + i * stride + token, logit, mask=is_token)
            maximum, normaliser, mixture = _join(maximum, normaliser, mixture, logit, source)
    mixture = _normalised(mixture, normaliser, factor)
    if HAS_NORM:
        # The norm's module gets a rounded input, and rounds once more before it multiplies by its weight.
        mixture = mixture.to(result.dtype.element_ty)
        if KEEPS_STATISTICS:
            tl.store(hidden + offset, mixture, mask=inside)
        mixture = mixture.to(tl.float32)
        mixture *= tl.rsqrt(tl.sum(mixture * mixture, 1) / WIDTH + norm_eps)[:, None]
        norm_row = tl.load(norm_weight + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
        mixture = norm_row * mixture.to(result.dtype.element_ty).to(tl.float32)
    tl.store(result + offset, mixture.to(result.dtype.element_ty), mask=inside)
    if KEEPS_STATISTICS:
        tl.debug_barrier()  # other threads of this program have stored the logits
        for i in range(count):
            logit = tl.load(logits + i * stride + token, mask=is_token, other=0.0)
            tl.store(weights + i * stride + token, tl.div_rn(tl.exp(logit - maximum), normaliser), mask=is_token)


@triton.jit
def backward_kernel(
    grad, grad_weights, sources, query, key_norm, hidden, norm_weight, statistics, contracted, partial,
    grad_sources, later_grads, tokens, count, factor, norm_eps,
    N: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, HAS_KEY_NORM: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_GRAD_WEIGHTS: tl.constexpr, NEEDS_SOURCES: tl.constexpr, HAS_LATER: tl.constexpr, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write `grad_sources`, and this program's part of the gradient of `query * key_norm` to a row of `partial`.

    `later_grads`, the sources' gradients from later reads, are added. `contracted` `[count, tokens]` is scratch. With
    `HAS_NORM`, `grad` is the gradient after the norm, and each program has a second row, for the norm's weight.
    """
    stride = tl.cast(tokens, tl.int64)  # between the statistics of two sources
    weights, logits, inverse_rms = statistics, statistics + count * stride, statistics + 2 * count * stride
    column = tl.arange(0, COLUMNS)
    is_column = column < WIDTH
    query_row = _query_row(query, key_norm, column, is_column, HAS_KEY_NORM)
    grad_query = tl.zeros([COLUMNS], tl.float32)
    grad_norm = tl.zeros([COLUMNS], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(tokens, TOKENS), tl.num_programs(0)):
        token, is_token, inside, offset = _whole_tokens(tile, tokens, WIDTH, TOKENS, COLUMNS)
        grad_row = tl.load(grad + offset, mask=inside, other=0.0).to(tl.float32)
        if HAS_NORM:
            # y = g n with n = h r and r = 1 / RMS(h):  dL/dh = r (g dL/dy - n mean(n g dL/dy))
            normed = tl.load(hidden + offset, mask=inside, other=0.0).to(tl.float32)
            # Not for rows of zeros beyond the last token: without an epsilon these would give no number.
            norm_rms = tl.where(is_token, tl.rsqrt(tl.sum(normed * normed, 1) / WIDTH + norm_eps), 0.0)[:, None]
            normed *= norm_rms
            grad_norm += tl.sum(grad_row * normed.to(grad.dtype.element_ty).to(tl.float32), 0)
            grad_row *= tl.load(norm_weight + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
            grad_row = norm_rms * (grad_row - normed * (tl.sum(grad_row * normed, 1) / WIDTH)[:, None])
        # The gradient of each weight a_i, through the result and directly, and the mean of these by the weights.
        mean = tl.zeros([TOKENS], tl.float32)
        coming = tl.load(sources[0] + offset, mask=inside, other=0.0)
        for first in tl.static_range(0, N, CHUNK):
            for i in range(first, tl.minimum(first + CHUNK, count)):
                source = coming.to(tl.float32)
                coming = _load_next(
                    sources, i, count, offset, is_token[:, None], column[None, :], first, CHUNK, N, WIDTH
                )
                similarity = tl.sum(grad_row * source, 1) * factor
                if HAS_GRAD_WEIGHTS:
                    similarity += tl.load(grad_weights + i * stride + token, mask=is_token, other=0.0)
                mean += tl.load(weights + i * stride + token, mask=is_token, other=0.0) * similarity
                tl.store(contracted + i * stride + token, similarity, mask=is_token)
        tl.debug_barrier()  # other threads of this program have stored them
        for first in tl.static_range(0, N, CHUNK):
            for i in range(first, tl.minimum(first + CHUNK, count)):
                pointer = _pick(sources, i, first, CHUNK, N)
                source = tl.load(pointer + offset, mask=inside, other=0.0).to(tl.float32)
                weight = tl.load(weights + i * stride + token, mask=is_token, other=0.0)
                logit = tl.load(logits + i * stride + token, mask=is_token, other=0.0)
                rms = tl.load(inverse_rms + i * stride + token, mask=is_token, other=0.0)
                similarity = tl.load(contracted + i * stride + token, mask=is_token, other=0.0)
                along_query = weight * (similarity - mean) * rms
                grad_query += tl.sum(along_query[:, None] * source, 0)
                if NEEDS_SOURCES:
                    along_source = -along_query * logit * rms / WIDTH
                    grad_source = (weight * factor)[:, None] * grad_row + along_query[:, None] * query_row
                    grad_source += along_source[:, None] * source
                    if HAS_LATER:
                        later = _pick(later_grads, i, first, CHUNK, N)
                        grad_source += tl.load(later + offset, mask=inside, other=0.0).to(tl.float32)
                    target = _pick(grad_sources, i, first, CHUNK, N)
                    tl.store(target + offset, grad_source.to(target.dtype.element_ty), mask=inside)
    if HAS_NORM:
        tl.store(partial + (tl.program_id(0) * 2 + 1) * WIDTH + column, grad_norm, mask=is_column)
        tl.store(partial + tl.program_id(0) * 2 * WIDTH + column, grad_query, mask=is_column)
    else:
        tl.store(partial + tl.program_id(0) * WIDTH + column, grad_query, mask=is_column)


@triton.jit
def finish_kernel(
    partial, query, key_norm, grad_query, grad_key_norm, grad_norm, parts,
    WIDTH: tl.constexpr, HAS_NORM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum the `parts` rows of `partial` of [`backward_kernel`], in a fixed order, and write three gradients `[WIDTH]`.

    They are the gradients of `query` and `key_norm`, and with `HAS_NORM` that of the following norm's weight.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < WIDTH
    stride = 2 * WIDTH if HAS_NORM else WIDTH  # between two parts
    total = tl.zeros([COLUMNS], tl.float32)
    total_norm = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, parts, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < parts)[:, None] & is_column[None, :]
        place = partial + row[:, None] * stride + column[None, :]
        total += tl.sum(tl.load(place, mask=inside, other=0.0), 0)
        if HAS_NORM:
            total_norm += tl.sum(tl.load(place + WIDTH, mask=inside, other=0.0), 0)
    query_row = tl.load(query + column, mask=is_column, other=0.0).to(tl.float32)
    key_norm_row = tl.load(key_norm + column, mask=is_column, other=0.0).to(tl.float32)
    tl.store(grad_query + column, (total * key_norm_row).to(grad_query.dtype.element_ty), mask=is_column)
    tl.store(grad_key_norm + column, (total * query_row).to(grad_key_norm.dtype.element_ty), mask=is_column)
    if HAS_NORM:
        tl.store(grad_norm + column, total_norm.to(grad_norm.dtype.element_ty), mask=is_column)


@triton.jit
def phase_one_kernel(
    sources, queries, mixtures, maxima, normalisers, tokens, count, eps,
    N: tl.constexpr, CHUNK: tl.constexpr, NUMBER: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write `mixtures` `[NUMBER, tokens, WIDTH]`, and `maxima` and `normalisers` `[NUMBER, tokens]`.

    `NUMBER` is the number of queries. A program computes one token for `ROWS` of them, one of `GROUPS` groups.
    """
    token = (tl.program_id(0) // GROUPS).to(tl.int64)
    row, column = tl.program_id(0) % GROUPS * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    is_row, is_column = row < NUMBER, column < WIDTH
    inside = is_row[:, None] & is_column[None, :]
    query_rows = tl.load(queries + row[:, None] * WIDTH + column[None, :], mask=inside, other=0.0)
    offset = token * WIDTH + column
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    normaliser = tl.zeros([ROWS], tl.float32)
    mixture = tl.zeros([ROWS, COLUMNS], tl.float32)
    coming = tl.load(sources[0] + offset, mask=is_column, other=0.0)
    for first in tl.static_range(0, N, CHUNK):
        for i in range(first, tl.minimum(first + CHUNK, count)):
            source = coming.to(tl.float32)
            coming = _load_next(sources, i, count, offset, column >= 0, column, first, CHUNK, N, WIDTH)
            rms = tl.rsqrt(tl.sum(source * source, 0) / WIDTH + eps)
            logit = tl.sum(query_rows * source[None, :], 1) * rms
            maximum, normaliser, mixture = _join(maximum, normaliser, mixture, logit, source[None, :])
    place = row * tl.cast(tokens, tl.int64) + token
    tl.store(maxima + place, maximum, mask=is_row)
    tl.store(normalisers + place, normaliser, mask=is_row)
    tl.store(mixtures + place[:, None] * WIDTH + column[None, :], mixture, mask=inside)
