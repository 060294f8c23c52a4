"""The softmax of `ColumnSoftmax` where a row is a (query, head) pair, and a query's tile of keys may begin some columns
later than the tile of scores: the same numbers, added in the same order.

There a thread has keys p and p + 8 of sixteen, adds the two, then the tiles one after the other; at last eight lanes
add up by distances of 4, 2 and 1 keys, and then the four sixteens. Here a thread has two of the eight p, in both eights
of every sixteen. If the query begins so many columns later, other lanes have these p; the sums over p, p + 4, then + 2,
then + 1, are the same, for p goes round modulo 8.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels.lib.ptx import keep
from kernels.lib.rows import ROWS, Extents, load, store
from kernels.lib.softmax import LN_2, LOG2_E, RowResults, exp2
from kernels.lib.wgmma import SLAB

EIGHTS = SLAB // 8  # of a query's tile of keys
SIXTEENS = EIGHTS // 2
PAIR = 2  # columns of eight that a thread has


@dataclass(frozen=True)
class QuerySoftmax:
    """The running maximum and sums of the two rows that a thread holds."""

    scale_log2: Float32
    thread: Int32
    max: cute.Tensor
    sum: cute.Tensor  # (of the pair, row, sixteen), of this thread's keys
    factor: cute.Tensor  # the sum before the last step, in the present units; at last, the normalising factor
    sink: cute.Tensor

    @staticmethod
    def of(scale_log2: Float32, thread: Int32) -> "QuerySoftmax":
        top, factor, sink = (cute.make_rmem_tensor(ROWS, Float32) for _ in range(3))
        sums = cute.make_rmem_tensor((PAIR, ROWS, SIXTEENS), Float32)
        return QuerySoftmax(scale_log2, thread, top, sums, factor, sink)

    @cute.jit
    def read_sinks(self, heads: list, n: Extents, results: RowResults):
        """Once: all queries have the same heads."""
        for r in cutlass.range_constexpr(ROWS):
            self.sink[r] = load(results.sink + cutlass.min(heads[r], n.inner - 1))

    @cute.jit
    def reset(self):
        self.max.fill(-Float32.inf)
        self.sum.fill(0.0)

    def first_key(self, c: int, offset: Int32) -> Int32:
        """Which of eight keys the c-th of a pair is, in tiles that begin at this column."""
        return (self.thread % 4 * 2 + c - offset) & 7

    @cute.jit
    def take(self, scores: cute.Tensor, offsets: list, seen: list):
        """The query's own tile of keys, in the first eights of scores; -inf for keys that it does not see."""
        s = by_key(scores)
        for r in cutlass.range_constexpr(ROWS):
            for c in cutlass.range_constexpr(PAIR):
                later = self.thread % 4 * 2 + c < offsets[r]
                for i in cutlass.range_constexpr(EIGHTS):
                    s[c, r, i] = s[c, r, i + 1] if later else s[c, r, i]
            if seen[r] < SLAB:
                for c in cutlass.range_constexpr(PAIR):
                    key = self.first_key(c, offsets[r])
                    for i in cutlass.range_constexpr(EIGHTS):
                        s[c, r, i] = s[c, r, i] if key + 8 * i < seen[r] else -Float32.inf

    @cute.jit
    def step(self, scores: cute.Tensor):
        """scores <- exp(scale (scores - max)) with the new maxima; updates sum and factor."""
        s = by_key(scores)
        for r in cutlass.range_constexpr(ROWS):
            old, tops = self.max[r], [s[c, r, 0] for c in range(PAIR)]
            for i in cutlass.range_constexpr(1, EIGHTS):
                tops = [cute.arch.fmax(x, s[c, r, i]) for c, x in enumerate(tops)]
            top = cute.arch.fmax(old, cute.arch.warp_reduction_max(cute.arch.fmax(*tops), threads_in_group=4))
            self.max[r] = top
            shift, finite = self.shift(r), Float32(0.0) if top == -Float32.inf else top
            self.factor[r] = exp2((old - finite) * self.scale_log2)  # exactly 1 where the maximum stays
            for i in cutlass.range_constexpr(EIGHTS):
                for c in cutlass.range_constexpr(PAIR):
                    s[c, r, i] = exp2(s[c, r, i] * self.scale_log2 - shift)
            for i in cutlass.range_constexpr(SIXTEENS):
                for c in cutlass.range_constexpr(PAIR):
                    both = s[c, r, 2 * i] + s[c, r, 2 * i + 1]
                    self.sum[c, r, i] = self.sum[c, r, i] * self.factor[r] + both

    @cute.jit
    def finish(self, rows: list, exists: list, results: RowResults):
        """factor <- the factor that normalises O, with the sink; lse, without the sink, goes to memory.

        A query without keys (sum 0) gets factor 0 and lse -inf; a NaN stays a NaN.
        """
        for r in cutlass.range_constexpr(ROWS):
            sums = [[self.sum[c, r, i] for c in range(PAIR)] for i in range(SIXTEENS)]
            for distance in (2, 1):
                sums = [[x + cute.arch.shuffle_sync_bfly(x, offset=distance) for x in pair] for pair in sums]
            w = [a + b for a, b in sums]
            total = (w[0] + w[1]) + (w[2] + w[3])
            sees, shift = total != 0.0, self.shift(r)
            with_sink = total + exp2((self.sink[r] - shift * LN_2) * LOG2_E)
            self.factor[r] = cute.arch.rcp_approx(with_sink) if sees else Float32(0.0)
            lse = (cute.math.log2(total, fastmath=True) + shift) * LN_2
            if (self.thread % 4 == 0) & exists[r]:
                store(results.lse + rows[r], lse if sees else -Float32.inf)

    @cute.jit
    def shift(self, r: cutlass.Constexpr) -> Float32:
        """The number to subtract in the exponent; 0 for a row without keys, whose exponentials are exp2(-inf) = 0."""
        shift = self.max[r] * self.scale_log2
        return Float32(0.0) if self.max[r] == -Float32.inf else shift

    @cute.jit
    def share(self, scores: cute.Tensor, offsets: list, p: cute.Tensor):
        """P, rounded, to a (rows, keys) tile, each row's keys from its query's first one on.

        Neighbouring keys may be in two lanes, so each number is written alone. The swizzle exchanges eights of a row.
        """
        s, flat = by_key(scores), cute.recast_ptr(p.iterator, dtype=p.element_type)
        row = keep(self.thread // 32 * 16 + self.thread % 32 // 4)  # or else 32 addresses would stay in registers
        for i in cutlass.range_constexpr(EIGHTS):
            eight = row * SLAB + ((row & 7) ^ i) * 8
            for r in cutlass.range_constexpr(ROWS):
                for c in cutlass.range_constexpr(PAIR):
                    place = eight + self.first_key(c, offsets[r]) + r * 8 * SLAB
                    store(flat + place, s[c, r, i].to(p.element_type))


def by_key(scores: cute.Tensor) -> cute.Tensor:
    """An accumulator seen as (of the pair, row, eight)."""
    eights = cute.size(scores) // (PAIR * ROWS)
    return cute.make_tensor(scores.iterator, cute.make_layout((PAIR, ROWS, eights)))
