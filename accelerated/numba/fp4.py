"""Weights of four bits (MXFP4): a row times a vector, and the row's values, in vector instructions, for the `loops`.

Sixteen bytes hold 32 numbers that share a scale: the even columns are the low bits of the bytes, the odd ones the high
bits. So a vector of sixteen bytes gives two vectors of numbers. The vectors that they are multiplied with have their
columns in that order too: of each 32, the even ones first.

See `rows` for why these are LLVM's instructions, and for the kinds of numbers.
"""

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from .rows import Value, add_product, of_lanes, splat

_BYTES, _GROUP = 16, 32  # bytes and numbers of a group
_FLOAT, _HALF, _WORD, _INDEX, _BYTE = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.IntType(8)
_FLOATS, _WORDS, _CODES = (ir.VectorType(kind, _BYTES) for kind in (_FLOAT, _WORD, _BYTE))


@intrinsic
def fp4_dot(typing_context, codes, scales, vector, groups):
    """Return the sum of products of a row and a vector.

    The arguments are addresses: of 16 bytes a group, of one scale a group, and of 32 numbers of float32 a group.
    """

    def generate(context, builder, signature, values):
        codes, scales, vector, groups = values
        total = cgutils.alloca_once_value(builder, ir.Constant(_FLOATS, [0.0] * _BYTES))
        with cgutils.for_range(builder, groups, intp=_INDEX) as loop:
            even, odd = _doubles(builder, codes, loop.index)
            start = builder.add(vector, builder.mul(loop.index, _INDEX(4 * _GROUP)))
            of_even, of_odd = (_load(builder, start, _FLOATS, offset, 4) for offset in (0, 4 * _BYTES))
            # The scale comes first: products with the numbers alone overflow for inputs beyond 1e37.
            power = splat(builder, _half_scale(builder, scales, loop.index), _BYTES)
            even, odd = (builder.fmul(part, power) for part in (even, odd))
            products = add_product(builder, even, of_even, builder.load(total))
            builder.store(add_product(builder, odd, of_odd, products), total)
        return of_lanes(builder, builder.load(total))

    return types.float32(*(types.int64,) * 4), generate


@intrinsic
def fp4_decode(typing_context, codes, scales, result, groups, like):
    """Write the numbers of a row, in their order, as numbers of the type of `like`. The others are addresses."""

    def generate(context, builder, signature, values):
        codes, scales, result, groups, _ = values
        is_half = signature.args[4] != types.float32
        size = 2 if is_half else 4
        in_order = ir.Constant(ir.VectorType(_WORD, _GROUP), [i // 2 + i % 2 * _BYTES for i in range(_GROUP)])
        with cgutils.for_range(builder, groups, intp=_INDEX) as loop:
            power = splat(builder, _half_scale(builder, scales, loop.index), _BYTES)
            numbers = [
                builder.fmul(part, power) for part in _doubles(builder, codes, loop.index, with_signs_of_zero=True)
            ]
            if is_half:  # exact: the rounding does nothing
                bits = [builder.bitcast(part, _WORDS) for part in numbers]
                sixteen = ir.Constant(_WORDS, [16] * _BYTES)
                numbers = [builder.trunc(builder.lshr(part, sixteen), ir.VectorType(_HALF, _BYTES)) for part in bits]
            row = builder.shuffle_vector(*numbers, in_order)
            place = builder.add(result, builder.mul(loop.index, _INDEX(size * _GROUP)))
            builder.store(row, builder.inttoptr(place, row.type.as_pointer()), align=size)
        return context.get_dummy_value()

    return types.none(*(types.int64,) * 4, like), generate


def _doubles(builder: ir.IRBuilder, codes: Value, group: Value, with_signs_of_zero: bool = False) -> list[Value]:
    """Emit twice the numbers of a group without its scale: of the even columns, and of the odd ones."""
    start = builder.add(codes, builder.mul(group, _INDEX(_BYTES)))
    both = _load(builder, start, ir.VectorType(_BYTE, _BYTES), 0, 1)
    high = builder.lshr(both, ir.Constant(both.type, [4] * _BYTES))
    # All 32 codes in one vector of bytes. The high bits of the even ones are not used.
    code = builder.shuffle_vector(both, high, ir.Constant(ir.VectorType(_WORD, _GROUP), list(range(_GROUP))))
    kind = code.type
    subtract = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(kind, [kind, kind]), f"llvm.usub.sat.v{_GROUP}i8"
    )

    def constant(number: int) -> ir.Constant:
        return ir.Constant(kind, [number] * _GROUP)

    # The magnitudes 0 to 7 stand for 0, 1, 2, 3, 4, 6, 8 and 12 halves: from 4 on one more, and from 6 on four.
    magnitude = builder.and_(code, constant(7))
    above_four, above_six = (builder.call(subtract, [magnitude, constant(number)]) for number in (4, 6))
    double = builder.add(builder.add(magnitude, above_four), builder.add(above_six, above_six))
    is_negative = builder.icmp_unsigned("!=", builder.and_(code, constant(8)), constant(0))
    signed = builder.select(is_negative, builder.sub(constant(0), double), double)
    numbers = []
    for first in (0, _BYTES):
        half = ir.Constant(ir.VectorType(_WORD, _BYTES), list(range(first, first + _BYTES)))
        number = builder.sitofp(builder.shuffle_vector(signed, signed, half), _FLOATS)
        if with_signs_of_zero:
            words = builder.zext(builder.shuffle_vector(code, code, half), _WORDS)
            sign = builder.shl(words, ir.Constant(_WORDS, [28] * _BYTES))
            sign = builder.and_(sign, ir.Constant(_WORDS, [1 << 31] * _BYTES))
            number = builder.bitcast(builder.or_(builder.bitcast(number, _WORDS), sign), _FLOATS)
        numbers.append(number)
    return numbers


def _half_scale(builder: ir.IRBuilder, scales: Value, group: Value) -> Value:
    """Emit half of a group's scale, which is 2^(code - 127)."""
    code = _load(builder, builder.add(scales, group), _BYTE, 0, 1)
    word = builder.shl(builder.zext(code, _WORD), _WORD(23))
    # Code 0 stands for the denormal 2^-127.
    word = builder.select(builder.icmp_unsigned("==", word, _WORD(0)), _WORD(1 << 22), word)
    return builder.fmul(builder.bitcast(word, _FLOAT), _FLOAT(0.5))


def _load(builder: ir.IRBuilder, address: Value, kind: ir.Type, offset: int, align: int) -> Value:
    """Emit a load at an address and an offset in bytes."""
    return builder.load(builder.inttoptr(builder.add(address, _INDEX(offset)), kind.as_pointer()), align=align)


__all__ = ["fp4_decode", "fp4_dot"]
