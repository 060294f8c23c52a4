"""Online softmax over the accumulator of a 64-row WGMMA.

A thread of the warpgroup holds two rows, r = 0 and 1 (lane // 4 and lane // 4 + 8 of its warp's sixteen), and of each
the columns 8 j + 2 (lane % 4) + c: an accumulator is indexed (c, r, j). A row lives in the four lanes of a quad.

The maximum is kept unscaled; scale * log2(e) enters only in exp2. A row without keys has maximum -inf and sum 0.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .rows import ROWS, BoxedRows, RowTile, load, store
from .wgmma import not_

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


class RowResults(NamedTuple):
    """The arrays of rows besides o."""

    sink: cute.Pointer  # float32 [h_q]
    lse: cute.Pointer  # float32 [b, s_q, h_q], or [b, s_q, h_q, splits]
    o_parts: cute.Pointer  # float32 [b, s_q, h_q, splits, d], where keys are split: then o and the sink are unused


@dataclass(frozen=True)
class Softmax:
    """The running maximum and sum of the rows that a thread holds."""

    scale_log2: Float32 | cute.Tensor  # of all rows, or of each
    row_max: cute.Tensor
    row_sum: cute.Tensor  # of this thread's columns, until `finish`
    old_max: cute.Tensor
    factor: cute.Tensor  # the sum before the last step, in the present units
    sink: cute.Tensor

    @staticmethod
    def of(scale_log2: Float32 | cute.Tensor) -> "Softmax":
        return Softmax(scale_log2, *(cute.make_rmem_tensor(ROWS, Float32) for _ in range(5)))

    @cute.jit
    def start(self, tile: RowTile, boxed: BoxedRows, results: RowResults):
        """Starts a row tile; it reads the sinks now, so that `finish` has them."""
        self.reset()
        self.read_sinks(tile, boxed, results)

    @cute.jit
    def reset(self):
        self.row_max.fill(-Float32.inf)
        self.row_sum.fill(0.0)

    @cute.jit
    def read_sinks(self, tile: RowTile, boxed: BoxedRows, results: RowResults):
        for r in cutlass.range_constexpr(ROWS):
            _, _, head = tile.place(boxed, r)
            sink = load(results.sink + head)
            self.sink[r] = sink if tile.n.splits == 1 else -Float32.inf  # a partial result has no sink

    @cute.jit
    def remember_max(self):
        self.old_max.store(self.row_max.load())

    @cute.jit
    def raise_max(self, scores: cute.Tensor):
        """row_max <- max(row_max, the row's scores), over the whole quad."""
        s = by_row(scores)
        for r in cutlass.range_constexpr(ROWS):
            a, b = self.row_max[r], s[r, 0]  # two chains have half the latency of one
            for i in cutlass.range_constexpr(1, cute.size(s, mode=[1]) - 1, 2):
                a, b = cute.arch.fmax(a, s[r, i]), cute.arch.fmax(b, s[r, i + 1])
            a = cute.arch.fmax(cute.arch.fmax(a, b), s[r, cute.size(s, mode=[1]) - 1])
            self.row_max[r] = cute.arch.warp_reduction_max(a, threads_in_group=4)

    @cute.jit
    def decay(self):
        """The maximum rose from old_max: updates factor and row_sum."""
        for r in cutlass.range_constexpr(ROWS):
            self.factor[r] = self.factor_of(r)
            self.row_sum[r] = self.row_sum[r] * self.factor[r]

    @cute.jit
    def factor_of(self, r: cutlass.Constexpr) -> Float32:
        """exp(scale (old_max - row_max)), from the difference: exactly 1 where the maximum stays. Of two products ptxas
        would round one only, and a tile of which a row sees nothing would change its bits.
        """
        top = Float32(0.0) if self.row_max[r] == -Float32.inf else self.row_max[r]
        return exp2((self.old_max[r] - top) * self.scale(r))

    @cute.jit
    def exponentiate(self, scores: cute.Tensor):
        """scores <- exp(scale (scores - row_max)), added to row_sum."""
        s = by_row(scores)
        for r in cutlass.range_constexpr(ROWS):
            scale, shift = self.scale(r), self.shift(r)
            a, b = self.row_sum[r], Float32(0.0)
            for i in cutlass.range_constexpr(0, cute.size(s, mode=[1]), 2):
                s[r, i] = exp2(s[r, i] * scale - shift)
                s[r, i + 1] = exp2(s[r, i + 1] * scale - shift)
                a, b = a + s[r, i], b + s[r, i + 1]
            self.row_sum[r] = a + b

    def scale(self, r: int) -> Float32:
        return self.scale_log2[r] if isinstance(self.scale_log2, cute.Tensor) else self.scale_log2

    @cute.jit
    def shift(self, r: cutlass.Constexpr) -> Float32:
        """The number to subtract in the exponent; 0 for a row without keys, whose exponentials are exp2(-inf) = 0."""
        shift = self.row_max[r] * self.scale(r)
        return Float32(0.0) if self.row_max[r] == -Float32.inf else shift

    @cute.jit
    def sum_columns(self):
        for r in cutlass.range_constexpr(ROWS):
            self.row_sum[r] = cute.arch.warp_reduction_sum(self.row_sum[r], threads_in_group=4)

    @cute.jit
    def finish(
        self, tile: RowTile, boxed: BoxedRows, thread: Int32, results: RowResults, writes_lse: cutlass.Constexpr
    ):
        """factor <- the factor that normalises each row of O, with the sink; lse, without the sink, goes to memory.

        A row without keys (sum 0) gets factor 0 and lse -inf; a NaN stays a NaN. The sink enters by a difference: LLVM
        would move a product of the sink alone up to its load, and wait for it there.
        """
        for r in cutlass.range_constexpr(ROWS):
            exists, query, head = tile.place(boxed, r)
            sees, shift = self.row_sum[r] != 0.0, self.shift(r)
            total = self.row_sum[r] + exp2((self.sink[r] - shift * LN_2) * LOG2_E)
            self.factor[r] = cute.arch.rcp_approx(total) if sees else Float32(0.0)
            lse = (cute.math.log2(self.row_sum[r], fastmath=True) + shift) * LN_2
            if cutlass.const_expr(writes_lse):  # noqa: SIM102, at compile time
                if exists & (thread % 4 == 0):
                    store(results.lse + tile.row_index(query, head), lse if sees else -Float32.inf)


def exp2(x: Float32) -> Float32:
    return cute.math.exp2(x, fastmath=True)


def by_row(acc: cute.Tensor) -> cute.Tensor:
    """An accumulator ((c, r, j), 1, 1) seen as (r, (c, j))."""
    shape, stride = acc.layout.shape[0], acc.layout.stride[0]
    layout = cute.make_layout((shape[1], (shape[0], shape[2])), stride=(stride[1], (stride[0], stride[2])))
    return cute.make_tensor(acc.iterator, layout)


@cute.jit
def scale_rows(acc: cute.Tensor, factor: cute.Tensor):
    a = by_row(acc)
    for r in cutlass.range_constexpr(ROWS):
        for i in cutlass.range_constexpr(cute.size(a, mode=[1])):
            a[r, i] = a[r, i] * factor[r]


@cute.jit
def rescale_rows(acc: cute.Tensor, factor: cute.Tensor, fresh: bool | cutlass.Boolean = False):
    """scale_rows, skipped where no maximum of the warp's rows rose: the factors are then exactly 1.

    It is also skipped where acc is `fresh`, about to be overwritten.
    """
    if not_(fresh) & cute.arch.vote_any_sync((factor[0] != 1.0) | (factor[1] != 1.0)):
        scale_rows(acc, factor)
