"""SiTU on a row and its gradients, in plain loops that LLVM turns into vector instructions.

    y = T(x; b) s(x) T(u; l),   T(x; b) = b tanh(x / b),   s(x) = 1 / (1 + exp(-x))

There are no sums over a row, so that unlike in `rows` nothing depends on an order. Exponentials are computed here,
because LLVM does not turn calls of a library into vector instructions.
"""

import math

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from .rows import narrow, widen

_WORD, _FLOAT = ir.IntType(32), ir.FloatType()
_jit = numba.njit(nogil=True, error_model="numpy")

_ONE, _TWO = np.float32(1), np.float32(2)
_LOG2_E = np.float32(math.log2(math.e))
# ln 2 in two parts. A product of the first one, which has few bits, with a whole number is exact.
_LN2_HIGH, _LN2_LOW = np.float32(355 / 512), np.float32(math.log(2) - 355 / 512)
# A number that is added to this one is rounded to a whole number, which then stands in the lowest bits.
_ROUND = np.float32(1.5 * 2**23)
_TAYLOR = tuple(np.float32(1 / math.factorial(k)) for k in range(2, 8))
# Beyond it tanh is 1 in float32.
_SATURATED = np.float32(40)
# exp(-x) is infinite in float32 from the first on, and less than half of the last bit of 1 below the second.
_MOST, _LEAST = np.float32(88.9), np.float32(-80)


@intrinsic
def _power_of_two(typing_context, shifted):
    """Return 2^n for `n + _ROUND`; n from -126 to 127, or 128 for infinity."""

    def generate(context, builder, signature, values):
        exponent = builder.shl(builder.bitcast(values[0], _WORD), _WORD(23))
        return builder.bitcast(builder.add(exponent, _WORD(127 << 23)), _FLOAT)

    return types.float32(types.float32), generate


@intrinsic
def _wide(typing_context, number):
    """Return a number of float32, or of bfloat16 given by its bits, as float32."""

    def generate(context, builder, signature, values):
        return values[0] if signature.args[0] == types.float32 else widen(builder, values[0], 1)

    return types.float32(number), generate


@intrinsic
def as_like(typing_context, number, like):
    """Return a number of float32 in the type of `like`: itself, or the bits of bfloat16."""

    def generate(context, builder, signature, values):
        return values[0] if signature.return_type == types.float32 else narrow(builder, values[0], 1)

    return like(types.float32, like), generate


@_jit
def _exponential(x):
    """Return `q` and a power of two `p` with `exp(x) = p (1 + q)`, where `q` is exact near zero."""
    shifted = x * _LOG2_E + _ROUND
    n = shifted - _ROUND
    rest = (x - n * _LN2_HIGH) - n * _LN2_LOW  # at most ln(2) / 2
    c2, c3, c4, c5, c6, c7 = _TAYLOR
    tail = c2 + rest * (c3 + rest * (c4 + rest * (c5 + rest * (c6 + rest * c7))))
    return rest + rest * rest * tail, _power_of_two(shifted)


@_jit
def _tanh(x, factor):
    """Return `tanh(x / b)` for the factor `2 / b`, to a few units of the last place at all sizes."""
    double = x * factor
    # Written so that NaN stays NaN.
    double = _SATURATED if double > _SATURATED else double
    double = -_SATURATED if double < -_SATURATED else double
    q, power = _exponential(double)
    less_one = power * q + (power - _ONE)  # exp(2 x / b) - 1, without cancellation near zero
    return less_one / (less_one + _TWO)


@_jit
def _sigmoid(x):
    opposite = -x
    opposite = _MOST if opposite > _MOST else opposite
    opposite = _LEAST if opposite < _LEAST else opposite
    q, power = _exponential(opposite)
    return _ONE / (_ONE + power * (_ONE + q))


@_jit
def situ(gate, up, result, beta, linear_beta, like):
    """Write SiTU of a row; a `linear_beta` of 0 leaves `up` unchanged."""
    of_gate, scale = np.float32(2 / beta), np.float32(beta)
    if linear_beta == 0:
        for i in range(len(result)):
            x = _wide(gate[i])
            result[i] = as_like(_tanh(x, of_gate) * _sigmoid(x) * _wide(up[i]) * scale, like)
        return
    of_up, scale = np.float32(2 / linear_beta), np.float32(beta * linear_beta)
    for i in range(len(result)):
        x = _wide(gate[i])
        result[i] = as_like(_tanh(x, of_gate) * _sigmoid(x) * _tanh(_wide(up[i]), of_up) * scale, like)


@_jit
def situ_grads(gate, up, grad, grad_gate, grad_up, beta, linear_beta, like):
    """Write the gradients of `gate` and `up`, given that of the result.

    d(b tanh(x / b) s) / dx = s (1 - tanh^2 + b tanh (1 - s)),   d(l tanh(u / l)) / du = 1 - tanh^2
    """
    of_gate, scale = np.float32(2 / beta), np.float32(beta)
    if linear_beta != 0:
        of_up, up_scale = np.float32(2 / linear_beta), np.float32(linear_beta)
        for i in range(len(grad)):
            x, g = _wide(gate[i]), _wide(grad[i])
            tanh, sigmoid, up_tanh = _tanh(x, of_gate), _sigmoid(x), _tanh(_wide(up[i]), of_up)
            slope = sigmoid * (_ONE - tanh * tanh + scale * tanh * (_ONE - sigmoid))
            grad_gate[i] = as_like(g * slope * up_tanh * up_scale, like)
            grad_up[i] = as_like(g * scale * tanh * sigmoid * (_ONE - up_tanh * up_tanh), like)
        return
    for i in range(len(grad)):
        x, g = _wide(gate[i]), _wide(grad[i])
        tanh, sigmoid = _tanh(x, of_gate), _sigmoid(x)
        slope = sigmoid * (_ONE - tanh * tanh + scale * tanh * (_ONE - sigmoid))
        grad_gate[i] = as_like(g * slope * _wide(up[i]), like)
        grad_up[i] = as_like(g * scale * tanh * sigmoid, like)


__all__ = ["as_like", "situ", "situ_grads"]
