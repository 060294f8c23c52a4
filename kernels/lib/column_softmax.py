"""Online softmax over the columns of a 64-row WGMMA accumulator: a row is a key, a column a head.

A column lives in eight lanes of each of the four warps (`kernels/lib/columns.py`), which put together what they have
in SMEM.

As in `softmax`, the maximum is kept unscaled, and a column without keys has maximum -inf and sum 0.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels.lib.columns import by_column, column_of
from kernels.lib.launch import WARPGROUP
from kernels.lib.rows import ROWS, Extents, RowTile, load, store
from kernels.lib.softmax import LN_2, LOG2_E, RowResults, exp2

WARPS = WARPGROUP // 32
LANES_A_COLUMN = (16, 8, 4)  # distances


@dataclass(frozen=True)
class ColumnSoftmax:
    """The running maximum and sum of the columns that a thread holds."""

    scale_log2: Float32
    thread: Int32
    barrier: int  # a named barrier of the warpgroup alone
    shared: cute.Tensor  # float32 (warp, columns): each warp's result; all warps meet between two uses
    max: cute.Tensor
    sum: cute.Tensor  # of this thread's rows, until `finish`
    factor: cute.Tensor  # the sum before the last step, in the present units; at last, the normalising factor
    sink: cute.Tensor

    @staticmethod
    def of(scale_log2: Float32, thread: Int32, barrier: int, shared: cute.Tensor) -> "ColumnSoftmax":
        columns = cute.size(shared, mode=[1]) // 4
        state = (cute.make_rmem_tensor(columns, Float32) for _ in range(4))
        return ColumnSoftmax(scale_log2, thread, barrier, shared, *state)

    @cute.jit
    def read_sinks(self, n: Extents, results: RowResults):
        """Once: all queries have the same heads."""
        for i in cutlass.range_constexpr(cute.size(self.sink)):
            sink = load(results.sink + cutlass.min(column_of(self.thread, i), n.inner - 1))
            self.sink[i] = sink if n.splits == 1 else -Float32.inf  # a partial result has no sink

    @cute.jit
    def reset(self):
        self.max.fill(-Float32.inf)
        self.sum.fill(0.0)

    @cute.jit
    def step(self, scores: cute.Tensor):
        """scores <- exp(scale (scores - max)) with the new maxima; updates sum and factor."""
        s = by_column(scores)
        old = cute.make_rmem_tensor_like(self.max)
        old.store(self.max.load())
        for i in cutlass.range_constexpr(cute.size(old)):
            self.max[i] = cute.arch.fmax(self.max[i], cute.arch.fmax(s[i, 0], s[i, 1]))
        self.over_keys(self.max, cute.arch.fmax)
        for i in cutlass.range_constexpr(cute.size(old)):
            shift, top = self.shift(i), Float32(0.0) if self.max[i] == -Float32.inf else self.max[i]
            self.factor[i] = exp2((old[i] - top) * self.scale_log2)  # exactly 1 where the maximum stays
            for r in cutlass.range_constexpr(ROWS):
                s[i, r] = exp2(s[i, r] * self.scale_log2 - shift)
            self.sum[i] = self.sum[i] * self.factor[i] + (s[i, 0] + s[i, 1])

    @cute.jit
    def finish(self, tile: RowTile, results: RowResults):
        """factor <- the factor that normalises O, with the sink; lse, without the sink, goes to memory.

        A query without keys (sum 0) gets factor 0 and lse -inf; a NaN stays a NaN.
        """
        self.over_keys(self.sum, add)
        for i in cutlass.range_constexpr(cute.size(self.sum)):
            sees, shift = self.sum[i] != 0.0, self.shift(i)
            total = self.sum[i] + exp2((self.sink[i] - shift * LN_2) * LOG2_E)
            self.factor[i] = cute.arch.rcp_approx(total) if sees else Float32(0.0)
            lse = (cute.math.log2(self.sum[i], fastmath=True) + shift) * LN_2
            column = column_of(self.thread, i)
            if (self.thread < 4) & exists(tile, column):
                row = tile.row_index(tile.outer0, tile.inner0 + column)
                store(results.lse + row, lse if sees else -Float32.inf)

    @cute.jit
    def over_keys(self, x: cute.Tensor, combine: cutlass.Constexpr[Callable]):
        """x <- all threads' x of each column, combined."""
        value, i, is_first = over_lanes(x, combine, self.thread)
        if is_first:
            self.shared[self.thread // 32, column_of(self.thread, i)] = value
        cute.arch.barrier(barrier_id=self.barrier, number_of_threads=WARPGROUP)
        of_warps = cute.make_rmem_tensor(WARPS, Float32)
        for i in cutlass.range_constexpr(cute.size(x)):
            place = (self.shared.iterator + column_of(self.thread, i) * WARPS).align(16)
            cute.autovec_copy(cute.make_tensor(place, cute.make_layout(WARPS)), of_warps)
            x[i] = combine(combine(of_warps[0], of_warps[1]), combine(of_warps[2], of_warps[3]))

    @cute.jit
    def shift(self, i: cutlass.Constexpr) -> Float32:
        """The number to subtract in the exponent; 0 for a column without keys, whose exponentials are exp2(-inf) =
        0.
        """
        shift = self.max[i] * self.scale_log2
        return Float32(0.0) if self.max[i] == -Float32.inf else shift


@cute.jit
def over_lanes(
    x: cute.Tensor, combine: cutlass.Constexpr[Callable], thread: Int32
) -> tuple[Float32, Int32, cutlass.Boolean]:
    """Combines x of each column over the eight lanes that hold it, into one of them: (result, its element, whether
    here).

    While there are several columns, two lanes exchange the columns that the other will end with.
    """
    values, i, is_first = [x[j] for j in range(cute.size(x))], Int32(0), thread >= 0
    for distance in LANES_A_COLUMN:
        upper, half = thread & distance != 0, len(values) // 2
        if cutlass.const_expr(half == 0):
            values = [combine(values[0], cute.arch.shuffle_sync_bfly(values[0], offset=distance))]
            is_first = is_first & (thread & distance == 0)
        else:
            kept, given = [], []
            for a, b in zip(values[:half], values[half:], strict=True):
                kept.append(b if upper else a)
                given.append(a if upper else b)
            values = [
                combine(a, cute.arch.shuffle_sync_bfly(b, offset=distance)) for a, b in zip(kept, given, strict=True)
            ]
            i = i + half * Int32(upper)
    return values[0], i, is_first


def add(a: Float32, b: Float32) -> Float32:
    return a + b


def exists(tile: RowTile, column: Int32) -> cutlass.Boolean:
    """Tells whether a column of a query's tile is one of its heads."""
    return (column < tile.n.box_inner) & (tile.inner0 + column < tile.n.inner)


@cute.jit
def scale_columns(acc: cute.Tensor, factor: cute.Tensor):
    a = by_column(acc)
    for i in cutlass.range_constexpr(cute.size(factor)):
        for r in cutlass.range_constexpr(ROWS):
            a[i, r] = a[i, r] * factor[i]
