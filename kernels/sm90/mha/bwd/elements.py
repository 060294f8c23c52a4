"""A thread's work on its elements where keys are the rows of an accumulator, and rows of Q its columns.

An accumulator here is (c, r, j): key r, and row 8 j + 2 (lane % 4) + c. What belongs to a row is read out of SMEM.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from kernels.lib.ptx import shift_left
from kernels.lib.rows import ROWS, WARP, row_of
from kernels.lib.softmax import by_row, exp2
from kernels.lib.wgmma import round_to

LSE, SINK_FACTOR, DELTA = range(3)
START, WIDTH = range(2)
# flags of rows: a sink factor is not 1; for each 64 keys, a row sees some of them; a row does not see all of them; and
# where consumers zero such rows, a row sees nothing at all
HAS_SINK, SEES, HIDES, DEAD = 1, 1 << 1, 1 << 3, 1 << 5


def bits_below(n: Int32) -> Int32:
    """The n lowest bits of 32; none, or all, for an n beyond."""
    n = cutlass.min(cutlass.max(n, Int32(0)), Int32(WARP))
    return shift_left(Int32(1), n) - 1


@cute.jit
def pair_of(x: cute.Tensor, which: cutlass.Constexpr, j: cutlass.Constexpr, column: Int32) -> cute.Tensor:
    """Loads what two neighbouring rows have, out of SMEM."""
    values = cute.make_rmem_tensor(2, x.element_type)
    place = (x[None, which].iterator + (8 * j + column)).align(8)
    cute.autovec_copy(cute.make_tensor(place, cute.make_layout(2)), values)
    return values


def own_column() -> Int32:
    return cute.arch.lane_idx() % 4 * 2


@cute.jit
def mask(scores: cute.Tensor, spans: cute.Tensor, key0: Int32, thread: Int32):
    """-inf for every key that its row does not see."""
    s, column = by_row(scores), own_column()
    for j in cutlass.range_constexpr(cute.size(s, mode=[1]) // 2):
        start, width = (pair_of(spans, i, j, column) for i in (START, WIDTH))
        for r in cutlass.range_constexpr(ROWS):
            key = key0 + row_of(thread, r)
            for c in cutlass.range_constexpr(2):
                if Uint32(key - start[c]) >= Uint32(width[c]):  # or before it
                    s[r, 2 * j + c] = -Float32.inf


@cute.jit
def exponentiate(scores: cute.Tensor, numbers: cute.Tensor, scale_log2: Float32):
    """P <- exp(scale S - lse)."""
    s, column = by_row(scores), own_column()
    for j in cutlass.range_constexpr(cute.size(s, mode=[1]) // 2):
        lse = pair_of(numbers, LSE, j, column)
        for r in cutlass.range_constexpr(ROWS):
            for c in cutlass.range_constexpr(2):
                s[r, 2 * j + c] = exp2(s[r, 2 * j + c] * scale_log2 - lse[c])


@cute.jit
def apply_sink(operand: cute.Tensor, p: cute.Tensor, numbers: cute.Tensor, flags: Int32):
    """operand <- sink factor P, rounded."""
    if flags & HAS_SINK != 0:
        scaled = cute.make_rmem_tensor_like(p)
        x, w, column = by_row(p), by_row(scaled), own_column()
        for j in cutlass.range_constexpr(cute.size(x, mode=[1]) // 2):
            sink_factor = pair_of(numbers, SINK_FACTOR, j, column)
            for r in cutlass.range_constexpr(ROWS):
                for c in cutlass.range_constexpr(2):
                    w[r, 2 * j + c] = x[r, 2 * j + c] * sink_factor[c]
        round_to(operand, scaled)
    else:
        round_to(operand, p)


@cute.jit
def drop(dp: cute.Tensor, p: cute.Tensor):
    """0 for dP where P is 0: what a key that is not seen holds may be NaN."""
    for i in cutlass.range_constexpr(cute.size(dp)):
        dp[i] = dp[i] if p[i] != 0.0 else Float32(0.0)


@cute.jit
def differentiate(operand: cute.Tensor, p: cute.Tensor, dp: cute.Tensor, numbers: cute.Tensor, flags: Int32):
    """operand <- P (sink factor dP - delta), rounded."""
    x, y, column = by_row(p), by_row(dp), own_column()
    if flags & HAS_SINK != 0:
        for j in cutlass.range_constexpr(cute.size(x, mode=[1]) // 2):
            sink_factor = pair_of(numbers, SINK_FACTOR, j, column)
            for r in cutlass.range_constexpr(ROWS):
                for c in cutlass.range_constexpr(2):
                    y[r, 2 * j + c] = y[r, 2 * j + c] * sink_factor[c]
    for j in cutlass.range_constexpr(cute.size(x, mode=[1]) // 2):
        delta = pair_of(numbers, DELTA, j, column)
        for r in cutlass.range_constexpr(ROWS):
            for c in cutlass.range_constexpr(2):
                y[r, 2 * j + c] = x[r, 2 * j + c] * (y[r, 2 * j + c] - delta[c])
    round_to(operand, dp)


@cute.jit
def hand_over(acc: cute.Tensor, target: cute.Tensor, thread: Int32):
    """To SMEM, for the same thread of another warpgroup."""
    for i in cutlass.range_constexpr(cute.size(acc) // 4):
        four = cute.make_tensor(acc.iterator + 4 * i, cute.make_layout(4))
        place = target[None, thread, i].iterator.align(16)
        cute.autovec_copy(four, cute.make_tensor(place, cute.make_layout(4)))


@cute.jit
def take_over(acc: cute.Tensor, source: cute.Tensor, thread: Int32):
    for i in cutlass.range_constexpr(cute.size(acc) // 4):
        four = cute.make_tensor(acc.iterator + 4 * i, cute.make_layout(4))
        place = source[None, thread, i].iterator.align(16)
        cute.autovec_copy(cute.make_tensor(place, cute.make_layout(4)), four)


def part_of(acc: cute.Tensor, like: cute.Tensor, i: int) -> cute.Tensor:
    """The i-th part of an accumulator that has as many elements as another."""
    return cute.make_tensor(acc.iterator + i * cute.size(like), cute.make_layout(cute.size(like)))


@cute.jit
def add_scaled(acc: cute.Tensor, factor: Float32, other: cute.Tensor):
    """acc <- factor * acc + other, element by element."""
    for i in cutlass.range_constexpr(cute.size(acc)):
        acc[i] = acc[i] * factor + other[i]


@cute.jit
def zero_row(tile: cute.Tensor, row: Int32):
    """Clears a row of a (rows, columns) slab tile, by one thread; the swizzle stays within 128 bytes of the row."""
    rows, columns = cute.size(tile, mode=[0]), cute.size(tile, mode=[1])
    base = cute.recast_ptr(tile.iterator, dtype=cutlass.Uint32)
    zeros = cute.make_rmem_tensor(4, cutlass.Uint32)
    zeros.fill(0)
    for slab in cutlass.range_constexpr(columns // 64):
        for chunk in cutlass.range(8, unroll=1):  # rare: not worth the registers of unrolled addresses
            place = base + ((slab * rows + row) * 8 + chunk) * 4
            cute.autovec_copy(zeros, cute.make_tensor(place.align(16), cute.make_layout(4)))
