"""exp2 of the scores of a row, two at a time: some by the unit for it, some by polynomials on the FMA units.

A quarter of an SM gives 4 exponentials a clock, and 32 products with sums.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import nvvm
from cutlass.cutlass_dsl import dsl_user_op

from kernels.lib.ptx import bits_of, float_of, round_pair, shift_left
from kernels.lib.softmax import exp2

Pair = tuple[Float32, Float32]

EVERY = 8  # pairs, of which some are emulated
LEAST = -127.0  # 2^x is 0 from here on
INTEGER = 1.5 * 2.0**23  # added and taken away again, it rounds to an integer, whose bits are the lowest of the sum's
# 2^x for 0 <= x < 1, the highest power first: within 3e-6 of it
POLYNOMIAL = (0.013426682911813259, 0.052242476493120193, 0.241280198097229, 0.6930448412895203, 1.0)


def both(x: Float32 | float) -> tuple:
    return x, x


@dsl_user_op
def max3(a: Float32, b: Float32, c: Float32, *, loc=None, ip=None) -> Float32:
    """One instruction on Blackwell."""
    a, b, c = (x.ir_value(loc=loc, ip=ip) for x in (a, b, c))
    return Float32(nvvm.fmax(a, b, c=c, loc=loc, ip=ip))


@cute.jit
def raise_max(row_max: Float32, scores: cute.Tensor) -> Float32:
    """The maximum of row_max and these scores, an even number of them."""
    a, b = row_max, scores[0]  # two chains have half the latency of one
    for i in cutlass.range_constexpr(1, cute.size(scores) - 3, 4):
        a, b = max3(a, scores[i], scores[i + 1]), max3(b, scores[i + 2], scores[i + 3])
    rest = cute.size(scores) - 3
    return cute.arch.fmax(max3(a, scores[rest], scores[rest + 1]), cute.arch.fmax(b, scores[rest + 2]))


@cute.jit
def exponentiate(
    sums: Pair,
    shift: Float32,
    scale_log2: Float32,
    scores: list,
    p: cute.Tensor,
    dtype,
    emulated: cutlass.Constexpr,
) -> Pair:
    """p <- exp2(scale_log2 scores - shift) of the scores, rounded to pairs.

    The sums, of even and of odd scores, add them up unrounded. Of every eight pairs the last `emulated` are so.
    """
    for i in cutlass.range_constexpr(cute.size(p)):
        pair = scores[2 * i], scores[2 * i + 1]
        x = cute.arch.fma_packed_f32x2(pair, both(scale_log2), both(-shift))
        x = emulated_exp2(x) if cutlass.const_expr(i % EVERY >= EVERY - emulated) else tuple(map(exp2, x))
        sums = cute.arch.add_packed_f32x2(sums, x)
        p[i] = round_pair(*x, dtype)
    return sums


def emulated_exp2(x: Pair) -> Pair:
    """2^x for x below 128: 2^n by its exponent, times a polynomial of what is left. NaN stays NaN."""
    x = tuple(cute.arch.fmax(y, LEAST, nan=True) for y in x)
    n = cute.arch.add_packed_f32x2(x, both(INTEGER + 127), rnd="rm")
    rest = cute.arch.sub_packed_f32x2(x, cute.arch.sub_packed_f32x2(n, both(INTEGER + 127)))
    y = both(Float32(POLYNOMIAL[0]))
    for coefficient in POLYNOMIAL[1:]:
        y = cute.arch.fma_packed_f32x2(y, rest, both(coefficient))
    powers = tuple(float_of(shift_left(bits_of(z), Int32(23))) for z in n)
    return cute.arch.mul_packed_f32x2(y, powers)
