"""Operations on the row of a token, in vector instructions, for the `loops`.

They are written in LLVM's instructions, because a compiler of plain loops decides two things wrongly:

- The order of a sum. With `fastmath` the compiler may choose another order for one thread than for two, or for a
  compiled function than for one from the cache. A resumed run must repeat each sum bit for bit.
- The use of registers. Plain loops keep running sums in memory, which costs whole models up to 12% in prefill.

A row is an array of float32, or of uint16 with the bits of bfloat16. Those are computed in float32, and rounded when
they are written. Each `@intrinsic` declares the types of a call, and its `generate` emits the instructions.
`docs/guides/numba.md` explains this file from the ground up.
"""

from collections.abc import Callable, Sequence

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

_LANES, _UNROLLED = 16, 4  # numbers in a vector, and vectors that are computed beside each other
_LINE = 64  # bytes that memory is read by
Value = ir.NamedValue | ir.Constant  # an operand of an instruction
_FLOAT, _HALF, _WORD, _INDEX = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)


@intrinsic
def pointer(typing_context, address, like):
    """Return the integer `address` as a pointer to numbers of the type of `like`."""

    def generate(context, builder, signature, values):
        return builder.inttoptr(values[0], context.get_value_type(signature.return_type))

    return types.CPointer(like)(types.int64, like), generate


@intrinsic
def prefetch(typing_context, address, size):
    """Let the processor fetch `size` bytes from an address into its cache, without waiting for them."""

    def generate(context, builder, signature, values):
        with cgutils.for_range_slice(builder, _INDEX(0), values[1], _INDEX(_LINE), intp=_INDEX) as (offset, _):
            _prefetch(builder, builder.add(values[0], offset))
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), generate


@intrinsic
def dot(typing_context, row, other):
    """Return the sum of products of two rows."""

    def generate(context, builder, signature, values):
        return _sums(_rows(context, builder, signature, values), ((0, 1),))[0]

    return types.float32(row, other), generate


@intrinsic
def dot_ahead(typing_context, row, other, ahead):
    """Return the sum of products of two rows; prefetch the first one `ahead` bytes further."""

    def generate(context, builder, signature, values):
        return _sums(_rows(context, builder, signature, values), ((0, 1),), values[2])[0]

    return types.float32(row, other, types.int64), generate


@intrinsic
def dots_and_square(typing_context, row, others, ahead):
    """Return the dot products of a row with each of `others`, then with itself; prefetch `ahead` bytes further."""

    def generate(context, builder, signature, values):
        arguments = [row, *others], [values[0], *cgutils.unpack_tuple(builder, values[1], len(others))]
        products = [(0, i + 1) for i in range(len(others))] + [(0, 0)]
        sums = _sums(_arrays(context, builder, *arguments), products, values[2])
        return context.make_tuple(builder, signature.return_type, sums)

    return types.UniTuple(types.float32, len(others) + 1)(row, others, types.int64), generate


@intrinsic
def scale(typing_context, result, factor, row):
    """Write `result = factor * row`."""

    def generate(context, builder, signature, values):
        result, row = _rows(context, builder, signature, values)

        def block(starts, lanes):
            factors = splat(builder, values[1], lanes)
            for start in starts:
                result.store(builder.fmul(factors, row.load(start, lanes)), start)

        _for_blocks(builder, result.length, block)
        return context.get_dummy_value()

    return types.none(result, types.float32, row), generate


@intrinsic
def mix(typing_context, like, result, base_factor, base, factors, addresses):
    """Write `result = base_factor * base + sum_i factors[i] * rows[i]`, added up in this order.

    The rows hold numbers of the type of `like` and are given by their addresses; `base` is of float32.
    """

    def generate(context, builder, signature, values):
        kind = _kind(signature.args[0])
        result, base, factors, addresses = _rows(context, builder, signature, values)

        def block(starts, lanes):
            first = splat(builder, values[2], lanes)
            products = [builder.fmul(first, base.load(start, lanes)) for start in starts]
            totals = [cgutils.alloca_once_value(builder, product) for product in products]
            with cgutils.for_range(builder, addresses.length, intp=_INDEX) as loop:
                row = _Row(builder, addresses.at(loop.index), kind)
                factor = splat(builder, factors.at(loop.index), lanes)
                for start, total in zip(starts, totals):
                    builder.store(add_product(builder, factor, row.load(start, lanes), builder.load(total)), total)
            for start, total in zip(starts, totals):
                result.store(builder.load(total), start)

        _for_blocks(builder, result.length, block)
        return context.get_dummy_value()

    return types.none(like, result, types.float32, base, factors, addresses), generate


@intrinsic
def mix_for_each(typing_context, like, results, factors, addresses):
    """Write `results[q] = sum_i factors[q n + i] * rows[i]`, several mixes of the same n rows."""

    def generate(context, builder, signature, values):
        kind = _kind(signature.args[0])
        targets = _arrays(context, builder, results, cgutils.unpack_tuple(builder, values[1], len(results)))
        factors, addresses = _rows(context, builder, signature, values)

        def block(starts, lanes):
            zero = _constant(_FLOAT, 0.0, lanes)
            totals = [[cgutils.alloca_once_value(builder, zero) for _ in starts] for _ in targets]
            with cgutils.for_range(builder, addresses.length, intp=_INDEX) as loop:
                row = _Row(builder, addresses.at(loop.index), kind)
                parts = [row.load(start, lanes) for start in starts]
                for q, sums in enumerate(totals):
                    place = builder.add(builder.mul(addresses.length, _INDEX(q)), loop.index)
                    factor = splat(builder, factors.at(place), lanes)
                    for part, total in zip(parts, sums):
                        builder.store(add_product(builder, factor, part, builder.load(total)), total)
            for target, sums in zip(targets, totals):
                for start, total in zip(starts, sums):
                    target.store(builder.load(total), start)

        _for_blocks(builder, targets[0].length, block)
        return context.get_dummy_value()

    return types.none(like, results, factors, addresses), generate


@intrinsic
def derive(typing_context, like, targets, others, addresses, coefficients, grad, query, grad_query):
    """Write the gradients of a token.

        targets[i] = others[i] + m grad + a query + b rows[i],   and   grad_query += a rows[i]

    `coefficients` holds the numbers `m, a, b` of each row. Targets, others and rows hold numbers of the type of `like`
    and are given by their addresses; the rest is of float32.
    """

    def generate(context, builder, signature, values):
        kind = _kind(signature.args[0])
        targets, others, addresses, coefficients, grad, query, grad_query = _rows(context, builder, signature, values)

        def block(starts, lanes):
            grads, queries = ([row.load(start, lanes) for start in starts] for row in (grad, query))
            totals = [cgutils.alloca_once_value(builder, grad_query.load(start, lanes)) for start in starts]
            with cgutils.for_range(builder, addresses.length, intp=_INDEX) as loop:
                row, target, other = (
                    _Row(builder, places.at(loop.index), kind) for places in (addresses, targets, others)
                )
                places = [builder.add(builder.mul(loop.index, _INDEX(3)), _INDEX(i)) for i in range(3)]
                m, a, b = (splat(builder, coefficients.at(place), lanes) for place in places)
                for start, total, g, q in zip(starts, totals, grads, queries):
                    value = row.load(start, lanes)
                    builder.store(add_product(builder, a, value, builder.load(total)), total)
                    gradient = add_product(builder, b, value, add_product(builder, a, q, builder.fmul(m, g)))
                    target.store(builder.fadd(other.load(start, lanes), gradient), start)
            for start, total in zip(starts, totals):
                grad_query.store(builder.load(total), start)

        _for_blocks(builder, query.length, block)
        return context.get_dummy_value()

    return types.none(like, targets, others, addresses, coefficients, grad, query, grad_query), generate


class _Row:
    """A row at an address. Its methods emit instructions that read and write parts of it as float32."""

    def __init__(self, builder: ir.IRBuilder, address: Value, kind: ir.Type):
        self.builder, self.kind = builder, kind
        self.align = kind.width // 8 if isinstance(kind, ir.IntType) else 4
        self.start = builder.inttoptr(address, kind.as_pointer()) if address.type == _INDEX else address

    def at(self, place: Value) -> Value:
        return self.builder.load(self.builder.gep(self.start, [place]))

    def load(self, place: Value, lanes: int) -> Value:
        value = self.builder.load(self._part(place, lanes), align=self.align)
        return widen(self.builder, value, lanes) if self.kind == _HALF else value

    def store(self, value: Value, place: Value) -> None:
        lanes = getattr(value.type, "count", 1)
        if self.kind == _HALF:
            value = narrow(self.builder, value, lanes)
        self.builder.store(value, self._part(place, lanes), align=self.align)

    def prefetch(self, place: Value, ahead: Value) -> None:
        _prefetch(self.builder, self.builder.add(self.builder.ptrtoint(self._part(place, 1), _INDEX), ahead))

    def _part(self, place: Value, lanes: int) -> Value:
        part = self.builder.gep(self.start, [place])
        return part if lanes == 1 else self.builder.bitcast(part, ir.VectorType(self.kind, lanes).as_pointer())


class _Array(_Row):
    """A row whose length, the number of its places, is known."""

    def __init__(self, builder: ir.IRBuilder, address: Value, kind: ir.Type, length: Value):
        super().__init__(builder, address, kind)
        self.length = length


def _kind(number: types.Type) -> ir.Type:
    kinds: dict[types.Type, ir.Type] = {types.float32: _FLOAT, types.uint16: _HALF, types.int64: _INDEX}
    return kinds[number]


def _rows(context, builder: ir.IRBuilder, signature, values: Sequence[Value]) -> list[_Array]:
    """Return the arguments that are arrays, as rows."""
    return _arrays(context, builder, signature.args, values)


def _arrays(context, builder: ir.IRBuilder, arguments: Sequence[types.Type], values: Sequence[Value]) -> list[_Array]:
    rows = []
    for argument, value in zip(arguments, values):
        if isinstance(argument, types.Array):
            array = context.make_array(argument)(context, builder, value)
            length = builder.extract_value(array.shape, 0)
            rows.append(_Array(builder, array.data, _kind(argument.dtype), length))
    return rows


def _for_blocks(builder: ir.IRBuilder, length: Value, block: Callable[[list[Value], int], None]) -> None:
    """Emit the instructions of `block(places, lanes)` for all places of a row.

    First blocks of several vectors, then the vectors that are left, then the single numbers at the end.
    """
    begin = _INDEX(0)
    for vectors, lanes in ((_UNROLLED, _LANES), (1, _LANES), (1, 1)):
        step = _INDEX(vectors * lanes)
        end = builder.mul(builder.udiv(length, step), step)
        with cgutils.for_range_slice(builder, begin, end, step, intp=_INDEX) as (start, _):
            block([builder.add(start, _INDEX(i * lanes)) for i in range(vectors)], lanes)
        begin = end


def _sums(rows: Sequence[_Array], products: Sequence[tuple[int, int]], ahead: Value | None = None) -> list[Value]:
    """Emit sums over all places, one for each pair of rows in `products`, of the products of their numbers."""
    builder = rows[0].builder
    zero = ir.Constant(ir.VectorType(_FLOAT, _LANES), [0.0] * _LANES)
    in_vectors = [[cgutils.alloca_once_value(builder, zero) for _ in products] for _ in range(_UNROLLED)]
    at_the_end = [cgutils.alloca_once_value(builder, _FLOAT(0.0)) for _ in products]
    vectors_in_line = _LINE // rows[0].align // _LANES

    def block(starts, lanes):
        for i, (start, totals) in enumerate(zip(starts, in_vectors if lanes > 1 else [at_the_end])):
            if ahead is not None and lanes > 1 and i % vectors_in_line == 0:
                rows[0].prefetch(start, ahead)
            numbers = [row.load(start, lanes) for row in rows]
            for total, (a, b) in zip(totals, products):
                builder.store(add_product(builder, numbers[a], numbers[b], builder.load(total)), total)

    _for_blocks(builder, rows[0].length, block)
    sums = []
    for i, total in enumerate(at_the_end):
        parts = _in_pairs(builder, [builder.load(totals[i]) for totals in in_vectors])
        sums.append(builder.fadd(of_lanes(builder, parts), builder.load(total)))
    return sums


def _in_pairs(builder: ir.IRBuilder, parts: list[Value]) -> Value:
    """Emit the sum of the parts: of neighbours, then of neighbouring sums, and so on."""
    while len(parts) > 1:
        parts = [builder.fadd(*pair) for pair in zip(parts[::2], parts[1::2])]
    return parts[0]


def of_lanes(builder: ir.IRBuilder, vector: Value) -> Value:
    """Emit the sum of a vector's numbers: of its halves, then of the halves of the sum, and so on."""
    lanes = vector.type.count
    while lanes > 1:
        lanes //= 2
        halves = (ir.Constant(ir.VectorType(_WORD, lanes), [first + i for i in range(lanes)]) for first in (0, lanes))
        vector = builder.fadd(*(builder.shuffle_vector(vector, vector, half) for half in halves))
    return builder.extract_element(vector, _WORD(0))


def splat(builder: ir.IRBuilder, number: Value, lanes: int) -> Value:
    """Emit a vector that holds a number `lanes` times."""
    if lanes == 1:
        return number
    vector = ir.VectorType(_FLOAT, lanes)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), number, _WORD(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_WORD, lanes), [0] * lanes))


def add_product(builder: ir.IRBuilder, a: Value, b: Value, c: Value) -> Value:
    """Emit `a b + c`, rounded once."""
    kind = a.type
    name = f"llvm.fma.v{kind.count}f32" if isinstance(kind, ir.VectorType) else "llvm.fma.f32"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * 3), name)
    return builder.call(function, [a, b, c])


def _prefetch(builder: ir.IRBuilder, address: Value) -> None:
    byte = ir.IntType(8).as_pointer()
    function = builder.module.declare_intrinsic(
        "llvm.prefetch", (byte,), ir.FunctionType(ir.VoidType(), [byte, _WORD, _WORD, _WORD])
    )
    to_read, to_second_cache, data = _WORD(0), _WORD(1), _WORD(1)
    builder.call(function, [builder.inttoptr(address, byte), to_read, to_second_cache, data])


def _like(kind: ir.Type, lanes: int) -> ir.Type:
    return kind if lanes == 1 else ir.VectorType(kind, lanes)


def _constant(kind: ir.Type, number: float, lanes: int) -> ir.Constant:
    return kind(number) if lanes == 1 else ir.Constant(ir.VectorType(kind, lanes), [number] * lanes)


def widen(builder: ir.IRBuilder, halves: Value, lanes: int) -> Value:
    """Emit the conversion of bfloat16, given by its bits, to float32."""
    bits = builder.shl(builder.zext(halves, _like(_WORD, lanes)), _constant(_WORD, 16, lanes))
    return builder.bitcast(bits, _like(_FLOAT, lanes))


def narrow(builder: ir.IRBuilder, numbers: Value, lanes: int) -> Value:
    """Emit the rounding of float32 to the bits of bfloat16, to the nearest or the even one; a NaN stays a NaN."""
    bits = builder.bitcast(numbers, _like(_WORD, lanes))
    is_odd = builder.and_(builder.lshr(bits, _constant(_WORD, 16, lanes)), _constant(_WORD, 1, lanes))
    rounded = builder.add(builder.add(bits, _constant(_WORD, 0x7FFF, lanes)), is_odd)
    is_nan = builder.fcmp_unordered("uno", numbers, numbers)
    kept = builder.select(is_nan, _constant(_WORD, 0x7FC0, lanes), builder.lshr(rounded, _constant(_WORD, 16, lanes)))
    return builder.trunc(kept, _like(_HALF, lanes))


__all__ = [
    "Value",
    "add_product",
    "derive",
    "dot",
    "dot_ahead",
    "dots_and_square",
    "mix",
    "mix_for_each",
    "narrow",
    "of_lanes",
    "pointer",
    "prefetch",
    "scale",
    "splat",
    "widen",
]
