"""The weighted sums of products over heads, in the registers of a thread, which has a key."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from kernels.lib.ptx import relu
from kernels.lib.rows import store
from kernels.lib.scores import HALF, Arrays, Extents, first_seen, greatest_of_block

from .config import Config


@dataclass(frozen=True)
class HeadSums:
    """The weights of a thread's columns, and the sum of the query that it is at.

    Of two columns ReLU is two maxima, and the weighted sum one packed instruction. Maxima have half the rate of sums.
    In 8 bits products are so small that x + |x| is twice their ReLU exactly, and every other pair takes that instead,
    packed too: so both units have about the same work.
    """

    heads: int
    scaled: bool
    blocks: bool
    first: Int32  # of the thread's queries, within the block
    weights: cute.Tensor
    sums: cute.Tensor  # (even or odd columns, ReLU or twice that)

    @staticmethod
    def of(c: Config, half: Int32) -> "HeadSums":
        weights, sums = (cute.make_rmem_tensor(shape, Float32) for shape in (HALF, (2, 2)))
        return HeadSums(c.heads, c.scaled, c.blocks, half * (HALF // c.heads), weights, sums)

    @property
    def queries(self) -> int:
        return HALF // self.heads

    @cute.jit
    def take_weights(self, weights: cute.Pointer, entry: Int32, query0: Int32, n: Extents):
        """The weights of this thread's columns. A query that does not exist gets those of the last one."""
        for u in cutlass.range_constexpr(self.queries):
            query = cutlass.min(query0 + self.first + u, n.s_q - 1)
            row = weights + (Int64(entry) * n.s_q + query) * self.heads
            for j in cutlass.range_constexpr(0, self.heads, 2):
                pair = cute.make_tensor((row + j).align(8), cute.make_layout(2))
                own = cute.make_tensor(self.weights.iterator + (u * self.heads + j), cute.make_layout(2))
                cute.autovec_copy(pair, own)

    @cute.jit
    def add(self, products: cute.Tensor, column: cutlass.Constexpr):
        """Adds products of one query, from a column on; with its first ones the sum begins anew."""
        if cutlass.const_expr(column % self.heads == 0):
            self.sums.fill(0.0)
        for i in cutlass.range_constexpr(0, cute.size(products), 2):
            twice = int(self.scaled and i // 2 % 2 == 1)
            x, w = ((v[j], v[j + 1]) for v, j in ((products, i), (self.weights, column + i)))
            if cutlass.const_expr(twice):
                cut = cute.arch.add_packed_f32x2(x, (abs(x[0]), abs(x[1])))
            else:
                cut = (relu(x[0]), relu(x[1]))
            before = (self.sums[0, twice], self.sums[1, twice])
            self.sums[0, twice], self.sums[1, twice] = cute.arch.fma_packed_f32x2(cut, w, before)

    def seen(self, arrays: Arrays, entry: Int32, u: int, query0: Int32, key: Int32, n: Extents) -> Boolean | None:
        """Tells whether a key is not before the first that query number u sees, where blocks are to be judged."""
        return key >= first_seen(arrays, entry, query0 + self.first + u, n) if self.blocks else None

    @cute.jit
    def store(
        self,
        out: cute.Pointer,
        scale: Float32,
        seen: Boolean | None,
        u: cutlass.Constexpr,
        query0: Int32,
        n: Extents,
    ):
        """Stores the sum of this thread's query number u, times the key's scale, at out[query * stride]; of a block's
        keys, which are in neighbouring lanes, the greatest."""
        total, more = (self.sums[0, twice] + self.sums[1, twice] for twice in range(2))
        if cutlass.const_expr(self.scaled):
            total = (total + 0.5 * more) * scale
        stores = query0 + self.first + u < n.s_q
        if cutlass.const_expr(self.blocks):
            total, stores = greatest_of_block(total, seen, (1, 2, 4)), stores & (cute.arch.lane_idx() % 8 == 0)
        if stores:
            store(out + Int64(self.first + u) * n.stride, total)
