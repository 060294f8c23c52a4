"""The weighted sums of products over heads, in the registers of a thread."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels.lib.indexer import BLOCK
from kernels.lib.ptx import add_relu, keep
from kernels.lib.rows import store
from kernels.lib.scores import HALF, Arrays, Extents, first_seen, greatest_of_block
from kernels.lib.scores_hopper import HopperScoresConfig
from kernels.lib.wgmma import accumulator


@dataclass(frozen=True)
class HeadSums:
    """A warpgroup's products, and the weighted sums of them over heads.

    A thread's accumulator is indexed (c, r, j): column 8 j + 2 (lane % 4) + c, row r of its two.
    """

    heads: int
    blocks: bool
    half: Int32
    lane: Int32
    acc: cute.Tensor
    weights: cute.Tensor  # (c, j)

    @staticmethod
    def of(c: HopperScoresConfig, mma: cute.TiledMma, half: Int32, thread: Int32) -> "HeadSums":
        weights = cute.make_rmem_tensor((2, HALF // BLOCK), Float32)
        return HeadSums(c.heads, c.blocks, half, keep(thread % 4), accumulator(mma, HALF), weights)

    @property
    def queries(self) -> int:
        return HALF // self.heads

    @property
    def own_queries(self) -> int:
        """The number of these queries' sums that a lane ends up with: lanes 2 and 3 of a quad get the last ones."""
        return self.queries // 2

    @property
    def first(self) -> Int32:
        """The first of them, within the block."""
        return self.half * self.queries + self.lane // 2 * self.own_queries

    @cute.jit
    def take_weights(self, weights: cute.Pointer, entry: Int32, query0: Int32, n: Extents):
        """The weights of this thread's columns. A query that does not exist gets those of the last one."""
        for u in cutlass.range_constexpr(self.queries):
            query = cutlass.min(query0 + self.half * self.queries + u, n.s_q - 1)
            row = weights + ((Int64(entry) * n.s_q + query) * self.heads + self.lane * 2)
            for j in cutlass.range_constexpr(self.heads // BLOCK):
                pair = cute.make_tensor((row + j * BLOCK).align(8), cute.make_layout(2))
                cute.autovec_copy(pair, self.weights[None, u * (self.heads // BLOCK) + j])

    @cute.jit
    def place(self, out: cute.Pointer, n: Extents) -> cute.Pointer:
        """The place of this lane's first query, in a block that begins at `out`."""
        return out + Int64(self.first) * n.stride

    def seen(self, arrays: Arrays, entry: Int32, query0: Int32, key: Int32, n: Extents) -> tuple:
        """Tells, where blocks are to be judged, which of this lane's queries do not begin after this key."""
        queries = range(self.own_queries if self.blocks else 0)
        return tuple(key >= first_seen(arrays, entry, query0 + self.first + u, n) for u in queries)

    @cute.jit
    def store(self, out: cute.Pointer, scale: Float32, seen: tuple, query0: Int32, n: Extents):
        """Sums up the accumulated products, and stores them at out[query * stride] for this lane's queries.

        Of a block's keys, which are in lanes of four quads, the first lane stores the greatest.
        """
        acc = cute.make_tensor(self.acc.iterator, cute.make_layout((2, 2, HALF // BLOCK)))
        odd, high = self.lane % 2 == 1, self.lane >= 2
        for u in cutlass.range_constexpr(self.own_queries):
            sums = cute.make_rmem_tensor((2, 2), Float32)
            sums.fill(0.0)
            for j in cutlass.range_constexpr(self.heads // BLOCK):
                for c in cutlass.range_constexpr(2):
                    for which in cutlass.range_constexpr(2):
                        for r in cutlass.range_constexpr(2):
                            column = (u + which * self.own_queries) * (self.heads // BLOCK) + j
                            sums[r, which] = add_relu(acc[c, r, column], self.weights[c, column], sums[r, which])
            for r in cutlass.range_constexpr(2):
                first, second = sums[r, 0], sums[r, 1]
                sums[r, 0] = (second if high else first) + cute.arch.shuffle_sync_bfly(first if high else second, 2)
            first, second = sums[0, 0], sums[1, 0]
            total = (second if odd else first) + cute.arch.shuffle_sync_bfly(first if odd else second, 1)
            score, stores = total * scale, query0 + self.first + u < n.s_q
            if cutlass.const_expr(self.blocks):
                score, stores = greatest_of_block(score, seen[u], (4, 8, 16)), stores & (cute.arch.lane_idx() < 4)
            if stores:
                store(out + Int64(u) * n.stride, score)
